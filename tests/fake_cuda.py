"""Test doubles of a GPU: tensors on a fake `cuda` device, and a count of the operations on them.

Fake tensors have shapes, dtypes and devices, but no values. An operation on tensors of different
devices raises, and so does whatever would wait for a device to read a value.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


def to_fake_cuda(value: T, mode: FakeTensorMode, known: dict[int, Any] | None = None) -> T:
    """Copy an object with all tensors that it holds to a fake GPU, at whatever depth they are."""
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = _copied(value, mode, known)
    result: T = known[id(value)]
    return result


def _copied(value: Any, mode: FakeTensorMode, known: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        with mode:
            return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_fake_cuda(item, mode, known) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_fake_cuda(item, mode, known) for item in value)
    if type(value).__module__.startswith("foretrace") and hasattr(value, "__dict__"):
        copied = copy.copy(value)
        known[id(value)] = copied
        for name, item in vars(value).items():
            object.__setattr__(copied, name, to_fake_cuda(item, mode, known))
        return copied
    return value


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch, views included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and run it."""
        if func.namespace != "prim":  # an attribute of a fake tensor
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class DeviceIndexing(TorchFunctionMode):
    """Indexing on a fake GPU, and a refusal of what would wait for a real one.

    `tensor[index]` needs a build of torch with CUDA even for fake tensors; the operations that it
    consists of do not. Lists as indices and `torch.tensor(..., device="cuda")` are copied to the
    device, and torch waits for that.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            raise AssertionError("torch.tensor(..., device=...) waits for the device")
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        if func is Tensor.__invert__:
            return torch.bitwise_not(*args)
        if func is Tensor.__setitem__:
            return _set(*args)
        return func(*args, **kwargs)


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    view, tensors = _basic_index(tensor, index)
    result: Tensor = torch.ops.aten.index(view, tensors) if tensors else view
    return result


def _set(tensor: Tensor, index: Any, value: Any) -> None:
    view, tensors = _basic_index(tensor, index)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if tensors:
        torch.ops.aten.index_put_(view, tensors, value)
    else:
        torch.ops.aten.copy_(view, value)


def _basic_index(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Apply slices, numbers and None; return the view and the tensors that index it."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, list) for item in items):
        raise AssertionError("an index that is a list waits for the device")
    aten, tensors, dim = torch.ops.aten, [], 0
    for item in items:
        if item is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(item, slice) and item.indices(tensor.shape[dim]) != _whole(tensor, dim):
            tensor = aten.slice(tensor, dim, item.start, item.stop, item.step or 1)
        elif isinstance(item, int):
            tensor = aten.select(tensor, dim, item)
            continue
        tensors.append(item if isinstance(item, Tensor) else None)
        dim += 1
    return tensor, tensors if any(item is not None for item in tensors) else []


def _whole(tensor: Tensor, dim: int) -> tuple[int, int, int]:
    """The slice of all elements, which torch skips as well."""
    return (0, tensor.shape[dim], 1)
