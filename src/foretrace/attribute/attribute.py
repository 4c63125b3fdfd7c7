"""The attribute: a frozen classifier whose probability is a signed sum of products of weights."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute import storage
from foretrace.attribute.automaton import WeightedAutomaton
from foretrace.attribute.config import AttributeConfig
from foretrace.attribute.context import ContextReward
from foretrace.attribute.evidence import Evidence
from foretrace.attribute.fitting.candidate import Candidate, FitConfig
from foretrace.attribute.fitting.examples import Examples, token_counts
from foretrace.attribute.fitting.fit import fit_each_label, fit_scores
from foretrace.attribute.fitting.rewards import LMData
from foretrace.attribute.fitting.split import Split
from foretrace.attribute.fitting.surface import surface
from foretrace.attribute.fitting.warnings import find_warnings
from foretrace.attribute.fitting.words import Decoder
from foretrace.attribute.report import AttributeReport
from foretrace.attribute.substring import substring_dfa
from foretrace.attribute.terms import Terms
from foretrace.attribute.token_ids import Mask, Text, Texts, flatten
from foretrace.errors import InvalidInputError
from foretrace.vocabulary import require_same_fingerprint


class TokenEffect(NamedTuple):
    """A token, and the probability of the attribute for the text of this one token.

    Attributes:
        token: The token id.
        probability: The probability of the attribute.
    """

    token: int
    probability: float


@dataclass(frozen=True, eq=False)
class Attribute:
    """A classifier of token sequences, of one of two forms, or a conjunction of both.

    A sum of products of token weights, p(s | x) = sum_k c_k prod_i w_k(x_i), section 4.3: what a
    text must avoid. Or evidence, p(s | x) = sigma(bias + sum_i v(x_i)), with rewards v of either
    sign: what speaks for and against.

    Attributes are combined by `&` (the product a * b), `|` (a + b - a * b), `~` (1 - a) and `**`.
    The power k means that k independent readers would all agree. Attributes count as independent
    given the text: `a & a` is a squared, and `a & ~a` is a * (1 - a), not 0. Evidence cannot be an
    operand of `|`, because its sum with another classifier is no product.

    A context reward adds to the rewards of evidence what a token means in its context, which only
    the LM knows. Steering applies it, and needs a probe of the LM. `&`, `~` and `**` apply to it as
    to evidence.

    `fit`, `fit_each`, `from_weights`, `from_rewards`, `contains` and `load` make attributes, which
    are immutable.

    Attributes:
        terms: The coefficients c_k and the log-weights log w_k.
        config: The name, the vocabulary, the record of the fit and the strength of each level.
        evidence: The evidence of each operand that has some.
        context: The sum of the operands' context rewards; None if there are none.

    Example:
        >>> polite = ft.Attribute.from_weights([1.0, 0.5, 0.9], name="polite")
        >>> polite.probability([[0, 1, 1], [2]])
        tensor([0.2500, 0.9000], dtype=torch.float64)
        >>> (~polite).probability([[0, 1, 1], [2]])
        tensor([0.7500, 0.1000], dtype=torch.float64)
    """

    terms: Terms
    config: AttributeConfig = field(default_factory=AttributeConfig)
    evidence: tuple[Evidence, ...] = ()
    context: ContextReward | None = None
    _negation: "Attribute | None" = field(default=None, init=False, repr=False)
    _factors: tuple["Attribute", ...] = field(default=(), init=False, repr=False)

    @classmethod
    def fit(
        cls,
        token_ids: Texts,
        scores: Sequence[float] | Tensor,
        *,
        vocab_size: int,
        config: FitConfig | None = None,
        groups: Sequence[int] | None = None,
        validation: tuple[Texts, Sequence[float] | Tensor] | None = None,
        frequencies: Tensor | None = None,
        embeddings: Tensor | None = None,
        samples: tuple[Texts, Sequence[float] | Tensor] | None = None,
        name: str = "attribute",
        tokenizer_fingerprint: str | None = None,
        source: Mapping[str, Any] | None = None,
        tokenizer: Decoder | None = None,
        prompts: Texts | None = None,
    ) -> Self:
        """Fit an attribute to scored texts, in about a second.

        Near duplicates are held out together. `config.fit` of the result has the metrics on
        held-out texts, and under "warnings" sentences on faults of the texts.

        Args:
            token_ids: The token ids of each text.
            scores: The probability that each text has the attribute.
            vocab_size: The number of tokens in the vocabulary.
            config: How to fit.
            groups: A number for each text. Texts with the same number, such as windows of one
                document, are held out together.
            validation: Texts and scores to hold out. By default, a share of the texts.
            frequencies: How often the language model writes each token, (V,), as
                `HMM.token_frequencies` returns them. Evidence then costs less at the same effect:
                frequent tokens get a reward only if they decide much.
            embeddings: An embedding of each token, (V, k), as
                `foretrace.context.token_embeddings` returns them. Similar tokens then share their
                rewards, and tokens that no text contains have a reward, too.
            samples: Texts that the language model wrote, and their scores by a classifier of whole
                texts, as `engines.transformers.samples` makes them. Evidence then knows the words
                that the language model chooses among. This needs frequencies.
            name: The name of the attribute.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.
            source: A description of the texts and scores, stored with the attribute.
            tokenizer: The tokenizer, for warnings about words. Without it, they are about token
                ids.
            prompts: The token ids of prompts to steer from. A warning tells if the texts have
                nothing in common with them.

        Returns:
            The fitted attribute.

        Raises:
            InvalidInputError: If texts, scores and groups do not match or cannot be fitted.

        Example:
            >>> texts, scores = [[0, 1], [0, 2], [1, 2], [2, 2]] * 10, [0.1, 0.2, 0.9, 1.0] * 10
            >>> rare_zero = ft.Attribute.fit(texts, scores, vocab_size=3)
            >>> rare_zero.top_tokens(1)[0].token
            0
        """
        examples = Examples.from_scores(token_ids, scores, vocab_size, groups)
        config = config or FitConfig()
        held_out = None if validation is None else Examples.from_scores(*validation, vocab_size)
        split = Split.of(examples, held_out, config.held_out, config.seed)
        lm = _checked_lm(frequencies, embeddings, vocab_size)
        if samples is not None:
            if frequencies is None:
                raise InvalidInputError(
                    "Samples of a language model need its token frequencies: the rewards of texts "
                    "and of samples are added at equal price. Pass `frequencies`, too."
                )
            lm = lm._replace(samples=Examples.from_scores(*samples, vocab_size))
        candidate = fit_scores(split.fitting, split.held_out, config, lm)
        counts = None if prompts is None else token_counts(prompts, vocab_size)
        features = surface(split.fitting, tokenizer)
        warnings = find_warnings(split, candidate, features, tokenizer, counts)
        candidate = candidate.with_facts(**split.record, warnings=warnings)
        known = AttributeConfig(name, vocab_size, tokenizer_fingerprint)
        return cls._from_candidate(candidate, known, source)

    @classmethod
    def fit_each(
        cls,
        token_ids: Texts,
        labels: Sequence[str],
        *,
        vocab_size: int,
        config: FitConfig | None = None,
        groups: Sequence[int] | None = None,
        validation: tuple[Texts, Sequence[str]] | None = None,
        frequencies: Tensor | None = None,
        embeddings: Tensor | None = None,
        tokenizer_fingerprint: str | None = None,
        source: Mapping[str, Any] | None = None,
        tokenizer: Decoder | None = None,
    ) -> Iterator[Self]:
        """Fit one attribute per label; the texts of all other labels are its negatives.

        By default, fit evidence to all labels at once by a softmax, unless products by absence,
        compared on up to 10 labels, rank the right label first more often. The log-odds of evidence
        also rank the labels. The same share of the texts of each label is held out.

        Args:
            token_ids: The token ids of each text.
            labels: The label of each text.
            vocab_size: The number of tokens in the vocabulary.
            config: How to fit.
            groups: A number for each text. Texts with the same number are held out together.
            validation: Texts and labels to hold out. By default, a share of the texts.
            frequencies: How often the language model writes each token, as in `fit`.
            embeddings: An embedding of each token, as in `fit`.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.
            source: A description of the texts and labels, stored with each attribute.
            tokenizer: The tokenizer, for warnings about words.

        Yields:
            The attribute of each label, in alphabetical order. Its name is the label.

        Raises:
            InvalidInputError: If all texts have the same label, or inputs do not match.

        Example:
            >>> texts, labels = [[0, 2], [1, 2], [0, 0], [1, 1]] * 10, ["a", "b", "a", "b"] * 10
            >>> [one.name for one in ft.Attribute.fit_each(texts, labels, vocab_size=3)]
            ['a', 'b']
        """
        names = sorted(set(labels))
        if len(names) < 2:
            raise InvalidInputError(
                f"There are no others' texts to compare with: all have the label "
                f"'{', '.join(names)}'. Add texts of another label."
            )
        config = config or FitConfig()
        numbers = {name: number for number, name in enumerate(names)}
        examples = Examples.from_labels(token_ids, labels, numbers, vocab_size, groups)
        held_out = None
        if validation is not None:
            held_out = Examples.from_labels(*validation, numbers, vocab_size)
        split = Split.of(examples, held_out, config.held_out, config.seed)
        lm = _checked_lm(frequencies, embeddings, vocab_size)
        fitted = fit_each_label(split.fitting, split.held_out, len(names), config, lm)
        features = surface(split.fitting, tokenizer)
        for number, (name, candidate) in enumerate(zip(names, fitted, strict=True)):
            of_label = split.scored_by_label(number)
            warnings = find_warnings(of_label, candidate, features, tokenizer)
            known = AttributeConfig(name, vocab_size, tokenizer_fingerprint)
            facts = {**split.record, "warnings": warnings}
            yield cls._from_candidate(candidate.with_facts(**facts), known, source)

    @classmethod
    def _from_candidate(
        cls, candidate: Candidate, config: AttributeConfig, source: Mapping[str, Any] | None
    ) -> Self:
        record = {**candidate.record, "source": dict(source or {})}
        return cls(candidate.terms, replace(config, fit=record), candidate.evidence)

    @classmethod
    def from_weights(
        cls,
        weights: Sequence[float] | NDArray[Any] | Tensor,
        *,
        name: str = "attribute",
        tokenizer_fingerprint: str | None = None,
    ) -> Self:
        """Make an attribute from one weight per token.

        Args:
            weights: A number in [0, 1] for each token of the vocabulary: (V,), as a list, an array
                or a tensor.
            name: The name of the attribute.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.

        Returns:
            The attribute whose probability is the product of the weights of a text's tokens.

        Raises:
            InvalidInputError: If the weights are not one-dimensional or not in [0, 1].

        Example:
            >>> ft.Attribute.from_weights(torch.tensor([1.0, 0.25])).probability([[1], [0, 0]])
            tensor([0.2500, 1.0000], dtype=torch.float64)
        """
        values = _number_tensor(
            "Weights", weights, "a number in [0, 1]", lambda values: (values >= 0) & (values <= 1)
        )
        tokens = (values < 1).nonzero()[:, 0]
        one = torch.ones(1, dtype=torch.float64)
        config = AttributeConfig(name, len(values), tokenizer_fingerprint)
        return cls(Terms(one, tokens.to(torch.int32), values[tokens].log()[None]), config)

    @classmethod
    def from_rewards(
        cls,
        rewards: Sequence[float] | NDArray[Any] | Tensor,
        *,
        bias: float = 0.0,
        first_only: bool = True,
        name: str = "attribute",
        tokenizer_fingerprint: str | None = None,
    ) -> Self:
        """Make an attribute from one reward per token: sigma(bias + sum of rewards).

        Args:
            rewards: A finite number for each token of the vocabulary: (V,), as a list, an array or
                a tensor.
            bias: The log-odds of a text without rewards.
            first_only: Whether only the first occurrence of a token in a text counts. Otherwise,
                steering toward the attribute rewards every repetition.
            name: The name of the attribute.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.

        Returns:
            The attribute.

        Raises:
            InvalidInputError: If the rewards are not one-dimensional or not finite.

        Example:
            >>> kind = ft.Attribute.from_rewards([0.0, 2.0, -1.0])
            >>> kind.probability([[0], [1, 1, 0], [1, 2, 2]])
            tensor([0.5000, 0.8808, 0.7311], dtype=torch.float64)
        """
        values = _number_tensor("Rewards", rewards, "a finite number", torch.isfinite)
        tokens = values.nonzero()[:, 0]
        evidence = Evidence(float(bias), tokens.to(torch.int32), values[tokens], first_only)
        config = AttributeConfig(name, len(values), tokenizer_fingerprint)
        return cls(Terms.one(), config, (evidence,))

    @classmethod
    def contains(
        cls,
        texts: str | Sequence[str],
        spelled: Sequence[bytes],
        *,
        whole_word: bool = False,
        ignore_case: bool = False,
        name: str | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> Self:
        """Make the attribute that a text contains one of these substrings.

        Its probability is 1 or 0. Substrings are found with any split of the text into tokens. The
        prompt does not count. `foretrace.contains` does the same for a tokenizer.

        Args:
            texts: The substring, or several of them.
            spelled: The bytes of each token; empty for control tokens.
            whole_word: Whether a substring counts only if no letter, digit or underscore is next to
                it. If not, it is also found within words.
            ignore_case: Whether small and capital letters are the same, by Unicode's case folding.
            name: The name of the attribute. By default, the quoted substrings.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.

        Returns:
            The attribute.

        Raises:
            InvalidInputError: If there is no substring, or if they are empty or too long.

        Example:
            >>> refund = ft.Attribute.contains("refund", [b"re", b"fund", b" "])
            >>> refund.probability([[0, 1], [0, 2, 1]])
            tensor([1., 0.], dtype=torch.float64)
        """
        substrings = [texts] if isinstance(texts, str) else list(texts)
        dfa, accepting = substring_dfa(
            substrings, spelled, whole_word=whole_word, ignore_case=ignore_case
        )
        one = Terms.one()
        terms = replace(one, automaton=WeightedAutomaton(dfa, accepting.double()[None]))
        if not bool(accepting.any()):
            terms = one.negated()  # no sequence of these tokens contains a substring
        name = name or " or ".join(map(repr, substrings))
        return cls(terms, AttributeConfig(name, len(spelled), tokenizer_fingerprint))

    @property
    def name(self) -> str:
        """The name of the attribute."""
        return self.config.name

    @property
    def report(self) -> AttributeReport | None:
        """What steering toward the attribute does, as `foretrace calibrate` measured it, or None.

        Example:
            >>> attribute.report is None
            True
        """
        fit = self.config.fit
        if "report" not in fit:
            return None
        return AttributeReport.from_record(fit["report"], fit.get("warnings", ()))

    @cached_property
    def checksum(self) -> str:
        """The SHA-256 of what steering depends on, in hexadecimal.

        This is terms, automaton, evidence and context reward.

        Attributes with equal content have the same checksum, in every process and after `save` and
        `load`. The name, the vocabulary and the record of the fit do not count. It is computed when
        it is first read.

        Example:
            >>> attribute.renamed("friendly").checksum == attribute.checksum
            True
        """
        return storage.checksum(self._stored)

    def renamed(self, name: str) -> "Attribute":
        """Return the same attribute under another name.

        Args:
            name: The new name.

        Returns:
            The renamed attribute.

        Example:
            >>> attribute.renamed("friendly").name
            'friendly'
        """
        return replace(self, config=replace(self.config, name=name))

    def with_context(self, context: ContextReward | None) -> "Attribute":
        """Return the attribute with another context reward.

        Args:
            context: The context reward; None to remove it.

        Returns:
            The attribute, without levels and report: they were measured with other rewards.

        Example:
            >>> from foretrace.attribute import ContextReward
            >>> reward = ContextReward(torch.ones(1, 3), torch.ones(1, 2), "sha256:0")
            >>> (~ft.Attribute.from_rewards([1.0, 0.0]).with_context(reward)).context.writers
            tensor([[-1., -1.]])
        """
        measured = ("calibration", "report")
        fit = {name: value for name, value in self.config.fit.items() if name not in measured}
        config = replace(self.config, fit=fit, levels={}, negation_levels={})
        return replace(self, config=config, context=context)

    @property
    def _stored(self) -> storage.Stored:
        return storage.Stored(self.terms, self.config, self.evidence, self.context)

    def __and__(self, other: "Attribute") -> "Attribute":
        """Return the conjunction: the product of both probabilities."""
        if not isinstance(other, Attribute):
            return NotImplemented
        config = self.config.combined("&", other.config)
        for operand, rest in ((self, other), (other, self)):
            if not rest.has_weights:  # a constraint has no strength: the operand's levels hold
                config = replace(config, levels=operand.config.levels)
        context = other.context if self.context is None else self.context.joined(other.context)
        evidence = self.evidence + other.evidence
        product = Attribute(self.terms.times(other.terms), config, evidence, context)
        object.__setattr__(product, "_factors", (*self.factors, *other.factors))
        return product

    @property
    def factors(self) -> tuple["Attribute", ...]:
        """The attributes that `&` combined into this one, or the attribute itself.

        Each has its own levels. A file does not record them.

        Example:
            >>> a, b = ft.Attribute.from_rewards([1.0]), ft.Attribute.from_rewards([2.0])
            >>> (a & b).factors == (a, b)
            True
        """
        return self._factors or (self,)

    def __or__(self, other: "Attribute") -> "Attribute":
        """Return the disjunction: a + b - a * b."""
        if not isinstance(other, Attribute):
            return NotImplemented
        for operand in (self, other):
            if operand.has_rewards:
                raise InvalidInputError(
                    f"{operand.name} has rewards, which | cannot combine: a + b - a * b of them is "
                    f"no sum of products of token weights. Use &, or fit both as one attribute."
                )
        config = self.config.combined("|", other.config)
        return Attribute(self.terms.either(other.terms), config)

    def __invert__(self) -> "Attribute":
        """Return the negation: 1 - a. `~~a` is `a`."""
        if self._negation is not None:
            return self._negation
        terms, evidence = self.terms, tuple(one.negated() for one in self.evidence)
        context = None if self.context is None else self.context.scaled(-1.0)
        if not self.has_rewards:
            terms = terms.negated()
        elif not self.is_evidence:
            raise InvalidInputError(
                f"{self.name} is a conjunction with rewards, and its negation is no sum of "
                f"products. Negate single attributes: ~a & ~b."
            )
        negation = Attribute(terms, self.config.negated(), evidence, context)
        for one, other in ((self, negation), (negation, self)):
            object.__setattr__(one, "_negation", other)  # a cache: no value changes
        return negation

    @property
    def has_weights(self) -> bool:
        """Whether token weights or rewards decide, and not a constraint alone."""
        return self.has_words or self.context is not None

    @property
    def has_words(self) -> bool:
        """Whether tokens have weights or rewards that do not depend on the context."""
        return bool(len(self.terms.tokens)) or bool(self.evidence)

    @property
    def has_rewards(self) -> bool:
        """Whether there is evidence or a context reward."""
        return bool(self.evidence) or self.context is not None

    @property
    def is_evidence(self) -> bool:
        """Whether the attribute is rewards of one classifier, so that its negation is, too."""
        terms = self.terms
        weighted = bool(len(terms.tokens)) or terms.automaton is not None or not terms.is_product
        return self.has_rewards and len(self.evidence) <= 1 and not weighted

    @property
    def is_never_true(self) -> bool:
        """Whether the probability of every text is 0: parts of it contradict each other."""
        return not len(self.terms)

    def require_satisfiable(self) -> None:
        """Check that some text can have the attribute, so that steering toward it is possible.

        Raises:
            InvalidInputError: If `is_never_true`.
        """
        if self.is_never_true:
            raise InvalidInputError(
                f"No text can satisfy {self.name}: its goals contradict each other, such as a text "
                f"that must and must not be contained, or the tokenizer has no tokens to write a "
                f"required text. Remove one of them."
            )

    @property
    def has_power(self) -> bool:
        """Whether `**` applies: the attribute is a product, evidence, or a conjunction of them."""
        return self.terms.is_product

    def __pow__(self, exponent: float) -> "Attribute":
        """Return the power: k independent readers would all agree. Evidence is multiplied by k."""
        if not isinstance(exponent, int | float):
            return NotImplemented
        if not (isfinite(exponent) and exponent > 0):
            raise InvalidInputError(
                f"A strength must be a finite number above 0, not {exponent}. To steer away from "
                f"an attribute, negate it: ~{self.name}."
            )
        if exponent == 1:
            return self
        if not self.has_power:
            raise InvalidInputError(
                f"{self.name} is a sum of {len(self.terms)} products, and has no strength other "
                f"than 1: only powers of a single product are exact. Fit it as evidence, or leave "
                f"strength and level out."
            )
        config = replace(
            self.config,
            name=f"{self.name} ** {exponent:g}",
            fit={},
            levels={},
            negation_levels={},
        )
        evidence = tuple(one.scaled(exponent) for one in self.evidence)
        context = None if self.context is None else self.context.scaled(exponent)
        return Attribute(self.terms.power(exponent), config, evidence, context)

    def probability(self, tokens: Text | Texts, mask: Mask | None = None) -> Tensor:
        """Compute p(s | x) of one text or of several, by their words.

        A context reward does not count: it depends on what the LM makes of the text.

        Args:
            tokens: The token ids of one text (T,) or of several (n, T), as lists, arrays or
                tensors. A list of texts may have texts of different lengths.
            mask: True where there is a token, in the shape of `tokens`. By default, everywhere.

        Returns:
            The probabilities, in float64: (), or (n,) for several texts. A text without tokens has
            the value of the empty product: 1 for one fitted product.

        Raises:
            InvalidInputError: If the tokens are not integers, or shapes do not match.

        Example:
            >>> polite = ft.Attribute.from_weights([1.0, 0.5, 0.25])
            >>> polite.probability([0, 1, 2])
            tensor(0.1250, dtype=torch.float64)
            >>> polite.probability(torch.tensor([[0, 1], [2, 0]]), mask=[[1, 1], [0, 1]])
            tensor([0.5000, 1.0000], dtype=torch.float64)
        """
        ids, text_index, shape = flatten(tokens, mask)
        sums = self.terms.sums(ids, text_index, prod(shape))
        probabilities = self.terms.probability(sums)
        for evidence in self.evidence:
            probabilities *= evidence.log_odds(ids, text_index, prod(shape)).sigmoid()
        probabilities = probabilities.reshape(shape)
        return probabilities.to(tokens.device) if isinstance(tokens, Tensor) else probabilities

    def top_tokens(self, count: int = 20) -> list[TokenEffect]:
        """Return the tokens that change the probability most.

        Args:
            count: The number of tokens.

        Returns:
            Tokens and the probability of the text of this one token, by descending effect: the
            difference from the probability of the empty text.

        Example:
            >>> ft.Attribute.from_weights([1.0, 0.5, 0.9]).top_tokens(1)
            [TokenEffect(token=1, probability=0.5)]
        """
        tokens = torch.unique(torch.cat([self.terms.tokens, *(e.tokens for e in self.evidence)]))
        terms, no_automaton = self.terms, replace(self.terms, automaton=None)
        alone = terms.probability(no_automaton.weights(tokens).log().T)
        empty = terms.probability(torch.zeros(1, len(terms)))
        for evidence in self.evidence:
            index = torch.arange(len(tokens))
            alone *= evidence.log_odds(tokens, index, len(tokens)).sigmoid()
            empty *= 1 / (1 + exp(-evidence.bias))
        order = (alone - empty).abs().argsort(descending=True, stable=True)[:count]
        return [TokenEffect(int(tokens[i]), float(alone[i])) for i in order]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the attribute as one safetensors file, with its config in the header.

        Args:
            path: The file. An existing file is replaced.

        Raises:
            InvalidInputError: If the record of the fit holds values that JSON has not.

        Example:
            >>> attribute.save(folder / "nontoxic.safetensors")
        """
        storage.write(Path(path), self._stored)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, tokenizer_fingerprint: str | None = None
    ) -> Self:
        """Read an attribute that `save` wrote.

        Args:
            path: The file.
            tokenizer_fingerprint: The fingerprint of the tokenizer in use, to compare with.

        Returns:
            The attribute.

        Raises:
            InvalidFileError: If the file is missing, damaged or not an attribute.
            TokenizerMismatchError: If the attribute was made with another tokenizer.

        Example:
            >>> attribute.save(folder / "nontoxic.safetensors")
            >>> ft.Attribute.load(folder / "nontoxic.safetensors").name
            'nontoxic'
        """
        stored = storage.read(Path(path))
        config = stored.config
        require_same_fingerprint(
            f"The attribute '{config.name}'", config.tokenizer_fingerprint, tokenizer_fingerprint
        )
        return cls(*stored)


