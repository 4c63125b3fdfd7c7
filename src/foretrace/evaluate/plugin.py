"""Functions from outside foretrace that a suite names as `module:function`, such as methods."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foretrace.errors import InvalidInputError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""A function from the token ids of rows, (rows, T), and the logits of their next tokens, (rows, V),
to changed logits. It returns a new tensor."""
Prompts = Sequence[Sequence[int]]
"""The token ids of each prompt of a batch."""


@dataclass(frozen=True)
class Plugin:
    """What a method changes while a batch is generated. All parts are optional.

    Attributes:
        processor: A function from the prompts of a batch to a logits processor for that batch. The
            rows of the processor are the continuations of the first prompt, then of the second, and
            so on. Ids are padded on the left.
        hook: A function that returns a context manager. It is active while a batch is generated. It
            may change the LM, and restores it at the end.
        model: A model that generates instead of the LM. It has the LM's tokenizer.
        top_p: The nucleus of sampling, for methods that choose the candidates themselves. By
            default, that of the evaluation.
        identity: A checksum of what the options do not tell, such as trained weights. Texts are
            generated again if it changes.

    Example:
        >>> from foretrace.evaluate import Plugin
        >>> sharper = Plugin(processor=lambda prompts: lambda ids, logits: 2 * logits)
        >>> sharper.has_price
        True
    """

    processor: Callable[[Prompts], LogitsProcessor] | None = None
    hook: Callable[[], AbstractContextManager[Any]] | None = None
    model: "PreTrainedModel | None" = None
    top_p: float | None = None
    identity: str = ""

    @property
    def has_price(self) -> bool:
        """Whether the price can be measured: nothing but the processor changes the logits.

        The price is measured before top-p. A method with its own `top_p` has a filter in its place.
        """
        return self.processor is not None and self.keeps_lm and self.top_p is None

    @property
    def keeps_lm(self) -> bool:
        """Whether the unchanged LM computes the logits before a processor."""
        return self.hook is None and self.model is None

    def active(self) -> AbstractContextManager[Any]:
        """Return a context manager to generate a batch in: the hook's, or one without effect."""
        return nullcontext() if self.hook is None else self.hook()


NO_PLUGIN = Plugin()
"""A plug-in that changes nothing."""


def load_plugin(
    source: str,
    options: Mapping[str, Any],
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
) -> Plugin:
    r"""Call the function of a plug-in.

    Args:
        source: `module:function`.
        options: The options of the function.
        lm: The language model.
        tokenizer: Its tokenizer.

    Returns:
        The plug-in.

    Raises:
        InvalidInputError: If the function cannot be imported, does not accept the options, or
            returns something else.

    Example:
        >>> import sys
        >>> from foretrace.evaluate.plugin import load_plugin
        >>> code = "from foretrace.evaluate import Plugin\n"
        >>> code += "def other(lm, tokenizer): return Plugin(model=lm)\n"
        >>> _ = (folder / "docstring_plugin.py").write_text(code)
        >>> sys.path.append(str(folder))
        >>> load_plugin("docstring_plugin:other", {}, model, tokenizer).model is model
        True
    """
    if not is_function_name(source):
        raise InvalidInputError(f"The plug-in '{source}' is not known. Write module:function.")
    function = import_function(source, "plug-in", "from a language model to a Plugin")
    try:
        plugin = function(lm, tokenizer, **options)
    except TypeError as error:
        raise InvalidInputError(
            f"The plug-in {source} cannot be called ({reason(error)}). It needs the signature "
            f"function(lm, tokenizer, **options), with the options {json.dumps(dict(options))}."
        ) from error
    if not isinstance(plugin, Plugin):
        raise InvalidInputError(
            f"The plug-in {source} returned {type(plugin).__name__}. It must return a "
            f"foretrace.evaluate.Plugin."
        )
    return plugin


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
