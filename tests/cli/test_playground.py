"""The playground in a real browser."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrace.cli.playground.backend import PlaygroundResult
from foretrace.cli.playground.comparison import text_section
from foretrace.cli.token_table import TokenTable
from foretrace.engines.transformers.explain import Candidate, Choice
from server import serving

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
def playground(steered: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a playground with a tiny LM."""
    pytest.importorskip("gradio", reason="needs the extra `playground`")
    command = [sys.executable, "-m", "foretrace", "playground", *steered]
    with serving(command, tmp_path_factory.mktemp("playground") / "log", ready="/") as address:
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
    page.get_by_role("button", name="More").click()
    submit(page, "odd & ~low")
    page.wait_for_selector(".steered.explained")
    bare, steered = (page.locator(f".{name} .token") for name in ("bare", "steered"))
    assert steered.count() > 1
    assert all(number % 2 == 1 for number in numbers(steered))
    assert not all(number % 2 == 1 for number in numbers(bare))
    assert "attribute probability 1.000" in page.locator(".steered h3").inner_text()
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
    page.close()


def submit(page: Any, goal: str) -> None:
    """Fill in the form and submit it."""
    page.get_by_label("Prompt").fill("w1 w2")
    page.get_by_label("Goal").fill(goal)
    page.get_by_label("Goal").press("Enter")
    page.get_by_role("button", name="Write").click()


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
