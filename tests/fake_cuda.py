"""Test doubles of a GPU: tensors on a fake `cuda` device, and a count of the operations on them.

Fake tensors have shapes, dtypes and devices, but no values. An operation on tensors of different
devices raises, and so does whatever would wait for a device to read a value.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
VIEWS = {"view", "slice", "unsqueeze", "squeeze", "select", "unbind", "expand", "permute", "t"}


def to_fake_cuda(value: T, mode: FakeTensorMode, sizes: Mapping[int, int] | None = None) -> T:
    """Copy an object with all tensors that it holds to a fake GPU, at whatever depth they are.

    Args:
        value: The object.
        mode: The mode that makes tensors fake.
        sizes: Dimensions to replace, so that a small object stands for a large one.
    """
    result: T = _Copies(mode, sizes or {}).of(value)
    return result


class _Copies:
    """Copies by the identity of what is copied, so that shared objects stay shared."""

    def __init__(self, mode: FakeTensorMode, sizes: Mapping[int, int]) -> None:
        self.mode, self.sizes = mode, sizes
        self.known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = self._copied(value)
        return self.known[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            shape = [self.sizes.get(size, size) for size in value.shape]
            with self.mode:
                return torch.empty(shape, dtype=value.dtype, device="cuda")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        if type(value).__module__.startswith("foretrace") and hasattr(value, "__dict__"):
            copied = self.known[id(value)] = copy.copy(value)
            for name, item in vars(value).items():
                object.__setattr__(copied, name, self.of(item))
            return copied
        return value


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch, views included, and the bytes that they move.

    Attributes:
        names: The operations.
        nbytes: Bytes read and written. Operations with an index read and write what it selects.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and run it."""
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # an attribute of a fake tensor
            self.names.append(str(func))
            self.nbytes += _bytes_moved(func, args, result)
        return result


def _bytes_moved(func: Any, args: Any, result: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    name = func.overloadpacket.__name__
    inputs = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)]
    outputs = [out for out in tree_leaves(result) if isinstance(out, Tensor)]
    if name in VIEWS or name.startswith(("empty", "new_empty")):
        return 0
    if name in ("index", "gather"):
        return 2 * _nbytes(outputs) + _nbytes(inputs[1:])
    if name in ("index_put_", "index_add_", "scatter_", "scatter_add_", "scatter_add"):
        return 2 * _nbytes(inputs[1:])
    return _nbytes(inputs) + _nbytes(outputs)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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
