"""The attribute: a frozen classifier whose probability is a signed sum of products of weights."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretrace.attribute import storage
from foretrace.attribute.automata.substring import substring_dfa
from foretrace.attribute.automata.weighted import WeightedAutomaton
from foretrace.attribute.config import AttributeConfig
from foretrace.attribute.fitting.fit import Examples, FitConfig, fit_terms
from foretrace.attribute.terms import Terms
from foretrace.attribute.texts import Mask, Text, Texts, flatten
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
    """A classifier of token sequences: p(s | x) = sum_k c_k prod_i w_k(x_i), section 4.3.

    Attributes are combined by `&` (the product a * b), `|` (a + b - a * b) and `~` (1 - a). They
    count as independent given the text: `a & a` is a squared, and `a & ~a` is a * (1 - a), not 0.

    An attribute is made by `fit`, `fit_each`, `from_weights`, `occurrence` or `load`. It is
    immutable.

    Attributes:
        terms: The coefficients c_k and the log-weights log w_k.
        config: The name, the vocabulary and the record of the fit.

    Example:
        >>> polite = ft.Attribute.from_weights([1.0, 0.5, 0.9], name="polite")
        >>> polite.probability([[0, 1, 1], [2]])
        tensor([0.2500, 0.9000], dtype=torch.float64)
        >>> (~polite).probability([[0, 1, 1], [2]])
        tensor([0.7500, 0.1000], dtype=torch.float64)
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
        """Fit an attribute to scored texts, in about a second.

        The metrics on held-out texts are in `config.fit` of the result.

        Args:
            token_ids: The token ids of each text.
            scores: The probability that each text has the attribute.
            vocab_size: The number of tokens in the vocabulary.
            config: How to fit.
            groups: A number for each text. Texts with the same number, such as windows of one
                document, are held out together.
            validation: Texts and scores to hold out. By default, a share of the texts.
            name: The name of the attribute.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.
            source: A description of the texts and scores, stored with the attribute.

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
        if validation is None:
            examples, held_out = examples.split(config.held_out, config.seed)
        else:
            held_out = Examples.from_scores(*validation, vocab_size)
        terms, record = fit_terms(examples, held_out, config)
        record["source"] = dict(source or {})
        return cls(terms, AttributeConfig(name, vocab_size, tokenizer_fingerprint, record))

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
        """Fit one attribute per label; the texts of all other labels are its negatives.

        By default, `by_absence` is set: single tokens often distinguish a label from all others.
        The same share of the texts of each label is held out.

        Args:
            token_ids: The token ids of each text.
            labels: The label of each text.
            vocab_size: The number of tokens in the vocabulary.
            config: How to fit.
            groups: A number for each text. Texts with the same number are held out together.
            validation: Texts and labels to hold out. By default, a share of the texts.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.
            source: A description of the texts and labels, stored with each attribute.

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
        config = config or FitConfig(by_absence=True)
        numbers = {name: number for number, name in enumerate(names)}
        examples = Examples.from_labels(token_ids, labels, numbers, vocab_size, groups)
        if validation is None:
            examples, held_out = examples.split(config.held_out, config.seed)
        else:
            held_out = Examples.from_labels(*validation, numbers, vocab_size)
        for name, number in numbers.items():
            terms, record = fit_terms(
                examples.scored_by_label(number), held_out.scored_by_label(number), config
            )
            record["source"] = dict(source or {})
            yield cls(terms, AttributeConfig(name, vocab_size, tokenizer_fingerprint, record))

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
        values = _weight_tensor(weights)
        tokens = (values < 1).nonzero()[:, 0]
        one = torch.ones(1, dtype=torch.float64)
        config = AttributeConfig(name, len(values), tokenizer_fingerprint)
        return cls(Terms(one, tokens.to(torch.int32), values[tokens].log()[None]), config)

    @classmethod
    def occurrence(
        cls,
        texts: str | Sequence[str],
        spelled: Sequence[bytes],
        *,
        name: str | None = None,
        tokenizer_fingerprint: str | None = None,
    ) -> Self:
        """Make the attribute that a text contains one of these substrings.

        Its probability is 1 or 0. Substrings are found anywhere, also within words, and however a
        text is split into tokens. The prompt does not count. `foretrace.mentions` does the same
        for a tokenizer.

        Args:
            texts: The substring, or several of them.
            spelled: The bytes of each token; empty for control tokens.
            name: The name of the attribute. By default, the quoted substrings.
            tokenizer_fingerprint: The fingerprint of the tokenizer's vocabulary.

        Returns:
            The attribute.

        Raises:
            InvalidInputError: If there is no substring, or if they are empty or too long.

        Example:
            >>> refund = ft.Attribute.occurrence("refund", [b"re", b"fund", b" "])
            >>> refund.probability([[0, 1], [0, 2, 1]])
            tensor([1., 0.], dtype=torch.float64)
        """
        substrings = [texts] if isinstance(texts, str) else list(texts)
        dfa, accepting = substring_dfa(substrings, spelled)
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
        return Attribute(self.terms, replace(self.config, name=name))

    def __and__(self, other: "Attribute") -> "Attribute":
        """Return the conjunction: the product of both probabilities."""
        if not isinstance(other, Attribute):
            return NotImplemented
        config = self.config.combined("&", other.config)
        return Attribute(self.terms.times(other.terms), config)

    def __or__(self, other: "Attribute") -> "Attribute":
        """Return the disjunction: a + b - a * b."""
        if not isinstance(other, Attribute):
            return NotImplemented
        config = self.config.combined("|", other.config)
        return Attribute(self.terms.either(other.terms), config)

    def __invert__(self) -> "Attribute":
        """Return the complement: 1 - a. `~~a` is `a`."""
        if self._complement is None:
            config = replace(self.config, name=f"~{self.name}", fit={})
            complement = Attribute(self.terms.negated(), config)
            for one, other in ((self, complement), (complement, self)):
                object.__setattr__(one, "_complement", other)  # a cache: no value changes
            return complement
        return self._complement

    def probability(self, tokens: Text | Texts, mask: Mask | None = None) -> Tensor:
        """Compute p(s | x) of one text or of several.

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
        probabilities = self.terms.probability(sums).reshape(shape)
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
        alone = self.terms.probability(self.terms.log_weights.T)
        empty = self.terms.probability(torch.zeros(1, len(self.terms)))
        order = (alone - empty).abs().argsort(descending=True, stable=True)[:count]
        return [TokenEffect(int(self.terms.tokens[i]), float(alone[i])) for i in order]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the attribute as one safetensors file, with its config in the header.

        Args:
            path: The file. An existing file is replaced.

        Raises:
            InvalidInputError: If the record of the fit holds values that JSON has not.

        Example:
            >>> attribute.save(folder / "nontoxic.safetensors")
        """
        storage.write(Path(path), self.terms, self.config)

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
        terms, config = storage.read(Path(path))
        require_same_fingerprint(
            f"The attribute '{config.name}'", config.tokenizer_fingerprint, tokenizer_fingerprint
        )
        return cls(terms, config)


def _weight_tensor(weights: Any) -> Tensor:
    """Return weights as a tensor on the CPU, in float32 or float64; check shape and range."""
    problem = "they are not numbers"
    try:
        # Python's floats have the precision of float64; a tensor or an array keeps its type.
        values = weights if isinstance(weights, Tensor) else torch.tensor(np.asarray(weights))
        values = values.detach().cpu()
        if not values.is_complex():
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            if values.dim() != 1:
                problem = f"they have the shape {tuple(values.shape)}"
            elif bool(((values >= 0) & (values <= 1)).all()):
                return values
            else:
                problem = "some are outside [0, 1]"
    except (TypeError, ValueError, RuntimeError):
        pass
    raise InvalidInputError(
        f"Weights must be a tensor, array or list of shape (V,), with a number in [0, 1] for each "
        f"token, but {problem}."
    )
