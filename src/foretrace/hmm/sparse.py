"""Sparse emission probabilities with a rank-one background.

    p(x | z) = scale[z] * values[x, z] + leak[z] * background[x]

`values` is sparse (CSR by token). The background approximates the omitted entries. `scale` is
computed at construction, so that every state's distribution sums to 1 in every dtype of `values`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.errors import InvalidModelError
from foretrace.hmm.emission import EmissionSubset, csr, csr_rows, uniforms
from foretrace.hmm.probability import (
    blocks_of,
    dtype_name,
    require_table_dtype,
    transposed,
    working_dtype,
)

INDEX_DTYPES = (torch.int64, torch.int32)
VECTOR_PRODUCTS = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]  # CSR needs it


@dataclass(frozen=True, eq=False)
class SparseEmission:
    """Emission probabilities as sparse entries plus a rank-one background.

    p(x | z) = scale[z] * values[x, z] + leak[z] * background[x], where `scale` normalises the
    distribution of every state. `HMM.sparsify` builds it from a dense table.

    Attributes:
        offsets: CSR offsets, (V + 1,). The entries of token x are `offsets[x]:offsets[x + 1]`.
        states: State of every entry, (entries,). Ascending within a token, without duplicates.
        values: Probability of every entry before scaling, (entries,).
        background: Token distribution that all states share, (V,).
        leak: Weight of the background for every state, (h,), in [0, 1].

    Raises:
        InvalidModelError: The tensors have wrong dtypes, shapes or values.

    Example:
        >>> from foretrace.hmm import SparseEmission
        >>> emission = SparseEmission(
        ...     offsets=torch.tensor([0, 1, 2]),
        ...     states=torch.tensor([0, 1]),
        ...     values=torch.tensor([0.5, 0.5]),
        ...     background=torch.tensor([0.5, 0.5]),
        ...     leak=torch.tensor([0.5, 0.5]),
        ... )
        >>> emission.of_tokens(torch.tensor([0, 1]))
        tensor([[0.7500, 0.2500],
                [0.2500, 0.7500]])
    """

    kind: ClassVar[str] = "sparse+background"
    offsets: Tensor
    states: Tensor
    values: Tensor
    background: Tensor
    leak: Tensor
    _scale: Tensor = field(init=False, repr=False)  # (h,)
    _matrix: Tensor = field(init=False, repr=False)  # (V, h), CSR in working precision
    _bounds: NDArray[np.int32] = field(init=False, repr=False)  # offsets, on the host
    _max_entries: int = field(init=False, repr=False)  # of a token

    def __post_init__(self) -> None:
        self._check()
        work = working_dtype(self.values.dtype)
        totals = torch.zeros_like(self.leak, dtype=torch.float64)
        totals.index_add_(0, self.states.long(), self.values.to(torch.float64))
        # 32-bit indices: twice as fast in MKL and cuSPARSE, and half the memory.
        offsets, states = self.offsets.to(torch.int32), self.states.to(torch.int32)
        derived: dict[str, Any] = {
            "offsets": offsets,
            "states": states,
            "background": self.background.to(work),
            "leak": torch.where(totals > 0, self.leak, 1.0).to(work),
            "_scale": self._derive_scale(totals).to(work),
            "_matrix": csr(
                offsets, states, self.values.to(work), (self.vocab_size, self.num_states)
            ),
        }
        bounds = offsets.cpu().numpy()
        derived |= {"_bounds": bounds, "_max_entries": int(np.diff(bounds).max(initial=0))}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        self._check_dtypes()
        entries = self.values.numel()
        if entries >= 1 << 31:
            raise InvalidModelError(
                f"sparse emission has {entries} entries, but indices have 32 bits. Sparsify with "
                f"a larger tolerance."
            )
        ends = self.offsets[[0, -1]].tolist()
        if self.states.shape != self.values.shape or ends != [0, entries]:
            raise InvalidModelError(
                f"sparse emission: {self.states.numel()} states and {entries} values for offsets "
                f"from {ends[0]} to {ends[1]}; all three must agree. Save or download it again."
            )
        if self.background.numel() != self.vocab_size or bool((self.offsets.diff() < 0).any()):
            raise InvalidModelError(
                f"sparse emission: offsets must ascend, and background must have one entry per "
                f"token ({self.vocab_size}), but has {self.background.numel()}."
            )
        if entries and not 0 <= int(self.states.min()) <= int(self.states.max()) < self.num_states:
            raise InvalidModelError(
                f"sparse emission has states outside 0 to {self.num_states - 1}. Save it again."
            )
        token = torch.repeat_interleave(self.offsets.diff().long())
        if bool(((token.diff() == 0) & (self.states.int().diff() <= 0)).any()):
            raise InvalidModelError(
                "sparse emission: a token's states must ascend, each named once. Save it again."
            )
        for name in ("values", "background", "leak"):
            tensor: Tensor = getattr(self, name)
            if not bool((tensor >= 0).all() & tensor.isfinite().all()):  # NaN fails both
                raise InvalidModelError(
                    f"sparse emission: {name} holds NaN, infinity or negative numbers. Make it "
                    f"again; foretrace never writes such a table."
                )
        if abs(float(self.background.sum(dtype=torch.float64)) - 1) > 1e-4:
            raise InvalidModelError("sparse emission: background does not sum to 1. Normalise it.")
        if bool((self.leak > 1).any()):
            raise InvalidModelError("sparse emission: leak must be in [0, 1]. Make it again.")

    def _check_dtypes(self) -> None:
        for name in ("values", "background", "leak"):
            require_table_dtype(f"sparse emission: {name}", getattr(self, name).dtype)
        for name in ("offsets", "states"):
            dtype = getattr(self, name).dtype
            if dtype not in INDEX_DTYPES:
                raise InvalidModelError(
                    f"sparse emission: {name} cannot be {dtype_name(dtype)}: convert it to "
                    f"{', '.join(map(dtype_name, INDEX_DTYPES))}."
                )
        for name in ("offsets", "states", "values", "background", "leak"):
            shape = tuple(getattr(self, name).shape)
            if len(shape) != 1:
                raise InvalidModelError(
                    f"sparse emission: {name} must have one dimension, but has the shape {shape}."
                )

    def _derive_scale(self, totals: Tensor) -> Tensor:
        """Compute the factor that makes each state's distribution sum to 1: (h,), float64."""
        entry_mass = 1 - self.leak.to(torch.float64) * self.background.sum(dtype=torch.float64)
        if bool(((totals == 0) & (entry_mass > 1e-4)).any()):
            raise InvalidModelError(
                "sparse emission does not sum to 1: a state without entries has a leak below 1. "
                "Create sparse emissions with HMM.sparsify."
            )
        return torch.where(totals > 0, entry_mass.clamp_min(0) / totals, 1.0)

    @property
    def num_states(self) -> int:
        """Number of hidden states, h."""
        return self.leak.numel()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, V."""
        return self.offsets.numel() - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored entries."""
        return self.values.dtype

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return p(x | z) of tokens for all states: (...) ids -> (..., h)."""
        flat = tokens.flatten()
        rows = self.background[flat, None] * self.leak  # (n, h)
        if flat.device.type == "cpu":
            row, entry = self._entries_of(flat)
            states = self.states[entry].long()
            rows[row, states] += self.values[entry] * self._scale[states]
        else:
            self._add_padded(rows, flat)
        return rows.reshape(*tokens.shape, self.num_states)

    def _add_padded(self, rows: Tensor, tokens: Tensor) -> None:
        """Add the entries of (n,) tokens to (n, h) rows without synchronising with the device.

        Pads every token to the largest number of entries, since counting them would synchronise.
        """
        start, end = self.offsets[tokens, None], self.offsets[tokens + 1, None]
        entry = start + torch.arange(self._max_entries, device=tokens.device)
        inside = entry < end
        entry = entry.clamp_max(max(0, len(self.states) - 1))
        states = self.states[entry].long()
        added = torch.where(inside, self.values[entry] * self._scale[states], 0.0)
        rows.scatter_add_(1, states, added.to(rows.dtype))

    def predict(self, belief: Tensor) -> Tensor:
        """Compute p(x) = sum_z belief[z] emission[x, z] for all tokens: (..., h) -> (..., V)."""
        flat = belief.reshape(-1, self.num_states).to(self._matrix.dtype)  # (n, h)
        scaled = flat * self._scale
        if len(flat) == 1 and VECTOR_PRODUCTS:  # twice as fast as a one-column matrix
            entries = torch.mv(self._matrix, scaled[0])[None]
        else:
            product = self._matrix @ scaled.T
            entries = transposed(product, by_product=product.device.type == "cpu")
        probabilities = entries.addr_(flat @ self.leak, self.background)
        return probabilities.to(belief.dtype).reshape(*belief.shape[:-1], self.vocab_size)

    def predict_blocks(self, beliefs: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Compute p(x) for beliefs as columns, in blocks of tokens: (h, n) -> (block, n).

        All blocks share one buffer: on CPUs, allocating each costs more than the products.
        """
        columns = beliefs.to(self._matrix.dtype)
        scaled, leaked = columns * self._scale[:, None], self.leak @ columns
        scaled = scaled.contiguous()  # else the product of every block copies it
        buffer = columns.new_empty(min(size, self.vocab_size), columns.shape[1])
        for block in blocks_of(self.vocab_size, size):
            entries = buffer[: block.stop - block.start]
            entries.addmm_(self._block(block), scaled, beta=0)
            entries.addcmul_(self.background[block, None], leaked)
            yield block, entries.to(beliefs.dtype)

    def _block(self, block: slice) -> Tensor:
        """Return the entries of a block of tokens as a CSR matrix: (block, h)."""
        if block == slice(0, self.vocab_size):
            return self._matrix
        first, last = int(self._bounds[block.start]), int(self._bounds[block.stop])
        return csr_rows(self._matrix, block, slice(first, last))

    def subset(self, tokens: Tensor) -> EmissionSubset:
        """Return p(x | z) of some tokens as a CSR matrix: (M,) ids."""
        row, entry = self._entries_of(tokens)
        states = self.states[entry]
        values = self.values[entry].to(self._scale) * self._scale[states.long()]
        offsets = _cumulative(torch.bincount(row, minlength=len(tokens))).to(torch.int32)
        matrix = csr(offsets, states, values, (len(tokens), self.num_states))
        return EmissionSubset(matrix, self.background[tokens], self.leak, offsets.cpu().numpy())

    def expect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Compute the sum over `tokens` of values[x] emission[x, z]: (..., n), (n,) -> (..., h)."""
        row, entry = self._entries_of(tokens)
        expected = values.new_zeros(*values.shape[:-1], self.num_states)
        weighted = values[..., row] * self.values[entry]
        expected.index_add_(-1, self.states[entry].long(), weighted.to(values.dtype))
        background = (values * self.background[tokens]).sum(-1, keepdim=True)
        return expected * self._scale + background * self.leak

    def _entries_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """List the entries of (n,) tokens: for each entry, the row in `tokens` and its index."""
        start = self.offsets[tokens].long()
        count = self.offsets[tokens + 1].long() - start
        row = torch.repeat_interleave(count)
        before = count.cumsum(0) - count  # entries of the preceding tokens
        entry = torch.arange(len(row), device=row.device) + (start - before)[row]
        return row, entry

    def sample(self, states: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a token for each state, from its entries or from the background: (n,) -> (n,)."""
        by_state = self.states.argsort(stable=True)
        token = torch.repeat_interleave(self.offsets.diff().long())[by_state]
        cumulative = _cumulative(self.values[by_state].to(torch.float64))
        bounds = _cumulative(torch.bincount(self.states, minlength=self.num_states))
        first, last = bounds[states], bounds[states + 1]
        low, high = cumulative[first], cumulative[last]
        target = low + uniforms(states, generator) * (high - low)
        entry = torch.searchsorted(cumulative, target, right=True) - 1
        entry = entry.clamp(first, torch.maximum(last - 1, first)).clamp(max=len(token) - 1)
        cumulative = _cumulative(self.background.to(torch.float64))
        target = uniforms(states, generator) * cumulative[-1]
        background_token = torch.searchsorted(cumulative, target, right=True) - 1
        entry_token = token[entry] if len(token) else background_token
        from_background = uniforms(states, generator) < self.leak[states]
        return torch.where(from_background, background_token, entry_token)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, for saving, with the narrowest dtype for the states."""
        narrow = torch.uint16 if self.num_states <= 1 << 16 else torch.int32
        return {
            "offsets": self.offsets,
            "states": self.states.to(narrow),
            "values": self.values,
            "background": self.background,
            "leak": self.leak,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build the operator from the parameters that `tensors` returned."""
        states = tensors["states"]
        if states.dtype == torch.uint16:  # as `tensors` stores them; torch does not index with it
            states = states.to(torch.int32)
        return cls(**{**tensors, "states": states})

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Return a copy. `dtype` applies to the entries alone."""
        return type(self)(
            self.offsets.to(device),
            self.states.to(device),
            self.values.to(device=device, dtype=dtype),
            self.background.to(device),
            self.leak.to(device),
        )


def _cumulative(increments: Tensor) -> Tensor:
    """Compute the cumulative sum with a leading zero: (n,) -> (n + 1,)."""
    return torch.cat([increments.new_zeros(1), increments.cumsum(0)])
