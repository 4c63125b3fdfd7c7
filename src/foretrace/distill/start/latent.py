"""Where EM starts: latent variable distillation, states that the LM's own hidden states suggest.

A state of an HMM does two things: it speaks a token, and it decides what comes next. So a token's
place is described by two of the LM's hidden states: the one that predicts the token, and the one
that has read it, in the few directions in which hidden states differ most. k-means over these pairs
gives every place a state; counting states and tokens gives the three tables.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from foretrace import _io
from foretrace.distill.sampling.corpus import Corpus, Split
from foretrace.distill.sampling.work_claims import share
from foretrace.distill.start import kmeans
from foretrace.distill.start.basis import Basis
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM, HMMConfig

FILE_ROWS = 128  # rows in a file of hidden states: 1 MB at 128 dimensions and 32 tokens
COMMON_SPEECH = 0.1  # share of what a state says that all states have in common
COMMON_MOVES = 0.02  # share of where a state goes that all states have in common

Reader = Callable[[Tensor], Tensor]
"""Gives the LM's hidden states around the tokens of (n, T) rows: (n, T + 1, d)."""
Observer = Callable[[int, int], None]
"""Is told how much is done, and of how much."""


@dataclass(frozen=True)
class LatentConfig:
    """How to find states in an LM's hidden states."""

    places_per_state: int = 256
    """Tokens to read for each state, in rows taken from all over the corpus."""
    dimensions: int = 128
    """Directions of hidden states that are kept."""
    iterations: int = 10
    """Passes of k-means."""
    persistence: float = 0.0
    """Weight of what a whole row is about: above 0, places of like subject share states."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.places_per_state, self.dimensions, self.iterations)
        if least < 1 or not self.persistence >= 0:
            raise InvalidInputError(
                "places_per_state, dimensions and iterations must be at least 1, persistence at "
                "least 0."
            )

    def rows(self, states: int, length: int) -> int:
        """How many rows to read, if there are as many."""
        return -(-self.places_per_state * states // length)


class Block(NamedTuple):
    """Some rows, and the vectors of those places that are text, not its end."""

    tokens: Tensor  # (n, T)
    text: Tensor  # (n, T): where text is
    vectors: Tensor  # (places, d)


class Latents:
    """Hidden states of some rows of a corpus, in files of a folder; memory holds one at a time."""

    def __init__(
        self, corpus: Corpus, split: list[Split], states: int, config: LatentConfig, folder: Path
    ) -> None:
        eos = corpus.manifest.eos_token_id
        if eos is None or states < 2:
            raise InvalidInputError(
                "Latent variables need a corpus with an end of text and at least 2 states. Start "
                "at random instead."
            )
        self.corpus, self.split, self.config = corpus, split, config
        self.eos, self.states = eos, states
        self.pieces = list(_pieces(split, config.rows(states, corpus.manifest.length), config.seed))
        self.folder = folder
        self.paths = [folder / f"hidden-{n:06d}.safetensors" for n in range(len(self.pieces))]
        self.basis = folder / "basis.safetensors"
        self.centroids = folder / f"centroids-{states}-{config.persistence:g}.safetensors"

    @property
    def complete(self) -> bool:
        """Whether everything has been read."""
        return all(path.exists() for path in self.paths)

    def read(
        self,
        reader: Reader,
        observe: Observer | None = None,
        *,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Let the LM read what it has not read yet, beside any other worker on the same folder.

        Stops early if `until` says that it is no longer needed.
        """

        def find_basis(_number: int, path: Path) -> None:
            rows = self._rows(*self.pieces[0])  # one file has places enough
            found = Basis.of(
                reader(rows)[:, 1:][before_end(rows, self.eos)], self.config.dimensions
            )
            _io.write_tensors(path, {"mean": found.mean, "axes": found.axes}, {})

        share([self.basis], find_basis, until=until)
        if until():
            return
        basis = Basis(**_io.read_tensors(self.basis)[0])

        def work(number: int, path: Path) -> None:
            rows = self._rows(*self.pieces[number])
            _io.write_tensors(path, {"tokens": rows, "hidden": basis(reader(rows)).half()}, {})
            if observe is not None:
                observe(len(list(path.parent.glob("hidden-*"))), len(self.paths))

        share(self.paths, work, until=until)

    def _rows(self, number: int, piece: int) -> Tensor:
        part = self.split[number]
        order = np.random.default_rng([self.config.seed, number]).permutation(part.training)
        mine = order[piece * FILE_ROWS : (piece + 1) * FILE_ROWS]
        return self.corpus.read(part.shard).long()[torch.from_numpy(mine)]

    def blocks(self) -> Iterator[Block]:
        """Go through the files."""
        for path in self.paths:
            tensors, _ = _io.read_tensors(path)
            tokens, hidden = tensors["tokens"], tensors["hidden"].float()
            text = before_end(tokens, self.eos)
            yield Block(tokens, text, vectors(hidden, text, self.config.persistence))

    def cluster(self, observe: Observer | None = None) -> Tensor:
        """Find the centroids, going on from the last pass that was finished: (h - 1, d)."""
        passed = 0
        if self.centroids.exists():
            tensors, metadata = _io.read_tensors(self.centroids)
            found, passed = tensors["centroids"].clone(), int(metadata["passes"])
        else:
            found = kmeans.first_centroids(self._stream, self.states - 1, self.config.seed)
        for number in range(passed + 1, self.config.iterations + 1):
            found = kmeans.improve(self._stream, found)
            _io.write_tensors(self.centroids, {"centroids": found}, {"passes": str(number)})
            if observe is not None:
                observe(number, self.config.iterations)
        return found

    def _stream(self) -> Iterator[Tensor]:
        return (block.vectors for block in self.blocks())

    def remove(self) -> None:
        """Remove the files, once they are counted: they are large."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def start(self, centroids: Tensor) -> HMM:
        """Count which state follows which and what each says: the HMM to start EM from.

        The last state is the end of text. What was never seen stays possible: all states share a
        part of their speech, and every move has a small count.
        """
        manifest, states = self.corpus.manifest, self.states
        initial = torch.zeros(states)
        moves = torch.zeros(states * states)
        speech = torch.zeros(manifest.vocab_size * states)
        nearest = kmeans.Nearest(centroids)
        for block in self.blocks():
            state = torch.full_like(block.tokens, states - 1)
            state[block.text] = nearest(block.vectors)
            initial += torch.bincount(state[:, 0], minlength=states)
            _count(moves, state[:, :-1] * states + state[:, 1:])
            _count(speech, block.tokens * states + state)
        emission = _spoken(speech.view(-1, states), self.eos)
        transition = moves.view(states, states)
        common = transition.sum(0) + 1.0
        common /= common.sum()
        initial = (1 - COMMON_MOVES) * initial / initial.sum() + COMMON_MOVES * common
        transition += COMMON_MOVES * transition.sum(1, keepdim=True).clamp_min(1.0) * common
        transition /= transition.sum(1, keepdim=True)
        transition[-1] = 0.0
        transition[-1, -1] = 1.0
        config = HMMConfig(
            eos_token_ids=(self.eos,),
            tokenizer_fingerprint=manifest.tokenizer_fingerprint,
            source_model=manifest.source_model,
        )
        return HMM(initial, transition, emission, config)


def before_end(tokens: Tensor, eos_token_id: int) -> Tensor:
    """Mark where text is in (n, T) rows: all before the first end of text."""
    return (tokens == eos_token_id).cumsum(1) == 0


def vectors(hidden: Tensor, text: Tensor, persistence: float) -> Tensor:
    """Describe each place that is text: (n, T + 1, r) hidden, (n, T) text -> (places, 2r or 3r).

    What predicts the token, what has read it, and with persistence what the row is about.
    """
    parts = [hidden[:, :-1], hidden[:, 1:]]
    if persistence:
        subject = normalize((hidden[:, 1:] * text[..., None]).sum(1, keepdim=True), dim=-1)
        parts.append(persistence * subject.expand_as(parts[0]))
    return torch.cat(parts, -1)[text]


def _pieces(split: list[Split], rows: int, seed: int) -> Iterator[tuple[int, int]]:
    """Choose pieces of shards, by turns so that none is favoured, until there are enough rows."""
    order = np.random.default_rng(seed).permutation(len(split))
    for piece in count():
        if all(piece * FILE_ROWS >= part.training for part in split):
            return  # that was all there is
        for number in order:
            here = min(FILE_ROWS, split[number].training - piece * FILE_ROWS)
            if here > 0:
                yield int(number), piece
                rows -= here
            if rows <= 0:
                return


def _count(table: Tensor, codes: Tensor) -> None:
    """Add to a flat table how often each code occurs."""
    found, often = torch.unique(codes, return_counts=True)
    table[found] += often


def _spoken(counts: Tensor, eos: int) -> Tensor:
    """Turn (V, h) counts into p(x | z), in place: each state's own speech, and the common one."""
    counts[eos], counts[:, -1] = 0.0, 0.0
    common = counts.sum(1) + 1.0
    common[eos] = 0.0
    common /= common.sum()
    total = counts.sum(0)
    own = torch.where(total > 0, 1 - COMMON_SPEECH, 0.0)  # a state without a place has no own
    counts *= own / total.clamp_min(1)
    for some in torch.split(torch.arange(len(counts)), 1024):
        counts[some] += common[some, None] * (1 - own)
    counts[:, -1] = 0.0
    counts[eos, -1] = 1.0
    return counts
