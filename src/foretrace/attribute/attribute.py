"""The attribute: a frozen classifier whose probability is a signed sum of products of weights."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from foretrace.attribute import storage
from foretrace.attribute.automata.substring import substring_dfa
from foretrace.attribute.automata.weighted import WeightedAutomaton
from foretrace.attribute.config import AttributeConfig
from foretrace.attribute.fitting.counts import Texts, flattened
from foretrace.attribute.fitting.fit import Examples, FitConfig, fit_terms
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidInputError
from foretrace.vocabulary import require_same_fingerprint


class TokenEffect(NamedTuple):
    """A token, and the probability of the attribute in a text of this one token."""

    token: int
    probability: float


@dataclass(frozen=True, eq=False)
class Attribute:
    """p(s | x) = sum_k c_k prod_i w_k(x_i): section 4.3, and what `&`, `|`, `~` make of it.

    Attributes count as independent given the text: `a & b` is a * b, so `a & a` is a squared and
    `a & ~a` is a * (1 - a), not 0.
    """

    terms: Terms
    config: AttributeConfig = field(default_factory=AttributeConfig)
    _complement: "Attribute | None" = field(default=None, init=False, repr=False)

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
        name: str = "attribute",
        tokenizer_fingerprint: str | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> Self:
        """Fit an attribute to texts and their probabilities of having it, in about a second.

        Without `validation` texts, a share of the texts is held out: of windows with the same
        number in `groups` all or none. How well the attribute does on them is in `config.fit`, with
        `source`, which may say where the texts and scores are from.
        """
        examples = Examples.of(token_ids, scores, vocab_size, groups)
        config = config or FitConfig()
        if validation is None:
            examples, held_out = examples.split(config.held_out, config.seed)
        else:
            held_out = Examples.of(*validation, vocab_size)
        terms, facts = fit_terms(examples, held_out, config)
        facts["source"] = dict(source or {})
        return cls(terms, AttributeConfig(name, vocab_size, tokenizer_fingerprint, facts))

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
        tokenizer_fingerprint: str | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Fit one attribute per label from examples of each: the others' texts are its negatives.

        By default by absence: what tells one label from many others is a few tokens that reveal it.
        The share of texts to hold out is taken of every label.
        """
        names = sorted(set(labels))
        if len(names) < 2:
            raise InvalidInputError(
                f"All texts have one label, '{', '.join(names)}': there are no others' texts to "
                f"tell them from."
            )
        config = config or FitConfig(by_absence=True)
        numbers = {name: number for number, name in enumerate(names)}
        examples = Examples.labelled(token_ids, labels, numbers, vocab_size, groups)
        if validation is None:
            examples, held_out = examples.split(config.held_out, config.seed)
        else:
            held_out = Examples.labelled(*validation, numbers, vocab_size)
        for name, number in numbers.items():
            terms, facts = fit_terms(examples.of_label(number), held_out.of_label(number), config)
            facts["source"] = dict(source or {})
            yield cls(terms, AttributeConfig(name, vocab_size, tokenizer_fingerprint, facts))

    @classmethod
    def from_weights(
        cls, weights: Tensor, *, name: str = "attribute", tokenizer_fingerprint: str | None = None
    ) -> Self:
        """Make an attribute of one product: (V,) weights in [0, 1]."""
        if weights.dim() != 1 or not bool(((weights >= 0) & (weights <= 1)).all()):
            raise InvalidInputError(
                f"Weights must be a tensor of shape (V,), with a number in [0, 1] for each token; "
                f"these have shape {tuple(weights.shape)} or other numbers."
            )
        weights = weights.detach().cpu()
        tokens = (weights < 1).nonzero()[:, 0]
        one = torch.ones(1, dtype=torch.float64)
        config = AttributeConfig(name, len(weights), tokenizer_fingerprint)
        return cls(Terms(one, tokens.to(torch.int32), weights[tokens].log()[None]), config)

    @classmethod
    def occurrence(
        cls,
        texts: str | Sequence[str],
        spelled: Sequence[bytes],
        *,
        name: str | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> Self:
        """Make the attribute that a text contains this one, or any of these: 1 or 0, no doubt.

        `spelled` is what each token stands for (`foretrace.engines.token_bytes` knows): it does not
        matter how a text is cut into tokens. It is found within words, too; the prompt does not
        count.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        dfa, occurred = substring_dfa(given, spelled)
        one = Terms.one()
        terms = replace(one, automaton=WeightedAutomaton(dfa, occurred.double()[None]))
        if not bool(occurred.any()):
            terms = one.negated()  # these tokens do not spell it
        called = name or " or ".join(map(repr, given))
        config = AttributeConfig(called, len(spelled), tokenizer_fingerprint)
        return cls(terms, config)

    @property
    def name(self) -> str:
        """What it is called."""
        return self.config.name

    def renamed(self, name: str) -> "Attribute":
        """Give the same attribute under another name."""
        return Attribute(self.terms, replace(self.config, name=name))

    def __and__(self, other: "Attribute") -> "Attribute":
        """Both: the product of the probabilities."""
        config = self.config.combined("&", other.config)
        return Attribute(self.terms.times(other.terms), config)

    def __or__(self, other: "Attribute") -> "Attribute":
        """Either: a + b - a * b."""
        config = self.config.combined("|", other.config)
        return Attribute(self.terms.either(other.terms), config)

    def __invert__(self) -> "Attribute":
        """Not: 1 - a. `~~a` is `a`."""
        if self._complement is None:
            config = replace(self.config, name=f"~{self.name}", fit={})
            complement = Attribute(self.terms.negated(), config)
            for one, other in ((self, complement), (complement, self)):
                object.__setattr__(one, "_complement", other)  # remembered, nothing changed
            return complement
        return self._complement

    def probability(self, tokens: Tensor | Texts, mask: Tensor | None = None) -> Tensor:
        """Give p(s | x) of every text: (n, T) ids, or a list of lists of them -> (n,) float64.

        A `mask` is (n, T), True where there is a token. A text without tokens has what the empty
        product says: 1 for one fitted product.
        """
        if not isinstance(tokens, Tensor):
            lengths = torch.tensor([len(text) for text in tokens], dtype=torch.long)
            flat = torch.from_numpy(flattened(tokens))
            texts = torch.arange(len(tokens)).repeat_interleave(lengths)
            return self.terms.probability(self.terms.sums(flat, texts, len(tokens)))
        if tokens.dim() != 2:
            raise InvalidInputError(
                f"Give texts as (texts, tokens), not as {tuple(tokens.shape)}: `tokens[None]` for "
                f"one text."
            )
        present = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        texts = present.nonzero()[:, 0].cpu()
        sums = self.terms.sums(tokens[present].cpu(), texts, len(tokens))
        return self.terms.probability(sums).to(tokens.device)

    def top_tokens(self, count: int = 20) -> list[TokenEffect]:
        """List the tokens that change the probability most, strongest first."""
        alone = self.terms.probability(self.terms.log_weights.T)
        nothing = self.terms.probability(torch.zeros(1, len(self.terms)))
        order = (alone - nothing).abs().argsort(descending=True, stable=True)[:count]
        return [TokenEffect(int(self.terms.tokens[at]), float(alone[at])) for at in order]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: weights, and in its header all that is known beside them."""
        storage.write(Path(path), self.terms, self.config)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, tokenizer_fingerprint: str | None = None
    ) -> Self:
        """Read what `save` wrote; refuse it if it was fitted with another tokenizer."""
        terms, config = storage.read(Path(path))
        require_same_fingerprint(
            f"The attribute '{config.name}'", config.tokenizer_fingerprint, tokenizer_fingerprint
        )
        return cls(terms, config)
