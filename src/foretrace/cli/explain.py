"""`foretrace explain`: show why each token was chosen, as a table or as an HTML page."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from importlib.resources import files
from math import prod
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli import goal_options
from foretrace.cli.loading import load_lm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.cli.goal_options import LoadedGoals
    from foretrace.engines.transformers.explain import Candidate, Choice

EPILOG = (
    "Example: foretrace explain my-lm --hmm my-hmm --goal nontoxic "
    "--prompt 'The other driver said' --html why.html"
)
LOW_COLOR, HIGH_COLOR, WHITE = (222, 107, 31), (38, 132, 179), (255, 255, 255)
LINE_COLORS = ("#1b6d99", "#b4540f", "#4d7c2e", "#7a4fa3", "#8a6d00")
CHART_WIDTH, CHART_HEIGHT = 720, 150  # in SVG units, as in the template's viewBox
AXIS = {1.0: "1", 0.75: "0.75", 0.5: "0.5", 0.25: "0.25", 0.0: "0"}  # labels by height
RELATIVE_AXIS = {0.9: "9x", 0.75: "3x", 0.5: "1x", 0.25: "1/3x", 0.1: "1/9x"}
RELATIVE = (
    ". The EAP of evidence is a multiple of this mean: above 1x, the token speaks for the goal"
)
PARTS = ("word", "lookahead", "context")  # of what steering adds to a logit
BARE = """<h2>Bare text from the same seed</h2>
<div class="text"><span class="soft">{prompt}</span>{text}</div>"""
NEXT_TOKEN_ALONE = "none: goals look at the next token alone"


def explain(
    model: goal_options.Model,
    goal: goal_options.Expressions,
    hmm: goal_options.OptionalHMM = None,
    prompt: Annotated[str, goal_options.PromptOption(help="The prompt.")] = "",
    text: Annotated[
        str | None,
        goal_options.PromptOption(help="Explain this continuation. Default: generate one."),
    ] = None,
    attributes: goal_options.Attributes = Path(),
    level: goal_options.Levels = None,
    strength: goal_options.Strengths = None,
    transform: goal_options.Transforms = None,
    after: goal_options.After = None,
    window: goal_options.Window = None,
    candidates: Annotated[
        int, goal_options.OutputOption(min=1, help="Number of candidate tokens per position.")
    ] = 5,
    html: Annotated[
        Path | None,
        goal_options.OutputOption(help="Write an HTML page to this file instead of a table."),
    ] = None,
    max_new_tokens: goal_options.MaxNewTokens = 40,
    horizon: goal_options.Horizon = 64,
    neutral_end: goal_options.NeutralEnd = True,
    temperature: goal_options.Temperature = 1.0,
    top_p: goal_options.TopP = 1.0,
    seed: goal_options.Seed = 0,
    device: goal_options.Device = "auto",
    dtype: goal_options.Dtype = "auto",
) -> None:
    """Show the LM's probability, the EAP, the steered probability and the price of each token."""
    from foretrace.cli.text_generator import TextGenerator
    from foretrace.engines.transformers import encode_prompts

    settings = goal_options.check_settings(strength, level, transform, neutral_end, len(goal))
    goal_options.check_goals(attributes, goal)
    lm, tokenizer = load_lm(model, dtype, device)
    loaded_hmm = goal_options.load_or_measure_hmm(hmm, lm, tokenizer)
    goals = goal_options.load_goals(
        loaded_hmm,
        tokenizer,
        attributes,
        goal,
        settings,
        horizon,
        build_probe=goal_options.probe_builder(lm, tokenizer),
        after=after,
        window=window,
    )
    facts = {"LM": model, "HMM": hmm or NEXT_TOKEN_ALONE, "steering": settings.description}
    bare = None
    if text is None:
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
        generator = TextGenerator(lm, tokenizer, goals, options)
        (generation,) = generator.generate([prompt], seed)
        prompt_ids, token_ids = generation.prompt_ids, generation.token_ids
        facts["sampling"] = f"seed {seed}, temperature {temperature:g}, top-p {top_p:g}"
        if html is not None:
            bare = generator.generate([prompt], seed, steered=False)[0].text
    else:
        (prompt_ids,) = encode_prompts(tokenizer, [prompt], goals.goal)
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
    table = explain_tokens(
        lm,
        tokenizer,
        prompt_ids,
        token_ids,
        goals,
        max_new_tokens=max_new_tokens if text is None else None,
        candidates=candidates,
    )
    if html is None:
        _print(table, goal)
    else:
        typer.secho(prompt, bold=True, nl=False)
        typer.echo("".join(table.pieces))
        write_page(html, table, prompt, goal, facts, bare)
        typer.echo(f"written to {html}")


