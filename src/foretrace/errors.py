"""What goes wrong, said for people: what happened, what was expected, what to do."""


class ForetraceError(ValueError):
    """Base of every error that foretrace raises on purpose."""


class InvalidInputError(ForetraceError):
    """An argument cannot be used as it was given."""


class InvalidModelError(ForetraceError):
    """Tables that do not make a hidden Markov model."""


class InvalidFileError(ForetraceError):
    """A file or folder that cannot be read as what it should be."""


class TokenizerMismatchError(ForetraceError):
    """Two things that must share a tokenizer were made with different ones."""


def reason(error: BaseException) -> str:
    """Give the first line of what another library's error says, or at least its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