def _checked_lm(frequencies: Tensor | None, embeddings: Tensor | None, vocab_size: int) -> LMData:
    """Return what is known of `vocab_size` tokens. Tokens that the LM has not get 0."""
    known = table = None
    if frequencies is not None:
        values = _number_tensor("Frequencies", frequencies, "0 or more", lambda values: values >= 0)
        known = np.zeros(vocab_size)
        known[: len(values)] = values.double().numpy()[:vocab_size]
    if embeddings is not None:
        if embeddings.dim() != 2 or not bool(embeddings.isfinite().all()):
            raise InvalidInputError(
                f"Embeddings must be finite and of shape (V, k), but they have the shape "
                f"{tuple(embeddings.shape)} or are not finite."
            )
        table = np.zeros((vocab_size, embeddings.shape[1]), dtype=np.float32)
        table[: len(embeddings)] = embeddings.float().cpu().numpy()[:vocab_size]
    return LMData(known, table)


def _number_tensor(
    subject: str, numbers: Any, expected: str, is_valid: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return numbers as a tensor on the CPU, in float32 or float64; check shape and range."""
    try:
        # Python's floats have the precision of float64; a tensor or an array keeps its type.
        values = numbers if isinstance(numbers, Tensor) else torch.tensor(np.asarray(numbers))
        values = values.detach().cpu().to(torch.promote_types(values.dtype, torch.float32))
    except (TypeError, ValueError, RuntimeError):
        values = torch.zeros(())
    if values.dim() != 1 or values.is_complex() or not bool(is_valid(values).all()):
        raise InvalidInputError(
            f"{subject} must be a tensor, array or list of shape (V,), with {expected} for each "
            f"token."
        )
    return values
