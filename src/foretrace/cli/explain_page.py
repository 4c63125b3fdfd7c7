"""Render an explanation as a self-contained HTML page."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from foretrace._io import atomic_write

if TYPE_CHECKING:
    from foretrace.cli.token_table import TokenTable
    from foretrace.engines.transformers.explain import Choice

LOW_COLOR, HIGH_COLOR, WHITE = (222, 107, 31), (38, 132, 179), (255, 255, 255)
LINE_COLORS = ("#1b6d99", "#b4540f", "#4d7c2e", "#7a4fa3", "#8a6d00")
CHART_WIDTH, CHART_HEIGHT = 720, 150  # in SVG units, as in the template's viewBox
AXIS, RELATIVE_AXIS = ("1", "0.5", "0"), ("high", "mean", "low")
RELATIVE = ". The EAP of evidence is divided by this mean: above 1, the token speaks for the goal"


@dataclass(frozen=True)
class PageHeader:
    """The prompt, the goals and their settings."""

    prompt: str
    goals: Sequence[str]
    settings: str


def write_page(path: Path, table: "TokenTable", header: PageHeader) -> None:
    """Write the text colored by EAP, a chart of the EAP, and the candidates per position."""
    goals, pieces, choices = header.goals, table.pieces, table.choices
    positions = [_candidate_rows(choice, table.token_text) for choice in choices]
    axis = RELATIVE_AXIS if table.relative else AXIS
    headings = [
        f"{goal} / mean" if index in table.relative else goal for index, goal in enumerate(goals)
    ]
    template = files("foretrace.cli").joinpath("explain_page.html").read_text("utf-8")
    page = Template(template).substitute(
        goals=escape(", ".join(goals)),
        settings=escape(f"{header.settings}; price {table.mean_price:.4f} nats per token"),
        prompt=escape(header.prompt),
        text="".join(_token_html(table, position) for position in range(len(pieces))),
        chart=_chart(table, goals),
        legend=_legend(goals),
        axis="".join(f"<span>{label}</span>" for label in axis),
        relative=RELATIVE if table.relative else "",
        headings="".join(f"<th>EAP {escape(goal)}</th>" for goal in headings),
        positions=json.dumps(positions, ensure_ascii=False).replace("<", "\\u003c"),
        prices=json.dumps([round(choice.price, 6) for choice in choices]),
    )
    with atomic_write(path) as scratch:
        scratch.write_text(page, "utf-8")


def _candidate_rows(choice: "Choice", token_text: Callable[[int], str]) -> list[Any]:
    """Return the candidates in the format that the page's script expects."""
    return [
        [
            token_text(candidate.token),
            *(round(value, 6) for value in (candidate.lm, *candidate.eap, candidate.steered)),
            candidate is choice.written,
        ]
        for candidate in choice.candidates
    ]


def _token_html(table: "TokenTable", position: int) -> str:
    red, green, blue = eap_color(table.shade(position))
    return (
        f'<span class="token" tabindex="0" data-position="{position}" '
        f'style="background:rgb({red},{green},{blue})">{escape(table.pieces[position])}</span>'
    )


def eap_color(probability: float) -> tuple[int, ...]:
    """Return an RGB color from orange (0) over white (0.5) to blue (1), behind black text."""
    end = HIGH_COLOR if probability > 0.5 else LOW_COLOR
    share = 0.7 * abs(2 * probability - 1)
    return tuple(
        round((1 - share) * light + share * dark) for light, dark in zip(WHITE, end, strict=True)
    )


def _chart(table: "TokenTable", goals: Sequence[str]) -> str:
    """Draw each goal's EAP after every token (solid) and before it (dashed)."""
    choices = table.choices
    step = CHART_WIDTH / max(1, len(choices) - 1)

    def line(values: Sequence[float], style: str) -> str:
        visible = [*values, *values] if len(values) == 1 else values  # a single point is invisible
        points = " ".join(
            f"{position * step:.1f},{(1 - value) * CHART_HEIGHT:.1f}"
            for position, value in enumerate(visible)
        )
        return f'<polyline points="{points}" {style}/>'

    shapes = []
    for goal in range(len(goals)):
        stroke = f'stroke="{LINE_COLORS[goal % len(LINE_COLORS)]}"'
        before = [table.on_scale(goal, choice.expected[goal]) for choice in choices]
        after = [table.on_scale(goal, choice.written.eap[goal]) for choice in choices]
        shapes += [line(before, f'{stroke} class="before"'), line(after, stroke)]
    shapes += [
        f'<line class="position" data-position="{position}" x1="{position * step:.1f}" '
        f'x2="{position * step:.1f}" y1="0" y2="{CHART_HEIGHT}"/>'
        for position in range(len(choices))
    ]
    return "".join(shapes)


def _legend(goals: Sequence[str]) -> str:
    return "".join(
        f'<span><i style="background:{LINE_COLORS[index % len(LINE_COLORS)]}"></i>'
        f"{escape(goal)}</span>"
        for index, goal in enumerate(goals)
    )
