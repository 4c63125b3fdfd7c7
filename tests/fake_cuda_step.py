"""A step of steering on a fake GPU, with its operations and bytes counted."""

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda import DeviceIndexing, OperationCounter, to_fake_cuda
from foretrace.steering import Steering
from foretrace.steering.advance import advance
from foretrace.steering.steering import StepPrices


def count_step(
    steering: Steering, rows: int, sizes: Mapping[int, int] | None = None, *, measure: bool = False
) -> tuple[OperationCounter, OperationCounter, StepPrices | None]:
    """Run a step of the first slots on a fake GPU; count advancing, and reweighting.

    Args:
        steering: The steering, with the kernels of a GPU and a request in every slot.
        rows: The number of rows.
        sizes: Dimensions to replace, so that a small HMM stands for a large one.
        measure: Whether to compute prices, which are returned.
    """
    vocab = steering.hmm.vocab_size
    index = steering._index([*range(rows)], (rows, vocab))
    assert index is not None
    mode = FakeTensorMode()
    on_device, device_index = to_fake_cuda((steering, index), mode, sizes)
    with mode, DeviceIndexing():
        tokens = torch.zeros(rows, dtype=torch.long, device="cuda")
        logits = torch.zeros(rows, (sizes or {}).get(vocab, vocab), device="cuda")
        with OperationCounter() as advancing:
            advance(on_device.state, device_index, on_device.pool, tokens, None)
        with OperationCounter() as reweighting:
            prices = on_device._steer_(logits, device_index, measure)
    return advancing, reweighting, prices
