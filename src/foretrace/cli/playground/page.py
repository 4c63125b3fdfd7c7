"""The playground's web page: a form, and below it the two texts, streamed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from importlib.resources import files
from math import prod
from queue import Queue
from threading import Event, Thread
from typing import Any, NamedTuple

import typer

from foretrace.chat import Messages, Prompt
from foretrace.cli.explain import TokenTable, eap_color
from foretrace.cli.goal_options import Level, parse_strength
from foretrace.cli.playground.backends import Backend, PlaygroundRequest, PlaygroundResult
from foretrace.errors import ForetraceError, InvalidInputError

TITLE = "# foretrace\nThe same language model with and without steering."
HINT = 'An attribute, or an expression: nontoxic & ~formal, contains("refund").'
SIDES = ("bare", "steered")
MAX_NEW_TOKENS = 512
MIN_WIDTH = 250  # pixels of an element in a row; elements that do not fit wrap
SCALE = (
    '<p class="soft">Color: expected attribute probability (EAP) after the token, low '
    '<span class="scale"></span> high</p>'
)
TOKEN_HINT = '<p class="hint">Point at a token, or tap it, to see the other candidates.</p>'


def launch(backend: Backend, host: str, port: int) -> None:
    """Serve the page until the process is stopped."""
    style = files("foretrace.cli.playground").joinpath("style.css").read_text("utf-8")
    page = build_page(require_gradio(), backend)
    page.launch(
        server_name=host,
        server_port=port,
        css=style,
        footer_links=[],
        quiet=True,
        prevent_thread_lock=True,
    )
    typer.echo(f"The playground is at http://{host}:{port}; Ctrl-C stops it.")
    page.block_thread()


def require_gradio() -> Any:
    """Import Gradio, or raise an error that says how to install it."""
    try:
        import gradio
    except ImportError as error:
        raise InvalidInputError(
            "The playground needs Gradio: pip install 'foretrace[playground]'."
        ) from error
    return gradio


def build_page(gradio: Any, backend: Backend) -> Any:
    """Build the Gradio page: inputs, a button, and the two texts."""
    goals, can_chat = backend.goals(), backend.can_chat()
    with gradio.Blocks(title="foretrace", analytics_enabled=False) as page:
        gradio.Markdown(TITLE)
        prompt = gradio.Textbox("The other driver said", label="Prompt", lines=2)
        chat = gradio.Checkbox(
            False, label="Chat: answer, and keep the conversation", visible=can_chat
        )
        system = gradio.Textbox(
            "",
            label="System prompt",
            info="What comes before all messages.",
            lines=1,
            visible=can_chat,
        )
        turns = gradio.State([])
        with gradio.Row():
            goal = gradio.Dropdown(
                goals,
                value=next(iter(goals), ""),
                label="Goal",
                info=HINT,
                allow_custom_value=True,
                min_width=MIN_WIDTH,
            )
            level = gradio.Radio(
                list(Level),
                value="medium",
                label="Level",
                info="How strongly to steer.",
                min_width=MIN_WIDTH,
            )
        advanced = _advanced_inputs(gradio)
        write = gradio.Button("Write", variant="primary")
        texts = gradio.HTML(
            side_by_side(*(text_section(side, "", PlaygroundResult("")) for side in SIDES))
        )
        gradio.on(
            [write.click, prompt.submit],
            partial(compare, backend),  # a generator function: Gradio streams the values
            [turns, chat, system, prompt, goal, level, *advanced],
            [texts, turns],
            api_name="write",
            show_progress="minimal",
        )
        chat.change(list, None, turns)  # a new conversation
    return page


def _advanced_inputs(gradio: Any) -> list[Any]:
    """Build the inputs for the fields of `PlaygroundRequest` after `level`, in their order."""
    with gradio.Accordion("More", open=False):
        with gradio.Row():
            strength = gradio.Textbox(
                "", label="Strength", info="Instead of a level.", min_width=MIN_WIDTH
            )
            transform = gradio.Textbox(
                "",
                label="Transform",
                info="The paper's SCALE,SHIFT, instead of a level.",
                min_width=MIN_WIDTH,
            )
            horizon = gradio.Slider(0, 64, 64, step=1, label="Horizon", min_width=MIN_WIDTH)
        with gradio.Row():
            length = gradio.Slider(
                1,
                MAX_NEW_TOKENS,
                PlaygroundRequest.max_new_tokens,
                step=1,
                label="Max new tokens",
                min_width=MIN_WIDTH,
            )
            top_p = gradio.Slider(
                0.05,
                1,
                PlaygroundRequest.top_p,
                step=0.05,
                label="Top-p",
                min_width=MIN_WIDTH,
            )
            seed = gradio.Number(0, label="Seed", precision=0, min_width=MIN_WIDTH)
        neutral_end = gradio.Checkbox(True, label="Neutral end: do not steer the end of text")
    return [strength, transform, horizon, neutral_end, length, top_p, seed]


class Turn(NamedTuple):
    """A user's message, and the answer of each side."""

    message: str
    answers: dict[str, str]


