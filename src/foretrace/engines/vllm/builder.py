"""Builds the lookahead tables and compiled markers of requests, and bounds their size before."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import prod
from threading import Lock
from time import perf_counter
from typing import Any

from foretrace.attribute import Attribute, AttributeStore, LogitAffine
from foretrace.attribute.expression import Operator
from foretrace.context import Probe
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.vllm.params import Admission, SteeringParams
from foretrace.engines.vllm.table_store import ByteLRU, TableStore
from foretrace.errors import (
    ForetraceError,
    InvalidFileError,
    InvalidInputError,
    TokenizerMismatchError,
)
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Compiler, Marker
from foretrace.steering.goal import require_probe
from foretrace.steering.goal_text import GoalText
from foretrace.steering.markers import CompiledMarker

logger = logging.getLogger(__name__)

VERSION = 7  # of the tables: others are not read
ATTRIBUTE_MEMORY = (
    256 << 20
)  # bytes of attributes that are kept, with the strengths of their levels
MAX_COMPARED = 500  # names, when a name is misspelt
MAX_TERMS = 16  # of all goals of a request: each costs a table, and its share of every step
MAX_RANK = 64  # of the context rewards of a request: a step pads all rows to the largest one
MAX_STATES, MAX_TABLES = 64, 256  # of a goal's automaton, and of that times the goal's terms


class TableBuilder:
    """Builds the tables and markers of requests, for an HMM and a folder of attributes.

    Replacing an attribute file does not affect requests that are already admitted.
    """

    def __init__(
        self,
        hmm: HMM,
        attributes: str | os.PathLike[str],
        store: TableStore,
        *,
        horizon: int = 64,
        probe: Probe | None = None,
        load_token_bytes: Callable[[], TokenBytes] | None = None,
        observe: Callable[[str, float], None] = lambda event, value: None,
    ) -> None:
        """Open the folder of attributes.

        Args:
            hmm: The HMM that tables are built for.
            attributes: Folder of attribute files.
            store: Where tables are kept.
            horizon: Tokens that every table looks ahead.
            probe: The probe of the LM, for attributes with a context reward.
            load_token_bytes: Loads the bytes of each token, for goals that name texts.
            observe: Called with "build" and the seconds that it took.
        """
        self.hmm, self.horizon, self.store, self.observe = hmm, horizon, store, observe
        self.probe = probe
        self.attributes = AttributeStore(
            attributes, tokenizer_fingerprint=hmm.config.tokenizer_fingerprint
        )
        self.served = False
        """Whether a server's middleware admits the requests of this process."""
        self._load_token_bytes = (
            None if load_token_bytes is None else cache(_once(load_token_bytes))
        )
        self._compiler = Compiler(hmm, horizon, memory=0)  # it remembers the strengths of levels
        self._loaded: ByteLRU[Attribute] = ByteLRU(ATTRIBUTE_MEMORY)
        self._identity = [VERSION, hmm.checksum, hmm.config.eos_token_ids, horizon]
        if probe is not None:  # a server without one refuses context rewards
            self._identity += [probe.config.fingerprint, probe.config.original]
        self._lock = Lock()
        self._listed: tuple[int, list[str]] = (0, [])

    def admit(self, params: SteeringParams) -> Admission:
        """Return the keys of a request's tables and markers, without building any.

        Raises:
            InvalidInputError: An attribute is unknown, or the horizon is larger than the server's.
        """
        if params.horizon is not None and params.horizon > self.horizon:
            raise InvalidInputError(
                f"The horizon of this server is at most {self.horizon} tokens, not "
                f"{params.horizon}."
            )
        return Admission(
            [self._key(goal) for goal in params.goals],
            [[goal.transform.scale, goal.transform.shift] for goal in params.goals],
            params.horizon,
            params.neutral_end,
            params.after,
            params.window,
            {text: self._marker_key(text) for text in params.markers},
            params.required,
        )

    def build(self, params: SteeringParams) -> Admission:
        """Build what a request needs and does not exist yet; several threads may call this.

        Raises:
            InvalidInputError: The request is not valid, or costs too much.
            OSError: The disk is full or read-only.
        """
        admission = self.admit(params)
        with self._lock:
            missing = [
                (key, goal)
                for key, goal in zip(admission.tables, params.goals, strict=True)
                if not self.store.has(key)
            ]
            if missing:
                require_small(params.goals, self._attribute)
            for key, goal in missing:
                self._build_table(key, goal)
            for text, key in admission.markers.items():
                if not self.store.has(key):
                    self._build_marker(key, text)
        return admission

    def _build_table(self, key: str, goal: GoalText) -> None:
        """Build the table of a goal; find strengths that were not calibrated with the HMM."""
        began = perf_counter()
        attributes = {name: self._attribute(name) for name in goal.names}
        for one in attributes.values():
            require_probe(one, self.probe)
        ((attribute, _),) = self._compiler.merge(
            goal.goals(attributes, lambda operand: self._token_bytes().contains(operand))
        )
        lookahead = Lookahead(self.hmm, attribute, self.horizon).with_missing()
        self.store.add_lookahead(key, lookahead)
        self.observe("build", perf_counter() - began)

    def _build_marker(self, key: str, text: str) -> None:
        """Compile a marker, which takes about a second for a large vocabulary."""
        began = perf_counter()
        self.store.add_marker(key, CompiledMarker.of(self.marker(text)))
        self.observe("build", perf_counter() - began)

    def _key(self, goal: GoalText) -> str:
        """Return a hash of what a table depends on.

        That is the HMM, the horizon, the operands with their strength or level, the attribute
        files, the tokenizer and the LM of the probe. The transform is not part of it: it is applied
        to the table's result.
        """
        operands = [
            [[*map(str, operand.expression.steps)], operand.strength or operand.level]
            for operand in goal.operands
        ]
        files = [(name, *self._file(name)) for name in goal.names]
        tokens = self._token_bytes().identity if goal.contains else None
        return _hash([self._identity, operands, files, tokens])

    def _marker_key(self, text: str) -> str:
        tokens = self._token_bytes()
        special = sorted((token, content.hex()) for token, content in tokens.special.items())
        return _hash([VERSION, "marker", text, tokens.identity, special])

    def _file(self, name: str) -> tuple[int, int, int]:
        """Return the identity of an attribute's file, which changes when it is replaced."""
        try:
            status = self.attributes.path(name).stat()
        except (OSError, ValueError):
            raise self._unknown(name) from None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _unknown(self, name: str) -> InvalidInputError:
        names = [known for known in self.names() if abs(len(known) - len(name)) <= 3]
        like = get_close_matches(name[:100], names[:MAX_COMPARED], n=1)
        hint = f"Did you mean {like[0]}?" if like else "Check the spelling."
        return InvalidInputError(f"There is no attribute called {name[:100]}. {hint}")

    def names(self) -> list[str]:
        """List the attributes' names; read the folder again if it has changed."""
        try:
            changed = self.attributes.folder.stat().st_mtime_ns
            if changed != self._listed[0]:
                self._listed = (changed, list(self.attributes))
        except (ForetraceError, OSError):
            return []
        return self._listed[1]

    def _attribute(self, name: str) -> Attribute:
        """Load an attribute, or return the one that was loaded from the same file before."""
        key = f"{self._file(name)} {name}"
        attribute = self._loaded.get(key)
        if attribute is None:
            attribute = self._read_attribute(name)
            self._loaded.add(key, attribute, _num_bytes(attribute))
        return attribute

    def _read_attribute(self, name: str) -> Attribute:
        try:
            return self.attributes[name]
        except KeyError:
            raise self._unknown(name) from None
        except (InvalidFileError, TokenizerMismatchError, RuntimeError) as error:
            # A file that is cut short while it is read raises RuntimeError.
            logger.error(
                "The attribute '%s' is refused: %s", name, error, extra={"attribute": name}
            )
            raise InvalidInputError(
                f"The attribute '{name}' cannot be used: its file is damaged, or of another LM."
            ) from error

    def marker(self, text: str) -> Marker:
        """Return the marker of a text."""
        return self._token_bytes().marker(text)

    def spell(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens in UTF-8; nothing if the tokenizer is not known."""
        if self._load_token_bytes is None:
            return b""
        spelled = self._token_bytes().tokens
        return b"".join(spelled[token] for token in tokens if 0 <= token < len(spelled))

    def _token_bytes(self) -> TokenBytes:
        """Return the bytes of each token; the first call loads the tokenizer."""
        if self._load_token_bytes is None:
            raise InvalidInputError(
                "Required and forbidden texts and markers need the tokenizer, which this server "
                "does not know. Start it with `foretrace serve`, or set FORETRACE_SERVE_TOKENIZER."
            )
        loaded = self._load_token_bytes()
        if isinstance(loaded, Exception):
            why = loaded if isinstance(loaded, ForetraceError) else "its log says why."
            raise InvalidInputError(f"This server's tokenizer cannot be used: {why}")
        return loaded

    def load_tokenizer(self) -> None:
        """Load the tokenizer now, so that no request waits for it."""
        if self._load_token_bytes is not None:
            self._load_token_bytes()


def _once(load_token_bytes: Callable[[], TokenBytes]) -> Callable[[], TokenBytes | Exception]:
    """Return a function that returns an error instead of raising it, so that it can be cached."""

    def tried() -> TokenBytes | Exception:
        try:
            return load_token_bytes()
        except Exception as error:  # a tokenizer's files or code may raise anything
            logger.exception("The server's tokenizer cannot be used")
            return error

    return tried


def _hash(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _num_bytes(attribute: Attribute) -> int:
    terms = attribute.terms
    tensors = [terms.tokens, terms.log_weights]
    tensors += [part for one in attribute.evidence for part in (one.tokens, one.rewards)]
    if attribute.context is not None:
        tensors += [attribute.context.readers, attribute.context.writers]
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class _Bound:
    """An upper bound of the number of terms of an attribute, and of its rank in context."""

    terms: int
    has_evidence: bool = False
    is_simple: bool = False
    """Whether it is a constraint or rewards alone: its negation has as many terms."""
    rank: int = 0

    @classmethod
    def of(cls, attribute: Attribute) -> "_Bound":
        evidence, terms = attribute.evidence, attribute.terms
        alone = len(evidence) + (terms.automaton is not None) <= 1 and not len(terms.tokens)
        rank = 0 if attribute.context is None else len(attribute.context)
        return cls(len(terms), attribute.has_rewards, alone and len(terms) == 1, rank)

    def __and__(self, other: "_Bound") -> "_Bound":
        has_evidence = self.has_evidence or other.has_evidence
        is_simple = self.is_simple and other.is_simple and not has_evidence
        return _Bound(self.terms * other.terms, has_evidence, is_simple, self.rank + other.rank)

    def __or__(self, other: "_Bound") -> "_Bound":
        if self.has_evidence or other.has_evidence:
            raise InvalidInputError(
                "A goal combines rewards, which | cannot combine. Use &, or fit one attribute."
            )
        if self.is_simple and other.is_simple:
            return self
        return _Bound(self.terms + other.terms + self.terms * other.terms)

    def __invert__(self) -> "_Bound":
        if self.is_simple:
            return self
        if self.has_evidence:
            raise InvalidInputError(
                "A goal negates a conjunction with rewards. Negate single attributes: ~a & ~b."
            )
        return _Bound(self.terms + 1)


def require_small(goals: Sequence[GoalText], load: Callable[[str], Attribute]) -> None:
    """Raise if goals may cost too much, before anything of their size is computed.

    Args:
        goals: The goals of a request.
        load: Returns the attribute of a name.

    Raises:
        InvalidInputError: The goals are too large, or cannot be combined.
    """
    total = rank = 0
    for goal in goals:
        attributes = {name: load(name) for name in goal.names}
        bound = _bound_terms(goal, attributes)
        states = _bound_states(goal, attributes)
        if bound.has_evidence and bound.terms > 1:
            raise InvalidInputError(
                f"A goal combines rewards with a sum of {bound.terms} products. Combine evidence "
                f"with single products, required and forbidden texts, and other evidence only."
            )
        if states > 1 and (states > MAX_STATES or states * bound.terms > MAX_TABLES):
            raise InvalidInputError(
                f"The required and forbidden texts need an automaton of up to {states} states "
                f"for each of {bound.terms} terms. At most {MAX_STATES} states are allowed, and "
                f"{MAX_TABLES} for all terms together. Use fewer or shorter texts, or fewer "
                f"attributes."
            )
        require_transformable(goal.transform, bound.has_evidence)
        total, rank = total + bound.terms, rank + bound.rank
    require_small_goals(total, rank)


def _bound_terms(goal: GoalText, attributes: Mapping[str, Attribute]) -> _Bound:
    bounds = {name: _Bound.of(attribute) for name, attribute in attributes.items()}
    total = _Bound(1, is_simple=True)
    for operand in goal.operands:
        bound = operand.expression.build(bounds, lambda text: _Bound(1, is_simple=True))
        if operand.strength not in (None, 1.0) and bound.terms > 1:
            raise InvalidInputError(
                f"{operand.expression} is a sum of {bound.terms} products, and has no strength "
                f"other than 1. Fit it as evidence, or leave strength and level out."
            )
        total &= bound
    return total


def _bound_states(goal: GoalText, attributes: Mapping[str, Attribute]) -> int:
    """Return how many states the automaton of a goal has at most.

    It remembers which texts have occurred, and the longest beginning of one of the others. After a
    text that must not occur, one state remains.
    """
    forbidden = {
        operand.expression.steps[0]
        for operand in goal.operands
        if operand.expression.steps[1:] == (Operator.NOT,)
    }
    inner = {True: 0, False: 0}  # states within texts that are forbidden, or not
    for operand in goal.contains:
        inner[operand in forbidden] += operand.num_states - 2  # the first and the last are shared
    subsets = 1 << sum(operand not in forbidden for operand in goal.contains)
    states = subsets * (1 + inner[True]) + subsets * inner[False] // 2
    states += any(operand in forbidden for operand in goal.contains)
    return states * prod(attribute.terms.num_states for attribute in attributes.values())


def require_transformable(transform: LogitAffine, has_evidence: bool) -> None:
    """Raise if rewards would be transformed."""
    if has_evidence and not transform.is_identity:
        raise InvalidInputError(
            "A transform applies to probabilities, and a goal has rewards. Steer toward it by "
            "strength or level."
        )


def require_small_goals(terms: int, rank: int) -> None:
    """Raise if the goals of a request have too many terms, or too many context components."""
    counts = ((terms, MAX_TERMS, "terms"), (rank, MAX_RANK, "components of context rewards"))
    for count, most, name in counts:
        if count > most:
            raise InvalidInputError(
                f"The goals of this request have {count} {name}, but {most} are allowed. Use fewer "
                f"attributes."
            )
