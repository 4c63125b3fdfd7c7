"""Relative errors of the hidden states that a probe reads."""

import torch
from torch import Tensor

from foretrace.context.head import Head
from foretrace.context.probe import Probe
from foretrace.errors import InvalidInputError

NUM_STATES = 64
SPREAD = 5.0  # the standard deviation of logits of synthetic states


def synthetic_errors(probe: Probe) -> dict[str, float]:
    """Return errors for random states, from logits in float32 and rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(NUM_STATES, len(probe.inverse), generator=generator)
    rows = probe.rows.float()
    scale, softcap = probe.config.scale, probe.config.softcap
    states = states * SPREAD / scale / (states @ rows.T).std()
    head = Head(rows, probe.bias, scale, softcap)
    logits = torch.zeros(NUM_STATES, probe.vocab_size)
    logits[:, probe.tokens] = head.logits(states)
    return {
        f"synthetic states, {name}": state_error(probe, logits.to(dtype), states)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }


def state_error(probe: Probe, logits: Tensor, states: Tensor) -> float:
    """Return the largest relative error of states (n, d) that are read from their logits (n, V)."""
    found = _read_all(probe, logits)
    return float(((found - states.float()).norm(dim=1) / states.float().norm(dim=1)).max())


def logit_error(probe: Probe, head: Head, logits: Tensor) -> float:
    """Return the largest relative error of all logits (n, V), computed again from their states.

    It needs no states of the LM. A constant that is added to all logits of a row does not count.
    """
    again = head.logits(_read_all(probe, logits))
    centred = logits.float() - logits.float().mean(1, keepdim=True)
    again = again - again.mean(1, keepdim=True)
    return float(((again - centred).norm(dim=1) / centred.norm(dim=1)).max())


def _read_all(probe: Probe, logits: Tensor) -> Tensor:
    states, readable = probe.read(logits, solve=False)
    if not bool(readable.all()):
        raise InvalidInputError(
            f"{int((~readable).sum())} of {len(readable)} rows of logits do not fit the head of "
            f"{probe.config.source or 'the LM'}: its logits are no product of the head and the "
            f"last hidden state that foretrace knows. This LM cannot be read from its logits."
        )
    return states