def compare(
    backend: Backend, turns: Sequence[Turn], chat: bool, system: str, *values: Any
) -> Iterator[tuple[str, list[Turn]]]:
    """Generate an unsteered and a steered text from the same seed; yield HTML of both.

    In a chat, the user's message goes to both sides, and each side reads its own earlier answers.
    The system prompt comes first.
    The second value is the conversation, with the new turn when it is complete.

    `values` are the fields of `PlaygroundRequest`, in their order.
    """
    try:
        request = parse_request(*values)
        message = str(request.prompt)
        requests = dict.fromkeys(SIDES, request)
        if chat:  # every turn has its own random numbers: the same ones tend to repeat an answer
            seed = request.seed + len(turns)
            requests = {
                side: replace(request, prompt=_messages(system, turns, side, message), seed=seed)
                for side in SIDES
            }
        sections = {
            side: text_section(side, requests[side].prompt, PlaygroundResult("")) for side in SIDES
        }
        results = {}
        for side, result in _stream(backend, requests):
            results[side] = result
            sections[side] = text_section(side, requests[side].prompt, result)
            yield side_by_side(*sections.values()), list(turns)
        if chat:
            turns = [*turns, Turn(message, {side: results[side].text for side in SIDES})]
        for side in SIDES:
            explained = backend.explain(requests[side], results[side])
            sections[side] = text_section(side, requests[side].prompt, explained)
            yield side_by_side(*sections.values()), list(turns)
    except ForetraceError as error:  # Gradio renders the message as HTML
        raise require_gradio().Error(escape(str(error)), print_exception=False) from error


def _messages(system: str, turns: Sequence[Turn], side: str, message: str) -> Messages:
    """Return the conversation of a side, up to the user's new message."""
    messages = [{"role": "system", "content": system}] if system.strip() else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.message})
        messages.append({"role": "assistant", "content": turn.answers[side]})
    return [*messages, {"role": "user", "content": message}]


def parse_request(
    prompt: str, goal: str | None, level: str, strength: str, transform: str, *numbers: Any
) -> PlaygroundRequest:
    """Build a request from the form's values; an empty number field has the value None."""
    if not (goal or "").strip():
        raise InvalidInputError("Choose a goal, or write an expression.")
    if None in numbers:
        raise InvalidInputError("A number is missing: look under More.")
    strength, transform = (strength or "").strip(), (transform or "").strip()
    if strength and transform:
        raise InvalidInputError("Give a strength or a transform, not both: look under More.")
    return PlaygroundRequest(
        prompt or "",
        str(goal),
        level,
        parse_strength(strength) if strength else None,
        transform,
        *numbers,
    )


def _stream(
    backend: Backend, requests: Mapping[str, PlaygroundRequest]
) -> Iterator[tuple[str, PlaygroundResult]]:
    """Generate each side in a thread; yield texts so far and final results, or raise an error.

    If the consumer closes this generator, the next `on_text` call of each thread stops it.
    """
    messages: Queue[tuple[str, PlaygroundResult | Exception, bool]] = Queue()
    closed = Event()

    def work(side: str) -> None:
        def on_text(text: str) -> None:
            if closed.is_set():
                raise InterruptedError("The page was closed.")
            messages.put((side, PlaygroundResult(text), False))

        try:
            result = backend.generate(requests[side], side == "steered", on_text)
            messages.put((side, result, True))
        except Exception as error:
            messages.put((side, error, True))

    for side in requests:
        Thread(target=work, args=(side,), daemon=True).start()
    running = len(requests)
    try:
        while running:
            side, message, complete = messages.get()
            if isinstance(message, Exception):
                raise message
            running -= complete
            yield side, message
    finally:
        closed.set()


def side_by_side(*sections: str) -> str:
    """Put sections next to each other, or below each other on a narrow page."""
    scale = SCALE if any(TOKEN_HINT in section for section in sections) else ""
    return f'<div class="pair">{"".join(sections)}</div>{scale}'


def text_section(title: str, prompt: Prompt, result: PlaygroundResult) -> str:
    """Render a generated text after its prompt; if it is explained, token by token."""
    table = result.table
    text = escape(result.text)
    if table is not None:
        text = "".join(_token_html(table, position) for position in range(len(table.pieces)))
    facts = []
    if result.generation is not None:
        facts += [f"attribute probability {one:.3f}" for one in result.generation.probability]
        if result.generation.price is not None:
            facts.append(f"price {result.generation.price:.3f} nats per token")
    heading = f"{title}: {', '.join(facts)}" if facts else title
    return (
        f'<section class="{title}{" explained" if table else ""}"><h3>{heading}</h3>'
        f'<div class="text">{_prompt_html(prompt)}{text}</div>'
        f"{TOKEN_HINT if table else ''}</section>"
    )


def _prompt_html(prompt: Prompt) -> str:
    """Render a text, or the messages of a chat below each other."""
    if isinstance(prompt, str):
        return f'<span class="prompt">{escape(prompt)}</span>'
    return "".join(
        f'<div class="{escape(message["role"])}">{escape(message["content"])}</div>'
        for message in prompt
    )


def _token_html(table: TokenTable, position: int) -> str:
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
