"""Pad batches of token ids on the left, and cut sequences at the end-of-text token."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left; return their ids and their mask, (n, longest) each.

    The mask marks the padding, so any token id can be used: some tokenizers have no pad token.
    """
    longest = max(map(len, prompts))
    rows = [[pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompts]
    masks = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(rows), torch.tensor(masks)


def model_inputs(ids: Tensor, mask: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the inputs of a model for the last ids of rows that are padded on the left.

    Args:
        ids: New token ids, (n, T).
        mask: Mask of the whole rows, (n, T or more); 0 where padded.
        device: The model's device.
    """
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def cut_at_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Drop the padding after the first end-of-text token; that token is kept."""
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]
