"""Fit an attribute to scored or labelled texts, and choose between a product and evidence."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from foretrace.attribute.fitting.candidate import Candidate, FitConfig
from foretrace.attribute.fitting.examples import Array, Examples
from foretrace.attribute.fitting.products import MIN_AUC_GAIN, fit_products
from foretrace.attribute.fitting.rewards import (
    NOTHING,
    LMData,
    add_samples,
    fit_evidence,
    fit_labels,
)
from foretrace.errors import InvalidInputError

MAX_COMPARED = 10  # labels whose products are fitted to compare with evidence: products are slow
PRODUCT_ONLY = "Chose a product: several terms apply to products only."
SHARED = "Chose evidence: rewards that use the LM reach more than a product at the same price."


def fit_scores(
    examples: Examples, held_out: Examples, config: FitConfig, lm: LMData = NOTHING
) -> Candidate:
    """Fit to scores, by the objective of the config. `lm` is what is known of the LM."""
    if float(np.ptp(examples.scores)) == 0:
        raise InvalidInputError(
            f"All {len(examples)} scores are equal, so nothing can be fitted. Add texts with the "
            f"attribute and texts without it."
        )
    examples, held_out = (split.without(config.keep) for split in (examples, held_out))
    if config.objective not in ("auto", "evidence"):
        return fit_products(examples, held_out, config)
    if config.objective == "auto" and config.terms > 1:
        product = fit_products(examples, held_out, replace(config, objective="cross-entropy"))
        return product.with_facts(reason=PRODUCT_ONLY)
    settings = replace(config, objective="evidence")
    evidence = fit_evidence(examples, held_out, settings, lm)
    if config.objective == "evidence" or lm.embeddings is not None:
        chosen = add_samples(evidence, examples, held_out, settings, lm)
        return chosen if config.objective == "evidence" else chosen.with_facts(reason=SHARED)
    product = fit_products(examples, held_out, replace(config, objective="cross-entropy"))
    use_evidence = False
    if product.auc is not None and evidence.auc is not None:
        # At equal AUC, evidence: products at the same price make long texts repeat themselves.
        use_evidence = product.auc <= evidence.auc + MIN_AUC_GAIN
    chosen = product
    if use_evidence:
        chosen = add_samples(evidence, examples, held_out, settings, lm)
    return chosen.with_facts(
        auc_product=product.auc,
        auc_evidence=evidence.auc,
        reason=_reason(product.auc, evidence.auc, use_evidence),
    )


def fit_each_label(
    examples: Examples,
    held_out: Examples,
    num_labels: int,
    config: FitConfig,
    lm: LMData = NOTHING,
) -> Iterator[Candidate]:
    """Fit one classifier per label. The number of a text's label is its stratum.

    Products are fitted by absence: a single token may reveal a label.
    """
    examples, held_out = (split.without(config.keep) for split in (examples, held_out))
    labels = range(num_labels)

    def fit_product(number: int, objective: str = "cross-entropy") -> Candidate:
        fitted_to, measured_on = (one.scored_by_label(number) for one in (examples, held_out))
        settings = replace(config, objective=objective)
        return fit_products(fitted_to, measured_on, settings, by_absence=True)

    if config.objective == "auto" and config.terms > 1:
        yield from (fit_product(number).with_facts(reason=PRODUCT_ONLY) for number in labels)
        return
    if config.objective not in ("auto", "evidence"):
        yield from (fit_product(number, config.objective) for number in labels)
        return
    settings = replace(config, objective="evidence")
    evidence = fit_labels(examples, held_out, num_labels, settings, lm)
    right = right_first([one.predicted for one in evidence], labels, held_out)
    if config.objective == "evidence" or lm.embeddings is not None:
        facts = {} if config.objective == "evidence" else {"reason": SHARED}
        yield from (one.with_facts(right_first=right, **facts) for one in evidence)
        return
    compared = np.unique(np.linspace(0, num_labels - 1, MAX_COMPARED).round().astype(int)).tolist()
    products = {number: fit_product(number) for number in compared}
    shares = [
        right_first([fitted[number].predicted for number in compared], compared, held_out)
        for fitted in (products, evidence)
    ]
    use_evidence = (shares[0] or 0.0) <= (shares[1] or 0.0)
    for number in labels:
        product = products.get(number)
        chosen = evidence[number] if use_evidence else product or fit_product(number)
        yield chosen.with_facts(
            auc_product=None if product is None else product.auc,
            auc_evidence=evidence[number].auc,
            **({"right_first": right} if use_evidence else {}),
            right_first_product=shares[0],
            right_first_evidence=shares[1],
            compared_labels=len(compared),
            reason=_label_reason(shares, len(compared), use_evidence),
        )


def right_first(
    predicted: Sequence[Array], labels: Sequence[int], held_out: Examples
) -> float | None:
    """Return the share of held-out texts of these labels whose own label has the highest value.

    `predicted` holds the probabilities of the held-out windows for each label. The probabilities
    of a text's windows are averaged. None if no held-out text has one of the labels.
    """
    rows = np.flatnonzero(np.isin(held_out.strata, labels))
    if not len(rows):
        return None
    _, first, text = np.unique(held_out.groups[rows], return_index=True, return_inverse=True)
    sums = np.stack([np.bincount(text, values[rows]) for values in predicted])
    own = held_out.strata[rows][first]
    return float((np.asarray(labels)[sums.argmax(0)] == own).mean())


def _reason(product: float | None, evidence: float | None, use_evidence: bool) -> str:
    if product is None or evidence is None:
        return "Chose a product: the held-out texts have no AUC to compare by."
    margin = f"; a product must be better by {MIN_AUC_GAIN}" if use_evidence else ""
    return (
        f"Chose {'evidence' if use_evidence else 'a product'}: on held-out texts, the AUC of "
        f"evidence is {evidence:.3f}, and the AUC of a product {product:.3f}{margin}."
    )


def _label_reason(shares: Sequence[float | None], compared: int, use_evidence: bool) -> str:
    product, evidence = shares
    if product is None or evidence is None:
        return "Chose evidence: no held-out text has one of the labels to compare by."
    chosen = "evidence" if use_evidence else "products"
    return (
        f"Chose {chosen}: the right one of {compared} labels is first for {evidence:.1%} of their "
        f"held-out texts by evidence, and for {product:.1%} by products."
    )
