"""What the LM wrote, and its hidden state before that: windows of texts drawn from it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTH = 16
ALONE, AFTER = (4, 8, 12, 16), (0, 2, 4)
"""Where windows begin in texts that begin with nothing, and after prompts."""


def read_windows(lm: Any, file: Path, count: int, begin: int) -> tuple[Tensor, Tensor]:
    """Give hidden states, and the tokens after them: (n, d), (n, T); half of each kind of text."""
    drawn = np.load(file)
    found = []
    for name, steps in (("unconditional", ALONE), ("continuation", AFTER)):
        tokens = torch.from_numpy(drawn[name].astype(np.int64))
        starts = torch.zeros(len(tokens), dtype=torch.long)
        if name == "continuation":
            starts = torch.from_numpy(drawn["prompt_length"].astype(np.int64))
        chance = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(tokens), generator=chance)[: count // 2 // len(steps)]
        places = starts[rows, None] + torch.tensor(steps)
        found.append(_windows(lm, tokens[rows], places, begin))
    hidden, windows = map(torch.cat, zip(*found, strict=True))
    whole = (windows != begin).all(1)  # texts that ended are not what comes after a state
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))
    order = order[whole[order]]
    return hidden[order], windows[order]


@torch.no_grad()
def _windows(lm: Any, tokens: Tensor, places: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Read texts, (n, L), and cut windows at (n, k) places."""
    read = torch.cat([torch.full_like(tokens[:, :1], begin), tokens], 1)[:, : int(places.max()) + 1]
    hidden = []
    for ids, own in zip(torch.split(read, 250), torch.split(places, 250), strict=True):
        states = lm.model(ids).last_hidden_state
        hidden.append(states[torch.arange(len(ids))[:, None], own].flatten(0, 1).float())
    within = places[:, :, None] + torch.arange(LENGTH)
    cut = tokens[torch.arange(len(tokens))[:, None, None], within]
    return torch.cat(hidden), cut.flatten(0, 1)
