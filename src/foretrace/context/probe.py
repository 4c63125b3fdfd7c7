"""`Probe`: the last hidden state of one LM, computed back from its logits."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretrace.context import storage
from foretrace.context.choice import choose_tokens
from foretrace.context.features import token_features
from foretrace.context.head import Head
from foretrace.context.repair import repair
from foretrace.context.storage import ProbeConfig
from foretrace.errors import InvalidInputError

NUM_CHECKS = 64
# Rounding to bfloat16 changes a logit by at most 2 ** -9 of its value, by 1.1e-3 on average.
TOLERANCE = 2.0**-8
SATURATED = 0.95  # of the tanh cap; above, rounding would decide
LARGEST = 1e3  # logits beyond are the values with which engines mask tokens
LARGEST_CONDITION = 1e4
LARGEST_COPY_ERROR = 0.2  # of a quantised head, relative: four bits have 0.08 to 0.11
ROWS_AT_ONCE = 16  # that are solved


class Reading(NamedTuple):
    """Hidden states (n, d), and which of them were readable (n,). The others are zero."""

    states: Tensor
    readable: Tensor


@dataclass(frozen=True)
class Probe:
    """Reads the last hidden state of one LM from its logits.

    Logits are z = W h, so that h = P z for the logits of a few tokens, with P the pseudoinverse
    of their rows of W. A constant that is added to all logits of a row changes nothing.

    Attributes:
        tokens: The tokens whose logits are read, ascending: (m,).
        inverse: P, (d, m), float32. Its rows add up to zero.
        checks: Directions of z that no hidden state reaches, (q, m), float32. The product is zero
            unless a logit was changed.
        rows: The rows of W for these tokens, (m, d), in the type of the head.
        bias: The head's bias for these tokens, (m,), float32.
        features: The rows of W for all tokens, whitened, in their first k principal directions:
            (V, k), float16.
        basis: These directions, each times the standard deviation of the rows along it: (d, k),
            float32.
        config: What else is known of the head, and how well the probe reads it.

    Example:
        >>> from foretrace.context import Head, Probe
        >>> probe = Probe.build(Head.of_model(model))
        >>> logits = model(torch.tensor([[1, 2, 3]])).logits[0].detach()
        >>> states, readable = probe.read(logits)
        >>> states.shape, readable.tolist()
        (torch.Size([3, 32]), [True, True, True])
    """

    tokens: Tensor
    inverse: Tensor
    checks: Tensor
    rows: Tensor
    bias: Tensor
    features: Tensor
    basis: Tensor
    config: ProbeConfig = field(default_factory=ProbeConfig)

    @classmethod
    def build(
        cls,
        head: Head,
        *,
        features: int = 64,
        source: str | None = None,
        original: "Head | Probe | None" = None,
    ) -> "Probe":
        """Build the probe of a head.

        Args:
            head: The head of an LM.
            features: The number of principal directions of the token features, at most d.
            source: The name of the LM, for messages.
            original: If the head is quantised, the head that it was made of, or the probe of that
                head. Attributes of the original LM are then accepted.

        Raises:
            InvalidInputError: The vocabulary is too small, the head does not determine the hidden
                state, or it was not made of the original.
        """
        tokens = choose_tokens(head)
        rows = head.weight[tokens.to(head.weight.device)]
        bias = torch.zeros(len(tokens)) if head.bias is None else head.bias.cpu()[tokens].float()
        inverse, condition = _invert(rows)
        table, basis, kept = token_features(head, features)
        config = ProbeConfig(
            fingerprint=head.fingerprint,
            original=None if original is None else _require_copy(head, tokens, original),
            source=source,
            scale=head.scale,
            softcap=head.softcap,
            condition=condition,
            variance_kept=kept,
        )
        checks = _checks(rows, inverse)
        return cls(tokens, inverse.float(), checks, rows, bias, table, basis, config).to("cpu")

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the LM."""
        return len(self.features)

    def to(self, device: torch.device | str) -> "Probe":
        """Return the probe on another device."""
        tensors: dict[str, Any] = {
            name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)
        }
        return replace(self, **tensors)

    def with_errors(self, errors: Mapping[str, float]) -> "Probe":
        """Return the probe with a record of its relative errors, by what it reads."""
        return replace(self, config=replace(self.config, errors=dict(errors)))

    def read(self, logits: Tensor, *, solve: bool = True) -> Reading:
        """Compute hidden states from logits or log-probabilities.

        A row is not readable if it does not fit the head: an engine masked or changed logits of
        the probe's tokens. With `solve`, such a row is solved from the logits that fit together,
        if no more than a quarter of those beyond d, and no more than 256, do not. Without `solve`,
        reading takes a fixed number of operations, and on a GPU does not wait for the device.

        Args:
            logits: (n, V), in any floating-point type. If the LM caps its logits by tanh, they
                must not be log-probabilities.
            solve: Whether to solve rows that do not fit as a whole.

        Returns:
            The states in float32, and whether each row was readable.

        Raises:
            InvalidInputError: `logits` do not have V columns.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            raise InvalidInputError(
                f"Logits have shape {tuple(logits.shape)}, but the probe reads (n, "
                f"{self.vocab_size}), one column for each token of its LM."
            )
        values, usable = self._undo(logits[:, self.tokens].float())
        tolerance = TOLERANCE * values.square().mean(1).sqrt()
        shifted = values - values.mean(1, keepdim=True)
        states = shifted @ self.inverse.T
        misfit = (shifted @ self.checks.T).square().mean(1).sqrt()
        readable = usable.all(1) & (misfit <= tolerance)
        if solve and not bool(readable.all()):
            for odd in torch.split((~readable).nonzero()[:, 0], ROWS_AT_ONCE):
                part = values[odd], usable[odd], self.inverse, self.rows, tolerance[odd]
                solved, readable[odd] = repair(*part)
                states[odd] = solved.nan_to_num()  # without a solution, they may be NaN
        return Reading(states * readable[:, None], readable)

    def project(self, writers: Tensor) -> Tensor:
        """Return coefficients c of writers, so that c . features_x = writers . (W_x - mean of W).

        This is exact for writers that are sums of the probe's principal directions, and otherwise
        the best fit over all tokens.

        Args:
            writers: (r, d).

        Returns:
            (r, k) float32, on the device of the probe.
        """
        return writers.to(self.basis) @ self.basis

    def _undo(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return W h plus a constant a row, and which entries can be used; the others are zero."""
        scale, softcap = self.config.scale, self.config.softcap
        if softcap is None:
            usable = logits.abs() <= LARGEST  # not NaN
            values = logits / scale - self.bias
        else:
            part = logits / softcap
            usable = part.abs() <= SATURATED
            values = part.atanh() * (softcap / scale) - self.bias
        return torch.where(usable, values, 0.0), usable

    def serves(self, fingerprint: str) -> bool:
        """Return whether attributes of the head with this fingerprint can be read."""
        return fingerprint in (self.config.fingerprint, self.config.original)

    def require_head(self, fingerprint: str) -> None:
        """Raise unless the probe belongs to the head with this fingerprint."""
        if fingerprint != self.config.fingerprint:
            raise InvalidInputError(
                f"The probe was made for {self.config.source or 'another LM'}, whose head is "
                f"{self.config.fingerprint}, but the LM in use has the head {fingerprint}: make a "
                f"probe for it with `foretrace probe`."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the probe to one safetensors file, which is complete or absent."""
        tensors = {name: value for name, value in vars(self).items() if name != "config"}
        storage.write(Path(path), tensors, self.config)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, fingerprint: str | None = None) -> "Probe":
        """Map a file of `save` into memory.

        Args:
            path: The file.
            fingerprint: `Head.fingerprint` of the LM in use, to refuse a probe of another LM.

        Raises:
            InvalidFileError: There is no such file, or it is damaged.
            InvalidInputError: The probe belongs to another LM.
        """
        tensors, config = storage.read(Path(path))
        probe = cls(**tensors, config=config)
        if fingerprint is not None:
            probe.require_head(fingerprint)
        return probe


def _require_copy(head: Head, tokens: Tensor, original: Head | Probe) -> str:
    """Return the fingerprint of the original; raise unless the head is a quantised copy of it.

    The rows of `tokens` are compared; with a probe, the rows that it has.
    """
    if isinstance(original, Probe):
        tokens, rows = original.tokens, original.rows
        shape, fingerprint = [original.vocab_size, rows.shape[1]], original.config.fingerprint
    else:
        shape, fingerprint = [*original.weight.shape], original.fingerprint
        rows = original.weight[tokens[tokens < len(original.weight)].to(original.weight.device)]
    problem = f"has shape {[*head.weight.shape]}, and the original one {shape}"
    if [*head.weight.shape] == shape:
        wanted = rows.float().cpu()
        copied = head.weight[tokens.to(head.weight.device)].float().cpu()
        error = float((copied - wanted).norm() / wanted.norm())
        if error <= LARGEST_COPY_ERROR:
            return fingerprint
        problem = f"differs from the original one by {error:.0%}; four bits make about 10%"
    raise InvalidInputError(
        f"The head {problem}. Pass the LM that this one was quantised from, or the probe of it."
    )


def _invert(rows: Tensor) -> tuple[Tensor, float]:
    """Return the pseudoinverse of centred rows in float64, (d, m), and their condition number."""
    centred = rows.double() - rows.double().mean(0)
    gram = centred.T @ centred
    spectrum = torch.linalg.eigvalsh(gram)
    condition = float((spectrum[-1] / spectrum[0].clamp_min(1e-300)).sqrt())
    if not condition <= LARGEST_CONDITION:
        raise InvalidInputError(
            f"The head does not determine the hidden state: the condition number of its rows is "
            f"{condition:.1e}, and at most {LARGEST_CONDITION:.0e} can be inverted. This LM cannot "
            f"be read from its logits."
        )
    return torch.cholesky_solve(centred.T, torch.linalg.cholesky(gram)), condition


def _checks(rows: Tensor, inverse: Tensor) -> Tensor:
    """Return orthonormal directions, chosen at random, that no hidden state and constant reach.

    Their product with logits has the mean square of the whole residual, whatever was changed.
    """
    size, width = rows.shape
    generator = torch.Generator().manual_seed(0)
    count = min(NUM_CHECKS, size - width - 1)
    directions = torch.randn(size, count, generator=generator, dtype=torch.float64)
    directions = directions.to(rows.device)
    for _ in range(2):  # the second time removes what rounding left
        directions = directions - directions.mean(0)
        directions = directions - rows.double() @ (inverse @ directions)
        directions = directions - directions.mean(0)
    orthonormal: Tensor = torch.linalg.qr(directions).Q
    return orthonormal.T.float().contiguous()
