"""The page docs/results/peers.md: tables and figures from the results of the suites."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from foretrace import _io
from foretrace.evaluate import metrics
from foretrace.evaluate.report import format_figure, table_head, table_row
from peers.comparisons import (
    AHEAD,
    BEHIND,
    BELOW,
    COSTS,
    EXCESS,
    UNKNOWN,
    WITHIN,
    Comparison,
    Measured,
    verdicts,
)
from peers.facts import FACTS, LEFT_OUT
from peers.figure import draw_costs
from peers.judges import ABOUT
from peers.kept import KeptTexts
from peers.parts import COMMAND, checksum
from peers.scores import OWN, Scored
from peers.sizes import ATTRIBUTES, Serving, Sizes, serving_needs

GENERATIONS = "generations"


class Made(NamedTuple):
    """What it took to make one attribute by one method."""

    method: str
    attribute: str
    seconds: float
    texts: int


class SuitePart(NamedTuple):
    """What the page says about a suite."""

    kept: KeptTexts
    file: Path
    """The file of the kept texts, in the folder `GENERATIONS` of the page."""
    scored: Scored
    not_run: tuple[str, ...]
    """The methods of the suite that have no texts."""

    @property
    def made(self) -> list[Made]:
        """What it took to make the suite's attribute."""
        return [Made(**one) for one in self.kept.header["made"]]


def write_page(folder: Path, command: str, suites: Mapping[str, SuitePart]) -> Path:
    """Write `peers.md` and its figures into a folder; return the path of the page."""
    parts = list(suites.values())
    made = [one for part in parts for one in part.made]
    header = parts[0].kept.header
    sizes = Sizes(**header["sizes"])
    serving = serving_needs(sizes, header["instruction tokens"])
    lines = ["# Compared with other methods", "", *_introduction(command, suites), ""]
    for name, part in suites.items():
        lines += [*_suite_section(name, part, folder), ""]
    lines += [*_made_section(made), "", *_needs_section(), "", *_serving_section(sizes, serving)]
    lines += ["", *_texts_section(parts), "", *_left_out_section()]
    path = folder / "peers.md"
    with _io.atomic_write(path) as scratch:
        scratch.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def _introduction(command: str, suites: Mapping[str, SuitePart]) -> list[str]:
    header = next(iter(suites.values())).kept.header
    sampling = header["sampling"]
    headers = {name: part.kept.header for name, part in suites.items()}
    options = f"--continuations {sampling['continuations']} --texts {header['texts of a side']}"
    sizes = "; ".join(
        f"{name}: {one['prompts']['count']:,} x {one['sampling']['continuations']}"
        for name, one in headers.items()
    )
    return [
        "What people would use instead of foretrace, measured in the same harness: the same "
        "prompts, seeds and judges. All methods but prompting, best of n and foretrace are "
        "[plug-ins](../guides/compare.md#plug-ins) in `benchmarks/peers`. One command makes this "
        "page, and continues where it stopped:",
        "",
        f"```bash\n{command} {options}\n```",
        "",
        f"{header['lm']}, an HMM of {header['hmm']['states']:,} states, prompts x continuations "
        f"of {sampling['max_new_tokens']} tokens: {sizes}. Top-p {sampling['top_p']:g}, seed "
        f"{sampling['seed']}. The first {header['skip']:,} prompts are left out, because settings "
        "of foretrace were chosen on them. Experts, LM-Steer, token bias and SASA have at most "
        f"{header['texts of a side']:,} texts of a side, at random; control vectors have 1,000. "
        "foretrace has all texts of the table, and 3,000 samples of the LM, which its fit draws. "
        "Brackets hold 95% confidence intervals, by resampling prompts; a "
        "difference is paired by prompt.",
        "",
        "- **Perplexity** is that of the unsteered LM.",
        "- **Price** is the KL divergence from the bare next-token distribution before top-p, in "
        "nats per token. It is known where a method changes nothing but the LM's logits.",
        "- **Entropy** is that of a continuation in nats, from the probabilities with which it "
        "was sampled.",
        "- **Excess** is the excess cross-entropy: the LM's loss on a text minus the entropy, in "
        "nats per token.",
        "- **Time** is relative to bare, in turns, in one run.",
        "",
        "[Comparing methods](../guides/compare.md#methods-that-were-measured) says what the "
        "figures show.",
        "",
        "## Several judges, three equal costs",
        "",
        "Each suite has two or three judges. They differ in their encoder, in their texts, or in "
        "whether they see words or embeddings alone. No judge saw what an attribute was fitted to.",
        "",
        "Every method is compared with the best point of foretrace's curve whose cost is not above "
        "the method's. The curve begins at bare and is linear between its points. Nothing is "
        "extrapolated: *below* says that the method costs less than the curve's points do, or that "
        "the resamples do not tell. A dagger (\u2020) says that the method costs more than all "
        "points. It is then compared with the best point, and foretrace could go further. A second "
        "table has the reverse: `strong` against the best point of each method's curve whose cost "
        "is not above that of `strong`. With so many comparisons, one in twenty excludes 0 by "
        "chance.",
        "",
        "A lower temperature lowers the perplexity of any method, and so does a filter. Equal "
        "perplexity therefore favours methods that lose entropy. We do not interpolate foretrace's "
        "curve at the entropy of a method, because foretrace's entropy hardly depends on its "
        "strength. We subtract the entropy instead, which is the same as to scale the perplexity "
        "by the change of entropy. The difference, the excess, estimates the KL divergence from "
        "the bare LM of the texts as they were sampled, with top-p and all filters. Only the LM's "
        "own distribution has none, and a lower temperature raises it. Every method has one, also "
        "where the price is not known. Best of n has an upper bound: that of its candidates plus "
        "log n - (n - 1) / n nats per text. Texts that ended early are left out of the excess.",
    ]


