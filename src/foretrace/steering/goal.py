"""Goals: what is wanted, what it becomes for one HMM, and a sequence that is steered toward it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import NamedTuple

from foretrace.attribute import Attribute, LogitAffine
from foretrace.attribute.automaton import WeightedAutomaton
from foretrace.context import Probe
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.kernels import EapKind
from foretrace.lookahead.levels import DEFAULT_LEVEL, MAX_REWARD_PRICE
from foretrace.lookahead.lookahead import Lookahead
from foretrace.steering.markers import Marker, Window, require_window

# Powers of the probability that required text comes, from benchmarks/placement.py and keywords.py.
REQUIRED_POWER = 1.3  # the LM postpones the text to the end
REQUESTED_POWER = 0.3  # the prompt has the text, too: the LM writes it more often than the HMM says
IDENTITY = LogitAffine()
WHOLE_TEXT = Window()


@dataclass(frozen=True)
class Goal:
    """An attribute to steer toward, and how strongly. Making one computes nothing.

    Steering with strength k generates a text x with a probability proportional to
    p_LM(x) * a(x) ** k, or to p_LM(x) * exp(k * sum of rewards) for evidence. Strength 1 of a
    product conditions on the attribute. A context reward, times k, is added to the logits. The
    price of steering, in nats per token, increases with the strength. A level is the strength for
    a certain price.

    Strong goals could be met by stopping early. By default, end-of-text tokens keep the probability
    that the language model gives them.

    A goal is about all generated tokens, or about those after a marker and within a window. The
    logits of other tokens are not changed, and they do not count for the attribute.

    Args:
        attribute: The attribute.
        strength: The exponent k of the attribute; more than 0. By default, the level decides.
        level: "mild", "medium" or "strong". `foretrace calibrate` finds the strengths of an
            attribute's levels. Without it, they are found with the HMM alone. The goals of a text
            and the factors of a conjunction share the price of the level. Constraints and
            attributes without powers have strength 1 at all levels.
        transform: The paper's transform of the EAP, sigma(scale * logit(p) + shift). It is applied
            after the expectation, with strength 1. By default, none.
        neutral_end: Whether end-of-text tokens keep their probability. If not, steering is exact
            also for the length of texts.
        after: A marker of `foretrace.marker`. The goal begins with the token after it, or at once
            if the prompt ends with it, apart from white space. By default, it begins at once.
        window: How many tokens the goal is about, or a marker with which it ends. By default, it
            ends with the text.

    Raises:
        InvalidInputError: If the first argument is not an Attribute, if the strength is not above
            0, if rewards have a transform, or if `after` or `window` is not as described.

    Example:
        >>> goal = ft.Goal(attribute, strength=5.0)
        >>> answer = ft.Goal(attribute, after=ft.marker("</think>", tokenizer), window=64)
        >>> compiled = ft.Compiler(hmm).compile(goal)
    """

    attribute: Attribute
    strength: float | None = None
    level: str = DEFAULT_LEVEL
    transform: LogitAffine = IDENTITY
    neutral_end: bool = True
    after: Marker | None = None
    window: int | Marker | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.attribute, Attribute):
            raise InvalidInputError(
                f"A goal needs an Attribute, but got {type(self.attribute).__name__}. "
                f"AttributeStore loads attributes by name."
            )
        if self.attribute.has_rewards and not self.transform.is_identity:
            raise InvalidInputError(
                f"A transform applies to probabilities, and the EAP of rewards is none. Steer "
                f"toward '{self.attribute.name}' by strength or level alone."
            )
        if self.strength is not None and not (isfinite(self.strength) and self.strength > 0):
            raise InvalidInputError(
                f"A strength must be a finite number above 0, not {self.strength}. To steer away "
                f"from an attribute, negate it: ~{self.attribute.name}."
            )
        require_window(self.after, self.window)


@dataclass(frozen=True)
class PooledLookahead:
    """Where a pool has the tables of a lookahead, and what else steering needs of it."""

    tables: int
    """The first of (horizon + 1) * K * Q rows."""
    weights: int
    """The first of K rows, one for each term."""
    first_only: int
    """The row of rewards that count once; 0 if there are none."""
    automaton: "PooledAutomaton | None"
    kind: EapKind
    horizon: int
    coefficients: tuple[float, ...]
    num_states: int
    """The number of states of the automaton, Q; 1 if there is none."""
    min_tokens: int
    requires_text: bool
    context: int = 0
    """The first of `rank` components of the context reward."""
    rank: int = 0
    weighted: WeightedAutomaton | None = None
    """The automaton, on the CPU."""

    @property
    def num_terms(self) -> int:
        """The number of terms, K."""
        return len(self.coefficients)

    @property
    def has_constraint(self) -> bool:
        """Whether there is an automaton."""
        return self.automaton is not None

    @property
    def has_first_only(self) -> bool:
        """Whether there are rewards that count once per text."""
        return self.first_only > 0

    @property
    def has_context(self) -> bool:
        """Whether there is a context reward."""
        return self.rank > 0

    @property
    def num_tables(self) -> int:
        """The number of rows of tables."""
        return (self.horizon + 1) * self.num_terms * self.num_states


class PooledAutomaton(NamedTuple):
    """Where a pool has an automaton of Q states, C classes and D distinct targets."""

    classes: int
    """The row with the class of every token."""
    transitions: int
    """The first of Q * C transitions."""
    states: int
    """The first of Q states."""
    targets: int
    """The first of Q * D distinct targets."""
    num_classes: int
    num_states: int
    num_targets: int


class Factor(NamedTuple):
    """One factor of a goal: f(EAP) of an attribute.

    Attributes:
        key: What the tables depend on, as a key of caches.
        lookahead: The tables, or where a pool has them.
        transform: f, the transform of the EAP.
    """

    key: str
    lookahead: Lookahead | PooledLookahead
    transform: LogitAffine = IDENTITY


@dataclass(frozen=True, eq=False)
class CompiledGoal:
    """Goals as tables and automata for one HMM. It is immutable, and requests share it.

    `Compiler.compile` makes one.

    Attributes:
        hmm: The HMM.
        factors: The factors, which multiply: the product of all goals without a transform, and
            each goal with one.
        window: The part of the generated text that the goals are about.
        neutral_end: Whether end-of-text tokens keep their probability.
        probe: The probe of the LM, if a factor has a context reward.

    Example:
        >>> compiled = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, strength=2.0))
        >>> compiled.name, len(compiled.factors)
        ('nontoxic ** 2', 1)
    """

    hmm: HMM
    factors: tuple[Factor, ...]
    window: Window = WHOLE_TEXT
    neutral_end: bool = True
    probe: Probe | None = None

    def __post_init__(self) -> None:
        require_single_constraint(sum(one.lookahead.has_constraint for one in self.factors))
        if self.window.ends_at_marker:
            require_no_text(self.requires_text)

    def __deepcopy__(self, memo: dict[int, object]) -> "CompiledGoal":
        """Return the goal itself: it does not change, and its tables are large."""
        return self

    @property
    def name(self) -> str:
        """The names of the factors' attributes."""
        lookaheads = (factor.lookahead for factor in self.factors)
        return " * ".join(one.attribute.name for one in lookaheads if isinstance(one, Lookahead))

    @cached_property
    def min_tokens(self) -> int:
        """The fewest tokens that satisfy the constraint; 0 if there is none."""
        return max(one.lookahead.min_tokens for one in self.factors)

    @cached_property
    def max_price(self) -> float:
        """How many nats a step may cost.

        Additive rewards can pay for any token. Products of weights up to 1 only avoid tokens, which
        costs as much as the language model's probability of them demands. Rewards that do not count
        once are not limited, unless they depend on the context: steering by them is exact. Required
        text is not limited either: with a limit, it would come only where nothing else is allowed,
        at the end.
        """
        if self.requires_text:
            return inf
        return MAX_REWARD_PRICE if self.has_first_only or self.has_context else inf

    @cached_property
    def requires_text(self) -> bool:
        """Whether a factor requires text."""
        return any(one.lookahead.requires_text for one in self.factors)

    def required_power(self, prompt: Sequence[int]) -> float | None:
        """Return the power of the probability that required text comes; None if none is required.

        Args:
            prompt: The token ids of the prompt. The language model expects text that it has.
        """
        if not self.min_tokens:
            return None
        size = self.hmm.vocab_size
        is_requested = all(one.has_required(prompt, size) for one in self._automata())
        return REQUESTED_POWER if is_requested else REQUIRED_POWER

    def is_met(self, tokens: Sequence[int]) -> bool:
        """Return whether a text meets the constraint, if there is one."""
        return all(one.accepts(tokens, self.hmm.vocab_size) for one in self._automata())

    def _automata(self) -> list[WeightedAutomaton]:
        automata = (
            one.terms.automaton if isinstance(one, Lookahead) else one.weighted
            for one in (factor.lookahead for factor in self.factors)
        )
        return [one for one in automata if one is not None]

    @cached_property
    def has_first_only(self) -> bool:
        """Whether a factor has rewards that count once per text."""
        return any(one.lookahead.has_first_only for one in self.factors)

    @cached_property
    def has_context(self) -> bool:
        """Whether a factor has a context reward."""
        return any(one.lookahead.has_context for one in self.factors)

    @cached_property
    def num_terms(self) -> int:
        """The number of terms of all factors."""
        return sum(one.lookahead.num_terms for one in self.factors)


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to generate: its goal and its limits; the same object at every step.

    Args:
        goal: The goal; None for a sequence that is not steered.
        prompt: The token ids of the prompt.
        limit: The largest number of tokens to generate.
        horizon: The largest number of tokens to look ahead, if less than the goal's horizon.
        stop_ids: Tokens that end the sequence. The HMM's end-of-text tokens are added.
        required_power: The power of the probability that required text comes; None if none is
            required. `Steering` finds it when it reads the prompt.

    Raises:
        InvalidInputError: If a constraint does not fit into `limit` tokens or into the window.

    Example:
        >>> from foretrace.steering import Request
        >>> compiled = ft.Compiler(hmm, horizon=8).compile(ft.Goal(attribute, 2.0))
        >>> request = Request(compiled, prompt=(5,), limit=20)
        >>> request.stop_ids == hmm.config.eos_token_ids
        True
    """

    goal: CompiledGoal | None
    prompt: tuple[int, ...]
    limit: int
    horizon: int | None = None
    stop_ids: tuple[int, ...] = ()
    required_power: float | None = None

    def __post_init__(self) -> None:
        if self.goal is None:
            return
        hmm_ends = self.goal.hmm.config.eos_token_ids
        object.__setattr__(self, "stop_ids", tuple(dict.fromkeys((*self.stop_ids, *hmm_ends))))
        length = self.goal.window.length
        limit = self.limit if length is None else min(self.limit, length)
        if self.goal.min_tokens > limit:
            raise InvalidInputError(
                f"The required texts take {self.goal.min_tokens} tokens at least, but at most "
                f"{limit} may be generated. Raise the limit, or the goal's window."
            )

    @property
    def reads_prompt(self) -> bool:
        """Whether steering depends on which tokens the prompt has."""
        goal = self.goal
        return goal is not None and (goal.window.after is not None or goal.min_tokens > 0)

    def with_prompt(self, prompt: Sequence[int]) -> "Request":
        """Return the same request with the power that its goal has after a prompt."""
        power = None if self.goal is None else self.goal.required_power(prompt)
        return replace(self, required_power=power)

    def with_goal(self, goal: CompiledGoal) -> "Request":
        """Return the same request for the same goal in another form."""
        return replace(self, goal=goal)

    def steers_like(self, other: "Request") -> bool:
        """Return whether another request in the same pool has an equal goal and equal limits."""
        if self.goal is None or other.goal is None:
            return self.goal is other.goal
        mine, others = (
            (
                (one.limit, one.horizon, one.stop_ids, one.required_power),
                (goal.factors, goal.window, goal.neutral_end),
            )
            for one, goal in ((self, self.goal), (other, other.goal))
        )
        return mine == others


def require_single_constraint(count: int) -> None:
    """Check that at most one factor of a goal has a constraint: an automaton.

    Args:
        count: The number of factors that have one.

    Raises:
        InvalidInputError: If there is more than one. Each constraint forbids tokens that cannot
            satisfy it any more; two of them may forbid every token.
    """
    if count > 1:
        raise InvalidInputError(
            f"{count} goals say which texts must or must not occur, but only one goal of a request "
            f'may. Join them by &, as in nontoxic & contains("refund"): apart, they might leave no '
            f"token that satisfies all of them."
        )


def require_probe(attribute: Attribute, probe: Probe | None) -> None:
    """Check that a probe can read what the context reward of an attribute depends on.

    Args:
        attribute: The attribute.
        probe: The probe of the language model, if there is one.

    Raises:
        InvalidInputError: If there is a context reward, and no probe of the LM that it belongs to.
    """
    if attribute.context is None:
        return
    head, make = attribute.context.fingerprint, "`foretrace probe LM --out FILE` makes one"
    if probe is None:
        raise InvalidInputError(
            f"'{attribute.name}' has a context reward, which needs a probe of its LM, whose head "
            f"is {head}: {make}. Pass it as `probe`."
        )
    if not probe.serves(head):
        raise InvalidInputError(
            f"'{attribute.name}' has a context reward for the LM whose head is {head}, but the "
            f"probe is of {probe.config.source or 'an LM'}, whose head is "
            f"{probe.config.fingerprint}. Use the LM, the attribute and the probe that belong "
            f"together: {make}."
        )


def require_no_text(required: bool) -> None:
    """Check that no text is required in a window that ends at a marker.

    Args:
        required: Whether a goal requires text.

    Raises:
        InvalidInputError: If it does. The language model may write the marker before the text.
    """
    if required:
        raise InvalidInputError(
            "A goal requires text in a window that ends at a marker, and the marker may come "
            "before the text. Let the window be a number of tokens, or end with the text."
        )
