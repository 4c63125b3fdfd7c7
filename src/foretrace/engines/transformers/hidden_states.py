"""Hidden states of texts that a language model reads, without the layers after them."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace import _io
from foretrace.attribute.fitting.examples import marks_words_by_space

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_TOKENS = 64  # that are read of a text
BATCH_TOKENS = 2_048
IDENTITY_VALUES = 64  # of a parameter, about
_Stop = Callable[[Any], None]


class TextBatch(NamedTuple):
    """Texts of similar length.

    Attributes:
        texts: Their indices.
        ids: Their token ids after the start, padded on the right. A causal LM needs no mask.
    """

    texts: list[int]
    ids: Tensor


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Encode texts as continuations, and cut them at MAX_TOKENS."""
    prefix = " " if marks_words_by_space(tokenizer) else ""
    spaced = [text if not text or text[0].isspace() else prefix + text for text in texts]
    encoded = tokenizer(spaced, add_special_tokens=False, split_special_tokens=True)
    return [ids[:MAX_TOKENS] for ids in encoded["input_ids"]]


def batches(rows: Sequence[Sequence[int]], start: Sequence[int]) -> Iterator[TextBatch]:
    """Yield texts of similar length after a start, with about BATCH_TOKENS tokens in all."""
    batch: list[int] = []
    for row in sorted(range(len(rows)), key=lambda row: len(rows[row])):
        if batch and (len(batch) + 1) * (len(rows[row]) + len(start)) > BATCH_TOKENS:
            yield _padded(batch, rows, start)
            batch = []
        batch.append(row)
    if batch:
        yield _padded(batch, rows, start)


def _padded(batch: list[int], rows: Sequence[Sequence[int]], start: Sequence[int]) -> TextBatch:
    sequences = [torch.tensor([*start, *rows[row]] or [0]) for row in batch]
    return TextBatch(batch, pad_sequence(sequences, batch_first=True))


def middle_states(lm: "PreTrainedModel", ids: Tensor) -> Tensor:
    """Run the LM up to its middle layer: (n, T) -> (n, T, d)."""
    depth = lm.config.get_text_config().num_hidden_layers
    lists = (module for module in lm.modules() if isinstance(module, torch.nn.ModuleList))
    layers = next(layers for layers in lists if len(layers) == depth)
    middle = layers[max(0, depth // 2 - 1)]

    def register(stop: _Stop) -> Any:
        return middle.register_forward_hook(lambda _layer, _inputs, output: stop(output))

    return _run_until(lm, ids, register)


def last_states(lm: "PreTrainedModel", ids: Tensor) -> Tensor:
    """Run the LM up to its head: (n, T) -> (n, T, d), what the head makes logits of."""
    head = lm.get_output_embeddings()

    def register(stop: _Stop) -> Any:
        return head.register_forward_pre_hook(lambda _head, inputs: stop(inputs))

    return _run_until(lm, ids, register)


def lm_identity(lm: "PreTrainedModel") -> str:
    """Return the dtype of a language model and a checksum of some values of all parameters.

    Models of one architecture that were trained further have another one.
    """
    parts = []
    for _, parameter in sorted(lm.named_parameters()):
        values = parameter.detach().flatten()
        parts.append(values[:: max(1, len(values) // IDENTITY_VALUES)].float().cpu())
    return f"{lm.dtype}-{_io.checksum(torch.cat(parts)):08x}"


class _StopError(Exception):
    """Ends a run of the LM."""


@torch.inference_mode()
def _run_until(lm: "PreTrainedModel", ids: Tensor, register: Callable[[_Stop], Any]) -> Tensor:
    """Run the LM until a hook is called, and return what it is called with."""
    reached: list[Tensor] = []

    def stop(states: Any) -> None:
        reached.append(states if isinstance(states, Tensor) else states[0])
        raise _StopError

    hook = register(stop)
    try:
        lm(ids.to(lm.device), use_cache=False)
    except _StopError:
        pass
    finally:
        hook.remove()
    return reached[0]