def _suite_section(name: str, part: SuitePart, folder: Path) -> list[str]:
    """Build the tables of a suite, and draw its figure."""
    measured = part.scored.measured
    image = folder / f"peers-{name}.png"
    labels = {judge: _figure_name(part, judge) for judge in measured.judges}
    draw_costs(measured, labels, image)
    return [
        f"## {name}",
        "",
        *_method_table(part),
        "",
        *([f"Not run: {'; '.join(part.not_run)}.", ""] if part.not_run else []),
        f"![{', '.join(labels.values())} against perplexity, excess and price]({image.name})",
        "",
        *judges_and_summary(part.scored),
    ]


def judges_and_summary(scored: Scored) -> list[str]:
    """Build the tables that depend on the judges."""
    measured = scored.measured
    parts = [_judge_table(scored), _summary_table(measured), _curve_table(measured)]
    parts += [] if scored.own is None else [_own_table(scored.own)]
    return [line for part in (*parts, _words(measured)) for line in (*part, "")][:-1]


def _figure_name(part: SuitePart, judge: str) -> str:
    """Return the name of the first metric of a judge in the results."""
    header = part.kept.header
    figures = header["results"][header["baseline"]]["figures"]
    return next(str(name) for name in figures if name.rpartition(", ")[0] == judge)


def _method_table(part: SuitePart) -> list[str]:
    measured = part.scored.measured
    judges = [_figure_name(part, judge) for judge in measured.judges]
    columns = ["perplexity", "price", "entropy", "dist-3", "ended early"]
    lines = table_head("method", *judges, *columns, "excess", "time")
    for name, method in part.kept.header["results"].items():
        cells = [format_figure(method["figures"].get(column)) for column in (*judges, *columns)]
        excess = metrics.interval(measured.costs[EXCESS][name])._asdict()
        lines.append(table_row(name, *cells, format_figure(excess), f"{method['cost']:.2f}"))
    return lines


def _judge_table(scored: Scored) -> list[str]:
    lines = table_head("judge", "what it is", "reference", "texts", "AUC", "rank correlation")
    for name, facts in scored.judges.items():
        lines.append(
            table_row(
                name,
                ABOUT.get(name, str(facts["judge"])),
                str(facts["calibrated on"]),
                f"{facts['texts']:,}",
                f"{facts['auc at 0.5']:.3f}",
                f"{facts['spearman']:.2f}",
            )
        )
    texts, methods, count = scored.agreement
    return [
        *lines,
        "",
        f"The rank correlation of the first two judges is {texts:.2f} over the {count:,} texts of "
        f"all methods, and {methods:.2f} over the methods.",
    ]


def _summary_table(measured: Measured) -> list[str]:
    """Build the table of foretrace against every method: every judge at every equal cost."""
    lines = [
        "foretrace is ahead, behind, or within the interval, at equal perplexity, excess and "
        "price. The number is the metric of foretrace minus that of the method.",
        "",
        *table_head("method", *_comparison_columns(measured)),
    ]
    lines += [
        table_row(rival, *map(_format_comparison, verdicts(measured, rival)))
        for rival in measured.rivals
    ]
    return lines


def _curve_table(measured: Measured) -> list[str]:
    """Build the table of `strong` against every curve."""
    curves = dict.fromkeys(measured.curves[rival] for rival in measured.rivals)
    lines = [
        "`strong` against the best point of each curve that costs no more. The number is the "
        "metric of `strong` minus that of the curve.",
        "",
        *table_head("curve", *_comparison_columns(measured)),
    ]
    for curve in filter(None, curves):
        found = [
            measured.compare_curve(judge, cost, curve)
            for judge in measured.judges
            for cost in COSTS
        ]
        lines.append(table_row(curve, *map(_format_comparison, found)))
    return lines


