"""The playground in a real browser."""

import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from foretrace.attribute import Attribute, AttributeStore, LogitAffine
from foretrace.cli.explain import TokenTable
from foretrace.cli.goal_options import GoalSettings
from foretrace.cli.playground import _load_backend
from foretrace.cli.playground.backends import OnText, PlaygroundResult
from foretrace.cli.playground.page import SIDES, parse_request, text_section
from foretrace.engines.transformers.explain import Candidate, Choice
from foretrace.errors import InvalidInputError
from server import serving
from tiny_lm import chat_tokenizer, tiny_hmm, write_tiny_lm

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
]
OVERLAPPING = """() => {
  const shown = [...document.querySelectorAll("button, input, textarea, h1, h3, p, label, section")]
    .filter(node => node.checkVisibility() && node.getBoundingClientRect().width > 2);
  const overlapping = [];
  shown.forEach((one, index) => shown.slice(index + 1).forEach(other => {
    if (one.contains(other) || other.contains(one)) return;
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 1) {
      overlapping.push([one, other].map(node => node.outerHTML.slice(0, 80)));
    }
  }));
  return overlapping;
}"""


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a playground with a tiny LM that answers chats."""
    pytest.importorskip("gradio", reason="needs the extra `playground`")
    folder, tokenizer = tmp_path_factory.mktemp("playground"), chat_tokenizer()
    write_tiny_lm(folder / "lm", tokenizer)
    tiny_hmm(tokenizer).save_pretrained(folder / "hmm")
    store = AttributeStore(folder / "attributes")
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    number = torch.tensor([int(word[1:]) if word.startswith("w") else 0 for word in words])
    for name, holds in {"odd": number % 2 == 1, "low": number < 32}.items():
        store.add(Attribute.from_weights(holds.float().clamp_min(1e-6), name=name))
    command = [sys.executable, "-m", "foretrace", "playground", folder / "lm", "--hmm"]
    command += [folder / "hmm", "--attributes", store.folder]
    with serving(command, folder / "log", ready="/") as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `dev`")
    if BROWSER is None:
        pytest.skip("Chromium is not installed.")
    with playwright.sync_playwright() as tools:
        launched = tools.chromium.launch(executable_path=BROWSER, args=BROWSER_OPTIONS)
        yield launched
        launched.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_unsteered_and_steered_side_by_side(
    width: int, playground: str, browser: Any, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(playground)
    fill_advanced(page, "Strength", "1")
    submit(page, "odd & ~low")
    page.wait_for_selector(".steered.explained")
    bare, steered = (page.locator(f".{name} .token") for name in ("bare", "steered"))
    assert steered.count() > 1
    assert all(number % 2 == 1 for number in numbers(steered))
    assert not all(number % 2 == 1 for number in numbers(bare))
    heading = page.locator(".steered h3").inner_text()
    assert "attribute probability 1.000" in heading
    assert "nats per token" in heading
    assert "nats per token" not in page.locator(".bare h3").inner_text()
    assert page.evaluate(OVERLAPPING) == []
    candidates = steered.first.locator(".candidates")
    assert not candidates.is_visible()
    steered.first.hover()
    assert candidates.is_visible()
    assert candidates.locator("tr").count() >= 6
    check_inside(page.locator("section.steered"), candidates)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    page.close()


def test_errors_are_shown_on_the_page(playground: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(playground)
    submit(page, "odd & lo")
    page.get_by_text("Did you mean low?").wait_for()
    fill_advanced(page, "Transform", "1;2")
    submit(page, "odd")
    page.get_by_text("A transform is two numbers").wait_for()
    page.close()


def test_levels_are_chosen_on_the_page(playground: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(playground)
    page.get_by_label("strong").check()
    submit(page, "odd")
    page.wait_for_selector(".steered.explained")
    assert "nats per token" in page.locator(".steered h3").inner_text()
    page.close()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("strong", "", ""), {"level": "strong"}),
        (("medium", "2.5", ""), {"strength": 2.5}),
        (("medium", "", "10,-3"), {"transform": [10.0, -3.0]}),
    ],
)
def test_the_server_gets_level_strength_or_transform(
    values: tuple[str, str, str], expected: dict[str, object]
) -> None:
    request = parse_request("w1", "odd", *values, 64, True, 40, 1.0, 0)
    assert request.params() == {"goal": "odd", **expected, "neutral_end": True}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("medium", "2", "1,0"), "not both"),
        (("medium", "1e9", ""), "from 0.01 to 1000"),
        (("medium", "x", ""), "a number"),
    ],
)
def test_wrong_values_of_the_form(values: tuple[str, str, str], expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        parse_request("w1", "odd", *values, 64, True, 40, 1.0, 0)


def test_the_local_backend_takes_the_settings_of_the_form() -> None:
    request = parse_request("w1", "odd", "medium", "", "10,-3", 64, False, 40, 1.0, 0)
    assert request.settings().transforms == [LogitAffine(10.0, -3.0)]
    assert not request.settings().neutral_end
    request = parse_request("w1", "odd", "mild", "", "", 64, True, 40, 1.0, 0)
    assert request.settings() == GoalSettings([None], "mild")


def submit(page: Any, goal: str) -> None:
    """Fill in the form and submit it."""
    page.get_by_label("Prompt", exact=True).fill("w1 w2")
    page.get_by_label("Goal").fill(goal)
    page.get_by_label("Goal").press("Enter")
    page.get_by_role("button", name="Write").click()


def fill_advanced(page: Any, label: str, value: str) -> None:
    """Open the advanced fields and fill one; Gradio empties fields while it renders them."""
    page.get_by_role("button", name="More").click()
    field, unchanged = page.get_by_label(label), 0
    while unchanged < 3:
        if field.input_value() != value:
            field.fill(value)
            unchanged = 0
        page.wait_for_timeout(200)
        unchanged += 1


def numbers(tokens: Any) -> list[int]:
    """Return the numbers of the tiny LM's words, without the candidates' tables."""
    own_text = "nodes => nodes.map(node => node.firstChild.nodeValue || '')"
    return [int(word) for word in re.findall(r"w(\d+)", "".join(tokens.evaluate_all(own_text)))]


def check_inside(outer: Any, inner: Any) -> None:
    """Check that the inner element does not extend beyond the outer one."""
    frame, box = outer.bounding_box(), inner.bounding_box()
    assert frame["x"] <= box["x"]
    assert box["x"] + box["width"] <= frame["x"] + frame["width"]
    assert box["y"] + box["height"] <= frame["y"] + frame["height"]


def test_two_threads_generate_in_turn_what_each_generates_alone(steered: list[str]) -> None:
    lm, _, hmm, _, attributes = steered
    backend = _load_backend(lm, hmm, Path(attributes), "cpu", "float32")
    request = parse_request("w1 w2", "odd", "medium", "", "", 8, True, 12, 0.9, 0)

    def generate(is_steered: bool, on_text: OnText) -> str:
        return backend.generate(request, is_steered, on_text).text

    alone = [generate(side, lambda _: None) for side in (False, True)]
    order: list[bool] = []

    def record(side: bool, _: str) -> None:
        order.append(side)

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(generate, side, partial(record, side)) for side in (False, True)]
    assert [one.result() for one in running] == alone
    assert alone[0] != alone[1]
    assert order[2:12:2] == [order[2]] * 5
    assert order[3:12:2] == [not order[2]] * 5


def test_texts_are_escaped() -> None:
    html = text_section("bare", "<b>", PlaygroundResult("<script>&amp;"))
    assert "<b>" not in html
    assert "<script>" not in html
    assert "&amp;amp;" in html
    candidate = Candidate(1, 0.5, (0.5,), 0.5)
    choice = Choice(candidate, (candidate,), (0.5,))
    table = TokenTable(["<i>"], [choice], lambda token: f"<u>{token}")
    html = text_section("bare", "", PlaygroundResult("<i>", table))
    assert "<i>" not in html
    assert "<u>" not in html
    assert "&lt;u&gt;1" in html


def test_a_conversation_keeps_each_sides_answers(playground: str, browser: Any) -> None:
    """The user's messages go to both sides, which answer in conversations of their own."""
    page = browser.new_page()
    page.goto(playground)
    page.get_by_label("Chat").check()
    page.get_by_label("System prompt").fill("w7")
    for turn in (1, 2):
        submit(page, "odd")
        page.wait_for_function(
            f"document.querySelectorAll('.steered.explained .user').length == {turn}"
        )
    answers = [page.locator(f".{side} .assistant").all_inner_texts() for side in SIDES]
    assert [len(texts) for texts in answers] == [1, 1]
    assert answers[0] != answers[1]
    assert page.locator(".system").all_inner_texts() == ["w7", "w7"]
    page.get_by_label("Chat").uncheck()
    submit(page, "odd")
    page.wait_for_selector(".steered.explained .prompt")
    assert page.locator(".user").count() == 0
    page.close()