def _print(table: "TokenTable", goals: Sequence[str]) -> None:
    """Print the candidates of each position, and the price of steering there.

    The chosen token is marked with `>`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # keeps tokens and goals from being parsed as markup

    grid = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "token", "LM", *(f"EAP {goal}" for goal in goals), "steered", "price"):
        grid.add_column(Text(name), justify="left" if name in ("", "token") else "right")
    for choice in table.choices:
        for candidate in choice.candidates:
            chosen = candidate is choice.written
            token_text = repr(table.token_text(candidate.token))
            cells = [">" if chosen else "", token_text, *_probabilities(candidate)]
            cells.append(f"{choice.price:.4f}" if chosen else "")
            grid.add_row(*map(Text, cells), style="bold" if chosen else "dim")
        grid.add_row()
    console = Console()
    console.print(grid)
    console.print(f"mean price: {table.mean_price:.4f} nats per token")


def _probabilities(candidate: "Candidate") -> list[str]:
    return [f"{value:.4f}" for value in (candidate.lm, *candidate.eap, candidate.steered)]


@dataclass(frozen=True)
class TokenTable:
    """A generated text, token by token."""

    pieces: Sequence[str]
    """The text that each token adds."""
    choices: "Sequence[Choice]"
    """The candidates at each position, with their probabilities."""
    token_text: Callable[[int], str]
    """Returns the text that a candidate token would add."""
    relative: frozenset[int] = frozenset()
    """The goals with evidence, whose EAP is relative to its mean over the LM's next tokens."""

    @property
    def has_context(self) -> bool:
        """Whether context rewards add to a logit."""
        return any(one.context for choice in self.choices for one in choice.candidates)

    @property
    def mean_price(self) -> float:
        """The mean price of steering over the positions, in nats per token."""
        return sum(choice.price for choice in self.choices) / len(self.choices)

    def on_scale(self, goal: int, eap: float) -> float:
        """Return an EAP as a number from 0 to 1; 0.5 is the mean of a relative one."""
        return eap / (1 + eap) if goal in self.relative else eap

    def shade(self, position: int) -> float:
        """Return how well the token at a position meets the goals, from 0 to 1."""
        eaps = self.choices[position].written.eap
        return prod(self.on_scale(goal, eap) for goal, eap in enumerate(eaps))


def explain_tokens(
    lm: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    goals: "LoadedGoals",
    *,
    max_new_tokens: int | None,
    candidates: int,
) -> TokenTable:
    """Explain each token after a prompt; `max_new_tokens` is the limit at generation."""
    from foretrace.engines.token_bytes import decode_vocabulary
    from foretrace.engines.transformers import decode_after, stop_tokens
    from foretrace.engines.transformers.explain import explain

    token_bytes = cache(partial(decode_vocabulary, tokenizer))

    @cache
    def token_text(token_id: int) -> str:
        text: str = decode_after(tokenizer, prompt_ids, [token_id])
        if "\N{REPLACEMENT CHARACTER}" in text:  # a part of a character
            return spell_bytes(token_bytes()[token_id])
        return text or str(tokenizer.decode([token_id]))  # special tokens add no text

    choices = explain(
        lm,
        prompt_ids,
        token_ids,
        goals.goals,
        goals.compiler,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_tokens(lm.generation_config, ()),
        candidates=candidates,
    )
    pieces = split_text(lambda prefix: decode_after(tokenizer, prompt_ids, prefix), token_ids)
    relative = (index for index, goal in enumerate(goals.goals) if goal.attribute.evidence)
    return TokenTable(pieces, choices, token_text, frozenset(relative))


