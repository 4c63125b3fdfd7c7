"""The page docs/results/peers.md: tables and figures from the results of the suites."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foretrace import _io
from foretrace.evaluate.plots import draw_trade_off
from foretrace.evaluate.report import format_figure, table_head, table_row
from peers.facts import FACTS, LEFT_OUT
from peers.sizes import ATTRIBUTES, Serving, Sizes

CURVE = "foretrace"
Results = Mapping[str, Any]


class Made(NamedTuple):
    """What it took to make one attribute by one method."""

    method: str
    attribute: str
    seconds: float
    texts: int


def write_page(
    folder: Path,
    command: str,
    suites: Mapping[str, Results],
    made: Sequence[Made],
    sizes: Sizes,
    serving: Sequence[Serving],
) -> Path:
    """Write `peers.md` and its figures into a folder; return the path of the page."""
    lines = ["# Compared with other methods", "", *_introduction(command, suites), ""]
    for name, results in suites.items():
        lines += [*_suite_section(name, results, folder), ""]
    lines += [*_made_section(made), "", *_needs_section(), "", *_serving_section(sizes, serving)]
    lines += ["", *_left_out_section()]
    path = folder / "peers.md"
    with _io.atomic_write(path) as scratch:
        scratch.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def _introduction(command: str, suites: Mapping[str, Results]) -> list[str]:
    results = next(iter(suites.values()))
    sampling = results["sampling"]
    return [
        "What people would use instead of foretrace, measured in the same harness: the same "
        "prompts, seeds and "
        "judges. All methods but prompting, best of n and foretrace are "
        "[plug-ins](../guides/compare.md#plug-ins) in "
        "`benchmarks/peers`. One command makes this page, and continues where it stopped:",
        "",
        f"```bash\n{command}\n```",
        "",
        f"{results['lm']}, an HMM of {results['hmm']['states']:,} states; {results['prompts']:,} "
        "prompts, "
        f"{sampling['continuations']} continuations of {sampling['max_new_tokens']} tokens each, "
        "top-p "
        f"{sampling['top_p']:g}, seed {sampling['seed']}. Brackets hold 95% confidence intervals, "
        "by resampling prompts. "
        "Perplexity is that of the unsteered LM. The price is the KL divergence from the bare "
        "next-token distribution in "
        "nats per token, where the logits of a method give it. The filter of DExperts excludes "
        "tokens outside the "
        "LM's nucleus of 0.9, which alone costs up to 0.105 nats. Entropy is that of a "
        "continuation in nats, estimated from the "
        "probabilities with which it was sampled. A method with a lower entropy has a lower "
        "perplexity for that reason alone. Time is relative to bare, in "
        "turns, in one run.",
        "",
        "[Comparing methods](../guides/compare.md#methods-that-were-measured) says what the "
        "figures show.",
    ]


def _suite_section(name: str, results: Results, folder: Path) -> list[str]:
    """Build the tables of a suite, and draw its figures."""
    lines = [f"## {name}", "", *_method_table(results), ""]
    metric = _first_metric(results)
    for against, suffix in (("perplexity", "perplexity"), ("price", "price")):
        image = folder / f"peers-{name}-{suffix}.png"
        draw_trade_off(results, image, against)
        lines += [f"![{metric} against {against}]({image.name})", ""]
    return [*lines, *_equal_perplexity_table(results), "", *_verdicts(results)]


def _method_table(results: Results) -> list[str]:
    metric = _first_metric(results)
    columns = [metric, "perplexity", "price", "entropy", "dist-3", "ended early"]
    lines = table_head("method", *columns, "time")
    for name, method in results["methods"].items():
        cells = [format_figure(method["figures"].get(column)) for column in columns]
        lines.append(table_row(name, *cells, f"{method['cost']:.2f}"))
    return lines


def _equal_perplexity_table(results: Results) -> list[str]:
    """Build the table of foretrace against every other method at the perplexity of that method."""
    lines = [
        f"{_first_metric(results)} of foretrace minus that of each method: at the best point of "
        "foretrace's curve (linear "
        "between its points) whose perplexity is not above the method's.",
        "",
        *table_head("method", "foretrace minus method"),
    ]
    for rival, interval in _differences(results).items():
        difference = "all of foretrace's points, and bare, have a higher perplexity"
        if interval is not None:
            value, low, high = interval
            difference = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
        lines.append(table_row(rival, difference))
    return lines


def _differences(results: Results) -> dict[str, Sequence[float] | None]:
    """Return foretrace's difference from each rival and its interval; None if there is none."""
    return {
        comparison["rival"]: comparison["difference"]
        for comparison in results["at equal perplexity"]
        if comparison["curve"] == CURVE
    }


def _verdicts(results: Results) -> list[str]:
    """Say in words which methods foretrace is ahead of, and behind, at equal perplexity."""
    metric = _first_metric(results)
    values = {
        name: method["figures"][metric]["value"] for name, method in results["methods"].items()
    }
    curve = [
        values[name]
        for name, method in results["methods"].items()
        if method["plan"]["curve"] == CURVE
    ]
    sign = 1 if sum(curve) >= len(curve) * values[results["baseline"]] else -1
    groups: dict[str, list[str]] = {"ahead of": [], "behind": [], "within the interval of": []}
    without: list[str] = []
    for rival, interval in _differences(results).items():
        if interval is None:
            without.append(rival)
            continue
        low, high = sorted(sign * bound for bound in interval[1:])
        verdict = "ahead of" if low > 0 else "behind" if high < 0 else "within the interval of"
        groups[verdict].append(rival)
    lines = [
        f"- foretrace is **{verdict}**: {'; '.join(rivals)}."
        for verdict, rivals in groups.items()
        if rivals
    ]
    if without:
        lines.append(
            f"- Their perplexity is below all of foretrace's points: {'; '.join(without)}."
        )
    return lines


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


def _first_metric(results: Results) -> str:
    return str(next(iter(results["methods"][results["baseline"]]["figures"])))


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
