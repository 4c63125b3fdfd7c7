"""A step of steering on a fake GPU, with its operations and bytes counted."""

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda import DeviceIndexing, OperationCounter, to_fake_cuda
from foretrace.steering import SlotSteering, automaton_plan
from foretrace.steering.slot_state import advance


def count_step(
    steering: SlotSteering, rows: int, sizes: Mapping[int, int] | None = None
) -> tuple[OperationCounter, OperationCounter]:
    """Run a step of the first slots on a fake GPU; count advancing, and reweighting.

    Args:
        steering: The steering, with a request in every slot.
        rows: The number of rows.
        sizes: Dimensions to replace, so that a small HMM stands for a large one.
    """
    vocab = steering.hmm.vocab_size
    on_cpu = automaton_plan.is_cpu
    automaton_plan.is_cpu = lambda pool: False  # plan as for a GPU
    try:
        plan = steering._plan([*range(rows)], (rows, vocab))
    finally:
        automaton_plan.is_cpu = on_cpu
    assert plan is not None
    mode = FakeTensorMode()
    on_device, device_plan = to_fake_cuda((steering, plan), mode, sizes)
    with mode, DeviceIndexing():
        tokens = torch.zeros(rows, dtype=torch.long, device="cuda")
        logits = torch.zeros(rows, (sizes or {}).get(vocab, vocab), device="cuda")
        with OperationCounter() as advancing:
            advance(on_device.state, device_plan, on_device.pool, tokens, None)
        with OperationCounter() as reweighting:
            on_device._steer_(logits, device_plan)
    return advancing, reweighting
