"""The playground's page: what is asked for above, the two texts below, as they are written."""

from collections.abc import Iterator
from functools import partial
from html import escape
from importlib.resources import files
from queue import Queue
from threading import Event, Lock, Thread
from typing import Any

import typer

from foretrace.cli.playground.backend import Author, Told, Wish
from foretrace.cli.playground.comparison import section, side_by_side
from foretrace.errors import ForetraceError, InvalidInputError

TITLE = "# foretrace\nWhat a language model writes, and what it writes toward a goal."
HINT = 'An attribute, or an expression: nontoxic & ~formal, mentions("refund").'
SIDES = ("bare", "steered")
LEAST = 250  # pixels of what stands in a row; where there is no room it goes below
ONE_AT_A_TIME = Lock()  # texts are drawn from one source of chance


def launch(author: Author, host: str, port: int) -> None:
    """Show the page until the process is stopped."""
    style = files("foretrace.cli.playground").joinpath("style.css").read_text("utf-8")
    page = build_page(require_gradio(), author)
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
    """Import Gradio, or say how it comes here."""
    try:
        import gradio
    except ImportError as error:
        raise InvalidInputError(
            "The playground needs Gradio: pip install 'foretrace[playground]'."
        ) from error
    return gradio


def build_page(gradio: Any, author: Author) -> Any:
    """Lay out the page."""
    goals = author.goals()
    with gradio.Blocks(title="foretrace", analytics_enabled=False) as page:
        gradio.Markdown(TITLE)
        prompt = gradio.Textbox("The other driver said", label="Prompt", lines=2)
        with gradio.Row():
            goal = gradio.Dropdown(
                goals,
                value=next(iter(goals), ""),
                label="Goal",
                info=HINT,
                allow_custom_value=True,
                min_width=LEAST,
            )
            strength = gradio.Slider(
                *(0.5, 30, 1),
                step=0.5,
                label="Strength",
                info="1 is the posterior itself; more may need a shift.",
                min_width=LEAST,
            )
        more = _more(gradio)
        write = gradio.Button("Write", variant="primary")
        texts = gradio.HTML(side_by_side(*(section(name, "", Told("")) for name in SIDES)))
        gradio.on(
            [write.click, prompt.submit],
            partial(compare, author),  # which Gradio sees to give texts as they grow
            [prompt, goal, strength, *more],
            texts,
            api_name="write",
            show_progress="minimal",
        )
    return page


def _more(gradio: Any) -> list[Any]:
    """Lay out what few will change: the fields of a wish after its strength, in their order."""
    with gradio.Accordion("More", open=False):
        with gradio.Row():
            shift = gradio.Slider(-100, 20, 0, step=1, label="Shift", min_width=LEAST)
            horizon = gradio.Slider(0, 64, 64, step=1, label="Tokens looked ahead", min_width=LEAST)
        with gradio.Row():
            length = gradio.Slider(5, 200, 40, step=5, label="Tokens to write", min_width=LEAST)
            top_p = gradio.Slider(0.05, 1, 1, step=0.05, label="Top-p", min_width=LEAST)
            seed = gradio.Number(0, label="Seed", precision=0, min_width=LEAST)
        neutral = gradio.Checkbox(False, label="Let texts end as bare ones do")
    return [shift, horizon, neutral, length, top_p, seed]


def compare(author: Author, *given: Any) -> Iterator[str]:
    """Write bare, then steered, from the same seed; give both as they grow.

    Given are the fields of a wish, in their order.
    """
    try:
        wish = _wish(*given)
        shown = {name: section(name, wish.prompt, Told("")) for name in SIDES}
        for name in SIDES:
            for told in _as_it_comes(author, wish, steered=name == "steered"):
                shown[name] = section(name, wish.prompt, told)
                yield side_by_side(*shown.values())
    except ForetraceError as error:  # which the page takes for markup
        raise require_gradio().Error(escape(str(error)), print_exception=False) from error


def _wish(prompt: str, goal: str | None, *rest: Any) -> Wish:
    """Read what somebody asks for; fields can be left empty."""
    if not (goal or "").strip():
        raise InvalidInputError("Choose a goal, or write an expression.")
    if None in rest:
        raise InvalidInputError("A number is missing: look under More.")
    return Wish(prompt or "", str(goal), *rest)


def _as_it_comes(author: Author, wish: Wish, *, steered: bool) -> Iterator[Told]:
    """Write in a thread; give the text so far, in the end all that is told of it, or raise.

    If nobody listens any more, the author is stopped when it next tells something.
    """
    heard: Queue[str | Told | Exception] = Queue()
    left = Event()

    def tell(text: str) -> None:
        if left.is_set():
            raise InterruptedError("Nobody listens any more.")
        heard.put(text)

    def work() -> None:
        try:
            with ONE_AT_A_TIME:
                heard.put(author.write(wish, steered, tell))
        except Exception as error:
            heard.put(error)

    Thread(target=work, daemon=True).start()
    try:
        while isinstance(found := heard.get(), str):
            yield Told(found)
        if isinstance(found, Exception):
            raise found
        yield found
    finally:
        left.set()
