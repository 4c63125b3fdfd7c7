"""SASA (Ko et al. 2025): steer by the margin of a linear classifier of the LM's own states.

The classifier is Bayes-optimal for states that are normally distributed with one covariance for
both sides: its margin is w . h + b, with w = covariance^-1 (mean of the texts with the attribute -
mean of the others). A state is the last hidden state at the last token of a text. At every step,
beta times the margin of the text with a candidate for its next token is added to the candidate's
logit.

Differences from the paper: only the most likely tokens of the LM's nucleus are candidates, and at
most `candidates` of them, because each has to be read. Other tokens get the mean margin of the
candidates, by probability, so that they are not excluded. All candidates of a text are read in one
pass: each sees the text and itself. The covariance has a small ridge. Margins are divided by their
standard deviation on the texts of the fit, so that beta means the same for every attribute. The
authors' implementation in AISteer360 adds beta times the softmax of the candidates' margins, which
is at most beta; here the margins themselves are added, as in the formula of the paper.
"""

from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace import _io
from foretrace.engines.transformers.batch import growing_cache, model_inputs, pad_left
from foretrace.evaluate import Plugin
from foretrace.evaluate.plugin import LogitsProcessor, Prompts
from peers.parts import checksum, is_made, part, require, write_record
from peers.states import StateReader

SUBSPACE = "subspace.safetensors"
RIDGE = 1e-3  # of the mean variance
CANDIDATES = 20


def build(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attribute: str,
    beta: float,
    candidates: int = CANDIDATES,
    filter_p: float = 0.9,
) -> Plugin:
    """Build the plug-in.

    Args:
        lm: The language model.
        tokenizer: Its tokenizer.
        attribute: The attribute whose classifier is used.
        beta: The factor of the margin.
        candidates: Tokens at most whose margin is computed at a step.
        filter_p: The nucleus that candidates are taken from.
    """
    file = require(part(attribute, SUBSPACE))
    tensors, _ = _io.read_tensors(file)
    normal, offset = tensors["normal"], tensors["offset"]

    def processor(prompts: Prompts) -> LogitsProcessor:
        reader = CandidateReader(lm, prompts)

        def steer(ids: Tensor, logits: Tensor) -> Tensor:
            top, tokens, inside = nucleus_top(logits, candidates, filter_p)
            margins = reader.states(ids, tokens).float() @ normal + offset
            weights = top.masked_fill(~inside, -torch.inf).softmax(-1)
            mean = (weights * margins).sum(-1, keepdim=True)
            shift = (beta * (margins - mean)).masked_fill(~inside, 0.0)
            return logits.scatter_add(1, tokens, shift)

        return steer

    return Plugin(processor=processor, identity=checksum(file))


def nucleus_top(logits: Tensor, most: int, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most likely tokens of the nucleus: logits, tokens, and which are inside: (n, k).

    k is the greatest number of tokens inside of any row, and at most `most`.
    """
    top, tokens = logits.topk(min(most, logits.shape[1]))
    probability = (top - logits.logsumexp(-1, keepdim=True)).exp()
    inside = probability.cumsum(-1) - probability < top_p
    width = int(inside.sum(-1).amax())
    return top[:, :width], tokens[:, :width], inside[:, :width]


class CandidateReader:
    """Reads along with the LM, and reads several candidates for the next token in one pass.

    Args:
        lm: The language model.
        prompts: The token ids of each prompt.
    """

    def __init__(self, lm: PreTrainedModel, prompts: Prompts) -> None:
        self.lm, self.prompts = lm, prompts
        self.cache, self.mask = growing_cache(), torch.zeros(0, 0, dtype=torch.long)

    @torch.inference_mode()
    def states(self, ids: Tensor, candidates: Tensor) -> Tensor:
        """Return the last hidden state at every candidate: (n, T) and (n, k) ids -> (n, k, d).

        The first call reads the prompts. Every call also reads the last token of each row.
        """
        if not len(self.mask):
            self._read_prompts(len(ids) // len(self.prompts))
        self.mask = pad(self.mask, (0, 1), value=1)
        held, count = self.mask.shape[1], candidates.shape[1]
        visible = pad(self.mask[:, None].bool().repeat(1, 1 + count, 1), (0, count))
        visible[:, 1:, held:] = torch.eye(count, dtype=torch.bool)
        hidden = torch.zeros(visible.shape, dtype=self.lm.dtype)
        hidden.masked_fill_(~visible, torch.finfo(self.lm.dtype).min)
        last = self.mask.sum(1, keepdim=True) - 1
        positions = torch.cat([last, (last + 1).expand(-1, count)], 1)
        output = self.lm.base_model(
            input_ids=torch.cat([ids[:, -1:], candidates], 1),
            attention_mask=hidden[:, None],
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.crop(-count)  # forget the candidates
        states: Tensor = output.last_hidden_state[:, 1:]
        return states

    def _read_prompts(self, copies: int) -> None:
        """Read all but the last token of each prompt, for all its copies."""
        ids, mask = pad_left([prompt[:-1] for prompt in self.prompts], 0)
        if ids.shape[1]:
            inputs = model_inputs(ids, mask, self.lm.device)
            self.lm.base_model(**inputs, past_key_values=self.cache, use_cache=True)
            self.cache.batch_repeat_interleave(copies)
        self.mask = mask.repeat_interleave(copies, 0).long().view(len(mask) * copies, -1)


def fit_subspace(reader: StateReader, file: Path) -> None:
    """Compute the classifier of an attribute; nothing if it is there."""
    inputs = reader.identity(("subspace", RIDGE))
    if is_made(file, inputs):
        return
    states, start = reader.states, perf_counter()
    normal, offset = linear_classifier(states.ends, states.end_signs)
    seconds = states.seconds + perf_counter() - start
    _io.write_tensors(file, {"normal": normal, "offset": offset}, {})
    write_record(file, inputs, seconds, len(reader.texts))


def linear_classifier(states: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return w (d,) and b () of the Bayes-optimal classifier with equal priors: (n, d), (n,).

    Margins of the given states have a standard deviation of 1.
    """
    states = states.double()
    sides = [states[signs > 0], states[signs < 0]]
    means = [side.mean(0) for side in sides]
    centred = torch.cat([side - mean for side, mean in zip(sides, means, strict=True)])
    covariance = centred.T @ centred / len(centred)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean())
    normal = torch.linalg.solve(covariance, means[0] - means[1])
    offset = -normal @ (means[0] + means[1]) / 2
    scale = (states @ normal + offset).std()
    return (normal / scale).float(), (offset / scale).float()
