"""Many attributes in one folder, found by name."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from foretrace.attribute.attribute import Attribute
from foretrace.errors import InvalidFileError, InvalidInputError

SUFFIX = ".safetensors"
UNFIT = re.compile(r'^\.|[/\\%:*?"<>|\x00-\x1f]')
LONGEST = 200  # bytes of a file's name, with room for the ending and for a scratch file's


class AttributeStore(Mapping[str, Attribute]):
    """A folder with one file per attribute, read when asked for: `store["nontoxic"]`.

    A name is its file's name, so one attribute is found without a look at the others.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, tokenizer_fingerprint: str | None = None
    ) -> None:
        self.folder = Path(folder)
        self.tokenizer_fingerprint = tokenizer_fingerprint

    def path(self, name: str) -> Path:
        """Give the file of that name: characters that file systems dislike are percent-encoded."""
        encoded = UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", name)
        if not 0 < len(encoded.encode("utf-8", "replace")) <= LONGEST:
            raise InvalidInputError(
                f"An attribute in a store needs a name of 1 to {LONGEST} bytes, not '{name[:40]}'."
            )
        return self.folder / f"{encoded}{SUFFIX}"

    def add(self, attribute: Attribute) -> None:
        """Write an attribute under its own name, in place of one that had the name before."""
        attribute.save(self.path(attribute.name))

    def __getitem__(self, name: str) -> Attribute:
        if name not in self:
            raise KeyError(name)
        return Attribute.load(self.path(name), tokenizer_fingerprint=self.tokenizer_fingerprint)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self.path(name).is_file()
        except (InvalidInputError, ValueError):
            return False

    def __iter__(self) -> Iterator[str]:
        if not self.folder.is_dir():
            raise InvalidFileError(f"There is no folder {self.folder}. Check the spelling.")
        with os.scandir(self.folder) as entries:
            files = [
                entry.name for entry in entries if entry.name.endswith(SUFFIX) and entry.is_file()
            ]
        named = [(unquote(file.removesuffix(SUFFIX)), file) for file in files]
        yield from sorted(name for name, file in named if self._is_file_of(name, file))

    def _is_file_of(self, name: str, file: str) -> bool:
        """Tell whether this store would look for the name there."""
        try:
            return self.path(name).name == file
        except InvalidInputError:
            return False

    def __len__(self) -> int:
        return sum(1 for _ in self)
