"""Emission as a few entries per token plus a background: small, fast, and still normalised.

    p(x | z) = scale[z] * values[x, z] + leak[z] * background[x]

`values` is sparse (CSR by token); the rank-one background carries what was left out. `scale` is
derived so that every state's distribution sums to 1 whatever `values` was rounded to on disk.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.errors import InvalidModelError
from foretrace.hmm.emission import Part, csr, csr_rows, uniforms
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
    """p(x | z) as sparse entries plus a rank-one background.

    Shapes: `offsets` (V + 1,), `states` and `values` (entries,), `background` (V,), `leak` (h,).
    The entries of token x are those from `offsets[x]` to `offsets[x + 1]`, each state at most once.
    """

    kind: ClassVar[str] = "sparse+background"
    offsets: Tensor
    states: Tensor
    values: Tensor
    background: Tensor
    leak: Tensor
    _scale: Tensor = field(init=False, repr=False)  # (h,)
    _matrix: Tensor = field(init=False, repr=False)  # (V, h), CSR in working precision
    _bounds: NDArray[np.int32] = field(init=False, repr=False)  # the offsets, on the host
    _widest: int = field(init=False, repr=False)  # entries of the token that has most

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
        derived |= {"_bounds": bounds, "_widest": int(np.diff(bounds).max(initial=0))}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        self._check_dtypes()
        entries = self.values.numel()
        if entries >= 1 << 31:
            raise InvalidModelError(
                f"sparse emission has {entries} entries, but indices are of 32 bits. Sparsify with "
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
                f"sparse emission: offsets must rise, and background must have one entry per "
                f"token ({self.vocab_size}), but has {self.background.numel()}."
            )
        if entries and not 0 <= int(self.states.min()) <= int(self.states.max()) < self.num_states:
            raise InvalidModelError(
                f"sparse emission names states outside 0 to {self.num_states - 1}. Save it again."
            )
        token = torch.repeat_interleave(self.offsets.diff().long())
        if bool(((token.diff() == 0) & (self.states.int().diff() <= 0)).any()):
            raise InvalidModelError(
                "sparse emission: the states of a token must rise, each named once. Save it again."
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
            raise InvalidModelError("sparse emission: leak must lie in [0, 1]. Make it again.")

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
        """Give what makes entries and background of each state sum to 1: (h,), float64."""
        kept = 1 - self.leak.to(torch.float64) * self.background.sum(dtype=torch.float64)
        if bool(((totals == 0) & (kept > 1e-4)).any()):
            raise InvalidModelError(
                "sparse emission does not sum to 1: a state without entries leaks less than "
                "everything. Make it with HMM.sparsify."
            )
        return torch.where(totals > 0, kept.clamp_min(0) / totals, 1.0)

    @property
    def num_states(self) -> int:
        """h, the number of hidden states."""
        return self.leak.numel()

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.offsets.numel() - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the entries are stored in."""
        return self.values.dtype

    def rows(self, tokens: Tensor) -> Tensor:
        """Give p(x | z) of each token for all states: (...) ids -> (..., h)."""
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
        """Add the entries of (n,) tokens to (n, h) rows without waiting for the device.

        All are taken to be as many as the widest token has: to count them would be to wait.
        """
        start, end = self.offsets[tokens, None], self.offsets[tokens + 1, None]
        entry = start + torch.arange(self._widest, device=tokens.device)
        inside = entry < end
        entry = entry.clamp_max(max(0, len(self.states) - 1))
        states = self.states[entry].long()
        added = torch.where(inside, self.values[entry] * self._scale[states], 0.0)
        rows.scatter_add_(1, states, added.to(rows.dtype))

    def predict(self, belief: Tensor) -> Tensor:
        """Give p(x) = sum_z belief[z] emission[x, z] for all tokens: (..., h) -> (..., V)."""
        flat = belief.reshape(-1, self.num_states).to(self._matrix.dtype)  # (n, h)
        scaled = flat * self._scale
        if len(flat) == 1 and VECTOR_PRODUCTS:  # twice as fast as a matrix of one column
            entries = torch.mv(self._matrix, scaled[0])[None]
        else:
            entries = transposed(self._matrix @ scaled.T)
        probabilities = entries.addr_(flat @ self.leak, self.background)
        return probabilities.to(belief.dtype).reshape(*belief.shape[:-1], self.vocab_size)

    def predict_blocks(self, beliefs: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Give p(x) token-major, of beliefs as columns: (h, n) -> blocks, each (block, n).

        All in one memory: on CPUs, new memory for each would cost more than the products.
        """
        columns = beliefs.to(self._matrix.dtype)
        scaled, leaked = columns * self._scale[:, None], self.leak @ columns
        memory = columns.new_empty(min(size, self.vocab_size), columns.shape[1])
        for block in blocks_of(self.vocab_size, size):
            entries = memory[: block.stop - block.start]
            entries.addmm_(self._block(block), scaled, beta=0)
            entries.addcmul_(self.background[block, None], leaked)
            yield block, entries.to(beliefs.dtype)

    def _block(self, block: slice) -> Tensor:
        """Give the entries of a block of tokens as a matrix: (block, h)."""
        if block == slice(0, self.vocab_size):
            return self._matrix
        own = slice(*self._bounds[[block.start, block.stop]].tolist())  # known without waiting
        return csr_rows(self._matrix, block, own)

    def part(self, tokens: Tensor) -> Part:
        """Give what is said of some tokens alone: (M,) ids."""
        row, entry = self._entries_of(tokens)
        states = self.states[entry]
        values = self.values[entry].to(self._scale) * self._scale[states.long()]
        offsets = _from_zero(torch.bincount(row, minlength=len(tokens))).to(torch.int32)
        matrix = csr(offsets, states, values, (len(tokens), self.num_states))
        return Part(matrix, self.background[tokens], self.leak, offsets.cpu().numpy())

    def expect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Give sum over `tokens` of values[x] emission[x, z]: (..., n), (n,) -> (..., h)."""
        row, entry = self._entries_of(tokens)
        expected = values.new_zeros(*values.shape[:-1], self.num_states)
        weighted = values[..., row] * self.values[entry]
        expected.index_add_(-1, self.states[entry].long(), weighted.to(values.dtype))
        background = (values * self.background[tokens]).sum(-1, keepdim=True)
        return expected * self._scale + background * self.leak

    def _entries_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """List the entries of (n,) tokens: which of the n each belongs to, and its index."""
        start = self.offsets[tokens].long()
        count = self.offsets[tokens + 1].long() - start
        row = torch.repeat_interleave(count)
        before = count.cumsum(0) - count  # entries of the tokens before
        entry = torch.arange(len(row), device=row.device) + (start - before)[row]
        return row, entry

    def sample(self, states: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a token for each state, from its entries or from the background: (n,) -> (n,)."""
        by_state = self.states.argsort(stable=True)
        token = torch.repeat_interleave(self.offsets.diff().long())[by_state]
        cumulative = _from_zero(self.values[by_state].to(torch.float64))
        bounds = _from_zero(torch.bincount(self.states, minlength=self.num_states))
        first, last = bounds[states], bounds[states + 1]
        low, high = cumulative[first], cumulative[last]
        target = low + uniforms(states, generator) * (high - low)
        entry = torch.searchsorted(cumulative, target, right=True) - 1
        entry = entry.clamp(first, torch.maximum(last - 1, first)).clamp(max=len(token) - 1)
        climb = _from_zero(self.background.to(torch.float64))
        leaked = torch.searchsorted(climb, uniforms(states, generator) * climb[-1], right=True) - 1
        from_background = uniforms(states, generator) < self.leak[states]
        return torch.where(from_background, leaked, token[entry] if len(token) else leaked)

    def tensors(self) -> dict[str, Tensor]:
        """Give the parameters by name, to be saved; indices as narrow as they fit."""
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
        """Build it from what `tensors` gave."""
        states = tensors["states"]
        if states.dtype == torch.uint16:  # `tensors` stores them so; torch cannot index with it
            states = states.to(torch.int32)
        return cls(**{**tensors, "states": states})

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Self:
        """Move it, or convert its entries; background and leak stay in working precision."""
        return type(self)(
            self.offsets.to(device),
            self.states.to(device),
            self.values.to(device=device, dtype=dtype),
            self.background.to(device),
            self.leak.to(device),
        )


def _from_zero(increments: Tensor) -> Tensor:
    """Sum cumulatively, with a leading zero: (n,) -> (n + 1,)."""
    return torch.cat([increments.new_zeros(1), increments.cumsum(0)])
