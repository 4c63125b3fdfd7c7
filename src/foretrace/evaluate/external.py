"""Import functions that a suite names as `module:function`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from foretrace.errors import InvalidInputError, reason


def is_function_name(source: str) -> bool:
    """Return whether a string has the form `module:function`."""
    module, colon, function = source.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), function))


def import_function(source: str, kind: str, expected: str) -> Callable[..., Any]:
    """Import `module:function`; an error names the kind of function, and what is expected."""
    module, _, function = source.partition(":")
    try:
        imported: Callable[..., Any] = getattr(import_module(module), function)
    except Exception as error:  # importing runs external code, which may raise anything
        raise InvalidInputError(
            f"The {kind} {source} cannot be imported ({reason(error)}). Pass a module that Python "
            f"finds (see PYTHONPATH), and a function in it {expected}."
        ) from error
    return imported
