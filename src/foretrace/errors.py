"""Exceptions of foretrace. Messages say what happened, what was expected and what to do."""


class ForetraceError(ValueError):
    """Base class of all errors that foretrace raises on purpose.

    It is a `ValueError`, so code that catches `ValueError` catches these errors too.

    Example:
        >>> try:
        ...     ft.HMM.random(4, 10, eos_token_id=99)
        ... except ft.ForetraceError as error:
        ...     print(error)
        eos_token_id is 99, but the vocabulary ends at 9.
    """


class InvalidInputError(ForetraceError):
    """An argument has the wrong type, shape or value."""


class UnknownNameError(InvalidInputError, KeyError):
    """There is no attribute of this name. It is a `KeyError` too, as for other mappings."""

    def __str__(self) -> str:
        return ValueError.__str__(self)  # KeyError would show the message in quotes


class InvalidModelError(ForetraceError):
    """The given tables do not form a hidden Markov model."""


class InvalidFileError(ForetraceError):
    """A file or folder is missing, damaged or has another format than expected."""


class TokenizerMismatchError(ForetraceError):
    """Two objects that must share a tokenizer were made with different ones."""


class ServerError(ForetraceError):
    """A server gives no valid answer to a request."""


class ServerUnavailableError(ServerError):
    """A server cannot be reached, or refuses every request, as with an invalid key."""


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
