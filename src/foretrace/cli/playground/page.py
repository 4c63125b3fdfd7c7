"""The playground's page: what is asked for above, the two texts below, as they are written."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from queue import Queue
from threading import Thread
from typing import Any

from foretrace.cli.playground.author import Author, Told, Wish
from foretrace.cli.playground.pair import render
from foretrace.errors import ForetraceError, InvalidInputError

TITLE = "# foretrace\nWhat a language model writes, and what it writes toward a goal."
HINT = 'An attribute, or an expression: nontoxic & ~formal, mentions("refund").'

LEAST = 250  # pixels of what stands in a row; where there is no room it goes below


def launch(author: Author, host: str, port: int) -> None:
    """Show the page until the process is stopped."""
    gradio = _gradio()
    style = files("foretrace.cli.playground").joinpath("style.css").read_text("utf-8")
    page = build_page(gradio, author)
    page.launch(server_name=host, server_port=port, css=style, footer_links=[])


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
                info="1 is the posterior itself; more is more.",
                min_width=LEAST,
            )
        more = _more(gradio)
        write = gradio.Button("Write", variant="primary")
        texts = gradio.HTML(render("", Told(""), Told("")))
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
    wish = Wish(*given)
    if not (wish.goal or "").strip():
        raise _told(InvalidInputError("Choose a goal, or write an expression."))
    bare, steered = Told(""), Told("")
    for bare in _as_it_comes(lambda tell: author.write(wish, False, tell)):
        yield render(wish.prompt, bare, steered)
    for steered in _as_it_comes(lambda tell: author.write(wish, True, tell)):
        yield render(wish.prompt, bare, steered)


def _as_it_comes(write: Callable[[Callable[[str], None]], Told]) -> Iterator[Told]:
    """Write in a thread; give the text so far, in the end all that is told of it, or raise."""
    heard: Queue[str | Told | Exception] = Queue()

    def work() -> None:
        try:
            heard.put(write(heard.put))
        except Exception as error:
            heard.put(error)

    Thread(target=work, daemon=True).start()
    while isinstance(found := heard.get(), str):
        yield Told(found)
    if isinstance(found, Exception):
        raise _told(found)
    yield found


def _told(error: Exception) -> Exception:
    """Make of a mistake that is meant for people one that the page shows."""
    return _gradio().Error(str(error)) if isinstance(error, ForetraceError) else error


def _gradio() -> Any:
    try:
        import gradio
    except ImportError as error:
        raise InvalidInputError(
            "The playground needs Gradio: pip install 'foretrace[playground]'."
        ) from error
    return gradio
