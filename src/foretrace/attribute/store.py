"""A folder of attributes, found by name."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from foretrace.attribute.attribute import Attribute
from foretrace.attribute.expression import unknown_names
from foretrace.errors import InvalidFileError, InvalidInputError

SUFFIX = ".safetensors"
ESCAPED = re.compile(r'^\.|[/\\%:*?"<>|\x00-\x1f]')
MAX_NAME_BYTES = 200  # leaves room for the suffix and the name of a temporary file


class AttributeStore(Mapping[str, Attribute]):
    """A folder with one file per attribute, as a mapping from names to attributes.

    Every lookup of a name reads its file, and no other: the file name is the name of the attribute.
    An unknown name raises an error that is a `KeyError` and a `ForetraceError`.

    Args:
        folder: The folder. It may be created later.
        tokenizer_fingerprint: The fingerprint of the tokenizer in use. Attributes of another
            tokenizer are refused.

    Attributes:
        folder: The folder.
        tokenizer_fingerprint: The fingerprint to compare with.

    Example:
        >>> store = ft.AttributeStore(folder)
        >>> store.add(attribute)
        >>> list(store)
        ['nontoxic']
        >>> store["nontoxic"].name
        'nontoxic'
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, tokenizer_fingerprint: str | None = None
    ) -> None:
        self.folder = Path(folder)
        self.tokenizer_fingerprint = tokenizer_fingerprint

    def path(self, name: str) -> Path:
        """Return the file of a name, also if it does not exist; special characters are encoded.

        Raises:
            InvalidInputError: If the name is empty or too long.

        Example:
            >>> ft.AttributeStore(folder).path("a/b").name
            'a%2Fb.safetensors'
        """
        encoded = ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", name)
        if not 0 < len(encoded.encode("utf-8", "replace")) <= MAX_NAME_BYTES:
            raise InvalidInputError(
                f"An attribute in a store needs a name of 1 to {MAX_NAME_BYTES} bytes, not "
                f"'{name[:40]}'."
            )
        return self.folder / f"{encoded}{SUFFIX}"

    def add(self, attribute: Attribute) -> None:
        """Write an attribute under its name; replace an attribute of the same name.

        Args:
            attribute: The attribute.

        Raises:
            InvalidInputError: If its name is empty or too long.

        Example:
            >>> ft.AttributeStore(folder).add(attribute.renamed("friendly"))
        """
        attribute.save(self.path(attribute.name))

    def __getitem__(self, name: str) -> Attribute:
        if name not in self:
            raise unknown_names([name], self if self.folder.is_dir() else ())
        return Attribute.load(self.path(name), tokenizer_fingerprint=self.tokenizer_fingerprint)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self.path(name).is_file()
        except (InvalidInputError, ValueError):
            return False

    def __iter__(self) -> Iterator[str]:
        """Yield the names in alphabetical order; skip files whose name `path` cannot produce."""
        if not self.folder.is_dir():
            raise InvalidFileError(f"There is no folder {self.folder}. Check the spelling.")
        with os.scandir(self.folder) as entries:
            files = [
                entry.name for entry in entries if entry.name.endswith(SUFFIX) and entry.is_file()
            ]
        names_and_files = [(unquote(file.removesuffix(SUFFIX)), file) for file in files]
        yield from sorted(name for name, file in names_and_files if self._is_file_of(name, file))

    def _is_file_of(self, name: str, file: str) -> bool:
        """Return whether `path(name)` is this file."""
        try:
            return self.path(name).name == file
        except InvalidInputError:
            return False

    def __len__(self) -> int:
        return sum(1 for _ in self)
