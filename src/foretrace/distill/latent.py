"""Latent variable distillation: initialise an HMM for EM from clusters of an LM's hidden states.

A state of an HMM emits a token and determines what follows. So each position of a text is described
by two hidden states of the LM: the one that predicts the token, and the one that has read it. Both
are projected to their principal axes. Clustering these pairs by k-means assigns a state to every
position. Counts of states, transitions and emitted tokens yield the three tables.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretrace import _io
from foretrace.distill import clustering
from foretrace.distill.clustering import Basis
from foretrace.distill.sampling.corpus import Corpus, ShardSplit
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, HMMConfig
from foretrace.hmm.probability import emit_only_ends_

BASIS = -1  # the number of the basis among the files
FILE_ROWS = 128  # rows per file of hidden states: 1 MB at 128 dimensions and 32 tokens
SHARED_EMISSION = 0.1  # weight of the common token distribution in the emission of every state
SHARED_TRANSITION = 0.02  # weight of the common state distribution in every transition

HiddenStates = Callable[[Tensor, Sequence[Sequence[int]] | None], Tensor]
"""Computes the LM's hidden states of (n, T) rows, after contexts if there are: (n, T + 1, d)."""
Observer = Callable[[int, int], None]
"""Receives how many units of work are done, and their total."""


@dataclass(frozen=True)
class LatentConfig:
    """Settings of latent variable distillation.

    Attributes:
        dimensions: Number of principal axes of the hidden states.
        iterations: Passes of k-means.
        seed: Seed of the choice of rows and of the first centroids.

    Raises:
        InvalidInputError: If a setting is out of range.

    Example:
        >>> from foretrace.distill import LatentConfig
        >>> LatentConfig(iterations=20).dimensions
        128
    """

    dimensions: int = 128
    iterations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.dimensions, self.iterations) < 1:
            raise InvalidInputError("dimensions and iterations must be at least 1.")


class Block(NamedTuple):
    """Some rows, and the feature vectors of their positions before the end of text."""

    tokens: Tensor  # (n, T)
    mask: Tensor  # (n, T): positions before the end of text
    vectors: Tensor  # (positions, d)


class LatentStart:
    """Hidden states of some rows of a corpus, stored in files, and the HMM built from them.

    About `rows` rows are read, if the corpus has them. Memory holds one file at a time. Every stage
    resumes from the files that exist.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: list[ShardSplit],
        states: int,
        rows: int,
        config: LatentConfig,
        folder: Path,
    ) -> None:
        eos = corpus.manifest.eos_token_id
        if eos is None or states < 2:
            raise InvalidInputError(
                "Latent variables need a corpus with an end of text and at least 2 states. Start "
                "at random instead."
            )
        self.corpus, self.split, self.config = corpus, split, config
        self.eos, self.states = eos, states
        self.pieces = list(_choose_pieces(split, rows, config.seed))
        self.folder = folder
        self.paths = [folder / f"hidden-{n:06d}.safetensors" for n in range(len(self.pieces))]
        self.basis_path = folder / "basis.safetensors"
        self.centroids_path = folder / f"centroids-{states}.safetensors"

    def missing(self) -> list[int]:
        """Return the numbers of the files to write: all, with BASIS first, if it is missing."""
        if _io.missing_files([self.basis_path]):
            return [BASIS, *range(len(self.paths))]
        return _io.missing_files(self.paths)

    def tokens(self, number: int) -> int:
        """Return the number of tokens of a file."""
        shard, piece = self.pieces[number]
        rows = min(FILE_ROWS, self.split[shard].training_rows - piece * FILE_ROWS)
        return rows * self.corpus.manifest.length

    def write(self, hidden_states: HiddenStates, number: int) -> int:
        """Write a file of hidden states, or the basis; return the number of its tokens.

        The basis must exist before the files.
        """
        rows, contexts = self._rows(*self.pieces[max(number, 0)])  # one is enough for the basis
        hidden = hidden_states(rows, contexts)
        if number == BASIS:
            positions = hidden[:, 1:][before_end_mask(rows, self.eos)]
            basis = Basis.fit(positions, self.config.dimensions)
            _io.write_tensors(self.basis_path, {"mean": basis.mean, "axes": basis.axes}, {})
        else:
            basis = Basis(**_io.read_tensors(self.basis_path)[0])
            content = {"tokens": rows, "hidden": basis(hidden).half()}
            _io.write_tensors(self.paths[number], content, {})
        return 0 if number == BASIS else rows.numel()

    def _rows(self, number: int, piece: int) -> tuple[Tensor, list[list[int]] | None]:
        """Read the rows of a piece and their contexts: FILE_ROWS rows of a shard, in random order.

        Only training rows are read.
        """
        shard, training_rows = self.split[number].shard, self.split[number].training_rows
        order = np.random.default_rng([self.config.seed, number]).permutation(training_rows)
        chosen = order[piece * FILE_ROWS : (piece + 1) * FILE_ROWS]
        prompts = self.corpus.read_prompts(shard)
        contexts = None if prompts is None else [prompts.contexts[row] for row in chosen]
        return self.corpus.read(shard).long()[torch.from_numpy(chosen)], contexts

    def blocks(self) -> Iterator[Block]:
        """Read the files one by one."""
        for tensors, _ in _io.read_ahead(map(_io.read_tensors, self.paths)):
            tokens, hidden = tensors["tokens"], tensors["hidden"].float()
            mask = before_end_mask(tokens, self.eos)
            yield Block(tokens, mask, feature_vectors(hidden, mask))

    def cluster(self, on_progress: Observer | None = None) -> Tensor:
        """Compute the centroids by k-means, resuming after the last complete pass: (h - 1, d)."""
        passes = 0
        if self.centroids_path.exists():
            tensors, metadata = _io.read_tensors(self.centroids_path)
            centroids, passes = tensors["centroids"].clone(), int(metadata["passes"])
        else:
            centroids = clustering.initial_centroids(
                self._stream, self.states - 1, self.config.seed
            )
        for number in range(passes + 1, self.config.iterations + 1):
            centroids = clustering.lloyd_step(self._stream, centroids)
            metadata = {"passes": str(number)}
            _io.write_tensors(self.centroids_path, {"centroids": centroids}, metadata)
            if on_progress is not None:
                on_progress(number, self.config.iterations)
        return centroids

    def _stream(self) -> Iterator[Tensor]:
        return (block.vectors for block in self.blocks())

    def remove_files(self) -> None:
        """Remove the large files that are no longer needed."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def build_hmm(self, centroids: Tensor) -> HMM:
        """Build the HMM that EM starts from, by counting states and tokens.

        The last state is the end of text. Unseen events stay possible: every emission and every
        transition is mixed with a distribution that all states share.
        """
        manifest, states = self.corpus.manifest, self.states
        initial = torch.zeros(states)
        transition_counts = torch.zeros(states * states)
        emission_counts = torch.zeros(manifest.vocab_size * states)
        nearest = clustering.NearestCentroid(centroids)
        for block in self.blocks():
            state = torch.full_like(block.tokens, states - 1)
            state[block.mask] = nearest(block.vectors)
            initial += torch.bincount(state[:, 0], minlength=states)
            _add_counts(transition_counts, state[:, :-1] * states + state[:, 1:])
            _add_counts(emission_counts, block.tokens * states + state)
        emission = _emission_from_counts(
            emission_counts.view(-1, states), self.corpus.manifest.eos_token_ids
        )
        initial, transition = _transition_from_counts(
            initial, transition_counts.view(states, states)
        )
        config = HMMConfig(
            eos_token_ids=manifest.eos_token_ids,
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            source_model=manifest.source_model,
        )
        return HMM(initial, transition, emission, config)


