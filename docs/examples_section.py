"""Griffe extension: read the section `Example:` of docstrings as code, like `Examples:`."""

from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    """Renames the section before Griffe parses it: it knows only the plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
