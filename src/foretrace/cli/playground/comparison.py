"""Render two texts as HTML side by side, with tokens colored by EAP and their candidates."""

from html import escape
from math import prod
from typing import TYPE_CHECKING

from foretrace.cli.explain_page import eap_color

if TYPE_CHECKING:
    from foretrace.chat import Prompt
    from foretrace.cli.playground.backend import PlaygroundResult
    from foretrace.cli.token_table import TokenTable

SCALE = (
    '<p class="soft">Color: expected attribute probability (EAP) after the token, low '
    '<span class="scale"></span> high</p>'
)
HINT = '<p class="hint">Point at a token, or tap it, to see the other candidates.</p>'


def side_by_side(*sections: str) -> str:
    """Put sections next to each other, or below each other on a narrow page."""
    scale = SCALE if any(HINT in section for section in sections) else ""
    return f'<div class="pair">{"".join(sections)}</div>{scale}'


def text_section(title: str, prompt: "Prompt", result: "PlaygroundResult") -> str:
    """Render a generated text after its prompt; if it is explained, token by token."""
    table = result.table
    text = escape(result.text)
    if table is not None:
        text = "".join(_token_html(table, position) for position in range(len(table.pieces)))
    facts = []
    if result.probability is not None:
        facts.append(f"attribute probability {result.probability:.3f}")
    if result.price is not None:
        facts.append(f"price {result.price:.3f} nats per token")
    heading = f"{title}: {', '.join(facts)}" if facts else title
    return (
        f'<section class="{title}{" explained" if table else ""}"><h3>{heading}</h3>'
        f'<div class="text">{_prompt_html(prompt)}{text}</div>'
        f"{HINT if table else ''}</section>"
    )


def _prompt_html(prompt: "Prompt") -> str:
    """Render a text, or the messages of a chat below each other."""
    if isinstance(prompt, str):
        return f'<span class="prompt">{escape(prompt)}</span>'
    return "".join(
        f'<div class="{escape(message["role"])}">{escape(message["content"])}</div>'
        for message in prompt
    )


def _token_html(table: "TokenTable", position: int) -> str:
    choice = table.choices[position]
    red, green, blue = eap_color(table.shade(position))
    rows = "".join(
        f"<tr class={'written' if candidate is choice.written else 'other'}>"
        f"<td>{escape(repr(table.token_text(candidate.token)))}</td>"
        f"<td>{candidate.lm:.3f}</td><td>{prod(candidate.eap):.3f}</td>"
        f"<td>{candidate.steered:.3f}</td></tr>"
        for candidate in choice.candidates
    )
    return (
        f'<span class="token" tabindex="0" style="background:rgb({red},{green},{blue})">'
        f"{escape(table.pieces[position])}"
        f'<span class="candidates" role="tooltip"><table><tr><th>token</th><th>LM</th>'
        f"<th>EAP{' / mean' if table.relative else ''}</th><th>steered</th></tr>{rows}</table>"
        "</span></span>"
    )