def before_end_mask(tokens: Tensor, eos_token_id: int) -> Tensor:
    """Mark the positions of (n, T) rows before the first end-of-text token."""
    return (tokens == eos_token_id).cumsum(1) == 0


def feature_vectors(hidden: Tensor, mask: Tensor) -> Tensor:
    """Describe each masked position: (n, T + 1, r) hidden, (n, T) mask -> (positions, 2r).

    A vector holds the hidden state that predicts the token, and the one that has read it.
    """
    return torch.cat([hidden[:, :-1], hidden[:, 1:]], -1)[mask]


def _choose_pieces(split: list[ShardSplit], rows: int, seed: int) -> Iterator[tuple[int, int]]:
    """Choose pieces of all shards in turn, as (shard, piece), until they hold `rows` rows."""
    order = np.random.default_rng(seed).permutation(len(split))
    for piece in count():
        if all(piece * FILE_ROWS >= shard.training_rows for shard in split):
            return  # the corpus is exhausted
        for number in order:
            piece_rows = min(FILE_ROWS, split[number].training_rows - piece * FILE_ROWS)
            if piece_rows > 0:
                yield int(number), piece
                rows -= piece_rows
            if rows <= 0:
                return


def _add_counts(table: Tensor, codes: Tensor) -> None:
    """Add the number of occurrences of each code to a flat table."""
    distinct, occurrences = torch.unique(codes, return_counts=True)
    table[distinct] += occurrences


def _transition_from_counts(initial: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Convert (h,) and (h, h) counts to probabilities, the latter in place."""
    common = counts.sum(0) + 1.0
    common /= common.sum()
    initial = (1 - SHARED_TRANSITION) * initial / initial.sum() + SHARED_TRANSITION * common
    counts += SHARED_TRANSITION * counts.sum(1, keepdim=True).clamp_min(1.0) * common
    counts /= counts.sum(1, keepdim=True)
    counts[-1] = 0.0
    counts[-1, -1] = 1.0
    return initial, counts


def _emission_from_counts(counts: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Convert (V, h) counts to p(x | z), in place, mixed with the common token distribution."""
    counts[list(ends)], counts[:, -1] = 0.0, 0.0
    common = counts.sum(1) + 1.0
    common[list(ends)] = 0.0
    common /= common.sum()
    total = counts.sum(0)
    weight = torch.where(total > 0, 1 - SHARED_EMISSION, 0.0)  # 0 for a state without positions
    counts *= weight / total.clamp_min(1)
    for tokens in torch.split(torch.arange(len(counts)), 1024):
        counts[tokens] += common[tokens, None] * (1 - weight)
    return emit_only_ends_(counts, ends)
