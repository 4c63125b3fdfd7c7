"""An explanation as a page: one file, nothing fetched."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import prod
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from foretrace._io import atomic_write

if TYPE_CHECKING:
    from foretrace.cli.token_table import Account
    from foretrace.engines.transformers.explain import Choice

LOW, HIGH, WHITE = (222, 107, 31), (38, 132, 179), (255, 255, 255)
INKS = ("#1b6d99", "#b4540f", "#4d7c2e", "#7a4fa3", "#8a6d00")
WIDTH, HEIGHT = 720, 150  # of the chart, in its own units


@dataclass(frozen=True)
class Heading:
    """What the page is about."""

    prompt: str
    goals: Sequence[str]
    strengths: Sequence[float]
    shifts: Sequence[float]

    @property
    def settings(self) -> str:
        """Strengths and shifts in words."""
        return "; ".join(
            f"{name} {', '.join(f'{each:g}' for each in values)}"
            for name, values in (("strength", self.strengths), ("shift", self.shifts))
        )


def write_page(path: Path, account: "Account", heading: Heading) -> None:
    """Write the text coloured by EAP, the EAP along it, and the candidates at each place."""
    goals, pieces, choices = heading.goals, account.pieces, account.choices
    places = [_place(choice, account.shown) for choice in choices]
    template = files("foretrace.cli").joinpath("explain_page.html").read_text("utf-8")
    page = Template(template).substitute(
        goals=escape(", ".join(goals)),
        settings=escape(heading.settings),
        prompt=escape(heading.prompt),
        text="".join(map(_token, range(len(pieces)), pieces, choices)),
        chart=_chart(choices, goals),
        legend=_legend(goals),
        headings="".join(f"<th>EAP {escape(goal)}</th>" for goal in goals),
        places=json.dumps(places, ensure_ascii=False).replace("<", "\\u003c"),
    )
    with atomic_write(path) as scratch:
        scratch.write_text(page, "utf-8")


def _place(choice: "Choice", shown: Callable[[int], str]) -> list[Any]:
    """Give the candidates as the page's script wants them."""
    return [
        [
            shown(each.token),
            *(round(figure, 6) for figure in (each.lm, *each.eap, each.steered)),
            each is choice.written,
        ]
        for each in choice.candidates
    ]


def _token(place: int, piece: str, choice: "Choice") -> str:
    red, green, blue = colour(prod(choice.written.eap))
    return (
        f'<span class="token" tabindex="0" data-place="{place}" '
        f'style="background:rgb({red},{green},{blue})">{escape(piece)}</span>'
    )


def colour(probability: float) -> tuple[int, ...]:
    """Go from orange at 0 over white to blue at 1; pale enough to read black on it."""
    end = HIGH if probability > 0.5 else LOW
    share = 0.7 * abs(2 * probability - 1)
    return tuple(
        round((1 - share) * light + share * dark) for light, dark in zip(WHITE, end, strict=True)
    )


def _chart(choices: "Sequence[Choice]", goals: Sequence[str]) -> str:
    """Draw the EAP of every goal after each token, and before it, dashed."""
    step = WIDTH / max(1, len(choices) - 1)

    def line(values: Sequence[float], style: str) -> str:
        level = [*values, *values] if len(values) == 1 else values  # a point would not be seen
        points = " ".join(
            f"{place * step:.1f},{(1 - value) * HEIGHT:.1f}" for place, value in enumerate(level)
        )
        return f'<polyline points="{points}" {style}/>'

    parts = []
    for goal in range(len(goals)):
        ink = f'stroke="{INKS[goal % len(INKS)]}"'
        parts.append(line([each.expected[goal] for each in choices], f'{ink} class="before"'))
        parts.append(line([each.written.eap[goal] for each in choices], ink))
    parts += [
        f'<line class="place" data-place="{place}" x1="{place * step:.1f}" '
        f'x2="{place * step:.1f}" y1="0" y2="{HEIGHT}"/>'
        for place in range(len(choices))
    ]
    return "".join(parts)


def _legend(goals: Sequence[str]) -> str:
    return "".join(
        f'<span><i style="background:{INKS[place % len(INKS)]}"></i>{escape(goal)}</span>'
        for place, goal in enumerate(goals)
    )