def spell_bytes(content: bytes) -> str:
    """Return the text of bytes; those that are no complete character appear as <0xE6>."""
    escaped = content.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", escaped)


def split_text(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Split a text into one piece per token.

    A token that ends within a multi-byte character adds an empty piece. The token that completes
    the character adds it.
    """
    pieces, shown = [], ""
    for count in range(1, len(token_ids) + 1):
        text = decode(token_ids[:count])
        complete = count == len(token_ids) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(text.removeprefix(shown) if complete else "")
        shown = text if complete else shown
    return pieces


def write_page(
    path: Path,
    table: TokenTable,
    prompt: str,
    goals: Sequence[str],
    facts: Mapping[str, str],
    bare: str | None,
) -> None:
    """Write the text colored by EAP, a chart of the EAP, and the candidates per position.

    `facts` say how the text was made, and `bare` is the unsteered text from the same seed.
    """
    from foretrace._io import atomic_write

    pieces, choices = table.pieces, table.choices
    parts = [part for part in PARTS if part != "context" or table.has_context]
    positions = [_candidate_rows(choice, table.token_text, parts) for choice in choices]
    facts = {**facts, "price": f"{table.mean_price:.4f} nats per token"}
    axes = [AXIS] * (len(table.relative) < len(goals)) + [RELATIVE_AXIS] * bool(table.relative)
    headings = [
        f"{goal} / mean" if index in table.relative else goal for index, goal in enumerate(goals)
    ]
    template = files("foretrace.cli").joinpath("explain_page.html").read_text("utf-8")
    page = Template(template).substitute(
        goals=escape(", ".join(goals)),
        facts="".join(f"<dt>{name}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items()),
        bare="" if bare is None else BARE.format(prompt=escape(prompt), text=escape(bare)),
        prompt=escape(prompt),
        text="".join(_token_html(table, position) for position in range(len(pieces))),
        chart=_chart(table, goals),
        legend=_legend(goals),
        axes="".join(map(_axis, axes)),
        numbers=_numbers(len(choices)),
        relative=RELATIVE if table.relative else "",
        headings="".join(f"<th>EAP {escape(goal)}</th>" for goal in headings),
        parts="".join(f"<th>{part}</th>" for part in parts),
        positions=json.dumps(positions, ensure_ascii=False).replace("<", "\\u003c"),
        prices=json.dumps([round(choice.price, 6) for choice in choices]),
    )
    with atomic_write(path) as scratch:
        scratch.write_text(page, "utf-8")


def _axis(labels: Mapping[float, str]) -> str:
    """Return the labels of a vertical axis at their heights."""
    spans = (f'<span style="bottom:{height:.0%}">{text}</span>' for height, text in labels.items())
    return f'<div class="axis">{"".join(spans)}</div>'


def _numbers(count: int) -> str:
    """Return the numbers of some tokens at their positions along the chart."""
    step = next((step for step in (1, 2, 5, 10, 20, 50) if count <= 10 * step), 100)
    shown = {1, *range(step, count + 1, step)}
    return "".join(
        f'<span style="left:{(number - 1) / max(1, count - 1):.2%}">{number}</span>'
        for number in sorted(shown)
    )


def _candidate_rows(
    choice: "Choice", token_text: Callable[[int], str], parts: Sequence[str]
) -> list[Any]:
    """Return the candidates in the format that the page's script expects."""
    return [
        [
            token_text(candidate.token),
            *(round(value, 6) for value in (candidate.lm, *candidate.eap, candidate.steered)),
            *(f"{getattr(candidate, part):+.2f}" for part in parts),
            candidate is choice.written,
        ]
        for candidate in choice.candidates
    ]


def _token_html(table: TokenTable, position: int) -> str:
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


def _chart(table: TokenTable, goals: Sequence[str]) -> str:
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