def _own_table(own: Measured) -> list[str]:
    """Build the table of what foretrace's attribute says of the texts of all methods."""
    lines = [
        "The probability of foretrace's own attribute, by which it steers and by which best of n "
        "chooses. Where foretrace is ahead by it, but not by the judges, its limit is what the "
        "attribute sees in a text, and not the decoding.",
        "",
        *table_head(
            "method", "attribute's probability", "foretrace minus the method, at equal excess"
        ),
    ]
    for name in (*own.points, *own.rivals):
        mean = format_figure(metrics.interval(own.judges[OWN][name])._asdict())
        compared = "" if name in own.points else _format_comparison(own.compare(OWN, EXCESS, name))
        lines.append(table_row(name, mean, compared))
    return lines


def _comparison_columns(measured: Measured) -> list[str]:
    return [f"{judge}: {_short(cost)}" for judge in measured.judges for cost in COSTS]


def _short(cost: str) -> str:
    return "excess" if cost == EXCESS else cost


def _format_comparison(comparison: Comparison) -> str:
    """Format a verdict with its difference."""
    if comparison.difference is None:
        return "not known" if comparison.verdict == UNKNOWN else comparison.verdict
    value, low, high = comparison.difference
    verdict = {AHEAD: "**ahead**", BEHIND: "**behind**"}.get(comparison.verdict, "within")
    dagger = "\u2020" if comparison.beyond else ""
    return f"{verdict}{dagger} {value:+.3f} [{low:+.3f}, {high:+.3f}]"


def _words(measured: Measured) -> list[str]:
    """List the methods on which all judges give one verdict at every cost that is known."""
    names = {
        AHEAD: "foretrace is ahead by all judges at every cost that is known",
        BEHIND: "foretrace is behind by all judges at every cost that is known",
        WITHIN: "Within the interval of foretrace by all judges at every cost that is known",
        BELOW: "There is no comparison",
        "": "It depends on the judge or the cost",
    }
    groups: dict[str, list[str]] = {kind: [] for kind in names}
    for rival in measured.rivals:
        found = {one.verdict for one in verdicts(measured, rival)} - {UNKNOWN}
        kind = found.pop() if len(found) == 1 else ""
        groups[kind].append(rival)
    return [f"- {names[kind]}: {'; '.join(rivals)}." for kind, rivals in groups.items() if rivals]


def _texts_section(parts: Sequence[SuitePart]) -> list[str]:
    """Say where the texts are."""
    lines = table_head("file", "texts", "size", "SHA-256")
    for part in parts:
        name = part.file.name
        size = _bytes(part.file.stat().st_size)
        link = f"[{name}]({GENERATIONS}/{name})"
        lines.append(table_row(link, f"{part.kept.num_texts:,}", size, f"`{checksum(part.file)}`"))
    return [
        "## Texts",
        "",
        *lines,
        "",
        "The texts of every method, with their probabilities, the LM's losses and the scores, as "
        "compressed JSON lines. Prompts are named by index, and by a checksum of their file. Texts "
        "that continue toxic prompts quote toxic language. This judges a file again, and prints "
        "its tables:",
        "",
        f"```bash\n{COMMAND} --score docs/results/{GENERATIONS}/{parts[0].file.name}\n```",
    ]


def _made_section(made: Sequence[Made]) -> list[str]:
    lines = ["## A new attribute", "", *table_head("method", "attribute", "texts", "seconds")]
    lines += [
        table_row(one.method, one.attribute, f"{one.texts:,}", f"{one.seconds:,.1f}")
        for one in made
    ]
    return [
        *lines,
        "",
        "Prompting, self-debiasing and best of n need no training; best of n needs a classifier, "
        "here foretrace's attribute. "
        "Coefficients are not tuned in these times, except the levels of foretrace.",
    ]


def _needs_section() -> list[str]:
    lines = ["## Needs", "", *table_head("method", "needs", "at every token", "two attributes")]
    return [*lines, *(table_row(name, *facts) for name, facts in FACTS.items())]


def _serving_section(sizes: Sizes, serving: Sequence[Serving]) -> list[str]:
    lines = [
        f"## {ATTRIBUTES} attributes at once",
        "",
        f"Computed from measured sizes, for a server whose requests have {ATTRIBUTES} different "
        "attributes (n). The LM takes "
        f"{_bytes(sizes.lm)}, and each token of a sequence {_bytes(sizes.cached_token)} of keys "
        "and values. One attribute takes "
        f"{_bytes(sizes.attribute)} with its table in foretrace, {_bytes(sizes.vector)} as a "
        "control vector, and "
        f"{_bytes(sizes.expert)} as an adapter. An adapter that is merged into a model takes as "
        "much as the LM.",
        "",
        *table_head(
            "method", "memory without the LM", "models if merged", "passes per token", "note"
        ),
    ]
    lines += [
        table_row(one.method, _bytes(one.memory), str(one.models), str(one.passes), one.note)
        for one in serving
    ]
    return lines


def _left_out_section() -> list[str]:
    return ["## Left out", "", *(f"- **{name}**: {why}." for name, why in LEFT_OUT.items())]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
