"""The playground, in a real browser."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrace.cli.playground.backend import Told
from foretrace.cli.playground.comparison import section
from foretrace.cli.token_table import Account
from foretrace.engines.transformers.explain import Candidate, Choice
from server import serving

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
OVERLAPPING = """() => {
  const shown = [...document.querySelectorAll("button, input, textarea, h1, h3, p, label, section")]
    .filter(each => each.checkVisibility() && each.getBoundingClientRect().width > 2);
  const found = [];
  shown.forEach((one, place) => shown.slice(place + 1).forEach(other => {
    if (one.contains(other) || other.contains(one)) return;
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 1) found.push([one, other].map(each => each.outerHTML.slice(0, 80)));
  }));
  return found;
}"""


@pytest.fixture(scope="module")
def playground(steered: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a playground with a tiny LM."""
    pytest.importorskip("gradio", reason="needs the extra `playground`")
    command = [sys.executable, "-m", "foretrace", "playground", *steered]
    with serving(command, tmp_path_factory.mktemp("playground") / "log", ready="/") as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a screen."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `dev`")
    if BROWSER is None:
        pytest.skip("There is no Chromium here.")
    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield found
        found.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_bare_and_steered_side_by_side(
    width: int, playground: str, browser: Any, tmp_path: Path
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(playground)
    page.get_by_role("button", name="More").click()
    ask(page, "odd & ~low")
    page.wait_for_selector(".steered.told")
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
    inside(page.locator("section.steered"), candidates)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    page.close()


def test_mistakes_are_told_on_the_page(playground: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(playground)
    ask(page, "odd & lo")
    page.get_by_text("Did you mean low?").wait_for()
    page.close()


def ask(page: Any, goal: str) -> None:
    """Fill the form, and let it write."""
    page.get_by_label("Prompt").fill("w1 w2")
    page.get_by_label("Goal").fill(goal)
    page.get_by_label("Goal").press("Enter")
    page.get_by_role("button", name="Write").click()


def numbers(tokens: Any) -> list[int]:
    """Read the words of the tiny LM, without those of candidates."""
    first = "all => all.map(each => each.firstChild.nodeValue || '')"  # not that of a table
    return [int(found) for found in re.findall(r"w(\d+)", "".join(tokens.evaluate_all(first)))]


def inside(outer: Any, inner: Any) -> None:
    """Check that nothing hangs out of its frame."""
    out, own = outer.bounding_box(), inner.bounding_box()
    assert out["x"] <= own["x"]
    assert own["x"] + own["width"] <= out["x"] + out["width"]
    assert own["y"] + own["height"] <= out["y"] + out["height"]


def test_texts_cannot_be_markup() -> None:
    html = section("bare", "<b>", Told("<script>&amp;"))
    assert "<b>" not in html
    assert "<script>" not in html
    assert "&amp;amp;" in html
    candidate = Candidate(1, 0.5, (0.5,), 0.5)
    choice = Choice(candidate, (candidate,), (0.5,))
    told = Told("<i>", Account(["<i>"], [choice], lambda token: f"<u>{token}"))
    html = section("bare", "", told)
    assert "<i>" not in html
    assert "<u>" not in html
    assert "&lt;u&gt;1" in html
