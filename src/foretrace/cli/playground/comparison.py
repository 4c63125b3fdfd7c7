"""Two texts as HTML, side by side: each token coloured by its EAP, its candidates at hand."""

from html import escape
from math import prod
from typing import TYPE_CHECKING

from foretrace.cli.explain_page import colour

if TYPE_CHECKING:
    from foretrace.cli.playground.backend import Told
    from foretrace.cli.token_table import Account

SCALE = (
    '<p class="soft">Colour: expected attribute probability (EAP) after the token, 0 '
    '<span class="scale"></span> 1</p>'
)
HINT = '<p class="hint">Point at a token, or tap it, to see what else might have come.</p>'


def side_by_side(*sections: str) -> str:
    """Set sections side by side, and below each other where there is no room."""
    scale = SCALE if any(HINT in each for each in sections) else ""
    return f'<div class="pair">{"".join(sections)}</div>{scale}'


def section(title: str, prompt: str, told: "Told") -> str:
    """Show what is told of a text: its tokens, if they are accounted for."""
    account = told.account
    text = escape(told.text)
    if account is not None:
        text = "".join(_token(account, place) for place in range(len(account.pieces)))
    known = "" if told.probability is None else f": attribute probability {told.probability:.3f}"
    return (
        f'<section class="{title}{" told" if account else ""}"><h3>{title}{known}</h3>'
        f'<div class="text"><span class="prompt">{escape(prompt)}</span>{text}</div>'
        f"{HINT if account else ''}</section>"
    )


def _token(account: "Account", place: int) -> str:
    choice = account.choices[place]
    red, green, blue = colour(prod(choice.written.eap))
    rows = "".join(
        f"<tr class={'written' if each is choice.written else 'other'}>"
        f"<td>{escape(repr(account.shown(each.token)))}</td>"
        f"<td>{each.lm:.3f}</td><td>{prod(each.eap):.3f}</td><td>{each.steered:.3f}</td></tr>"
        for each in choice.candidates
    )
    return (
        f'<span class="token" tabindex="0" style="background:rgb({red},{green},{blue})">'
        f"{escape(account.pieces[place])}"
        f'<span class="candidates" role="tooltip"><table><tr><th>token</th><th>LM</th><th>EAP</th>'
        f"<th>steered</th></tr>{rows}</table></span></span>"
    )
