"""`foretrace generate` and `foretrace explain`."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from docs_folder import write_docs_folder
from foretrace.attribute import Attribute, AttributeStore, ContextReward
from foretrace.attribute.report import AttributeReport, LevelReport
from foretrace.context import read_head
from forked import Run
from tiny_lm import WORDS, chat_tokenizer, tiny_hmm, write_tiny_lm

pytest.importorskip("transformers", reason="needs the extra `transformers`")


def numbers(text: str) -> list[int]:
    return [int(word) for word in re.findall(r"w(\d+)", text)]


def test_expressions_steer(run: Run, steered: list[str]) -> None:
    options = ["--goal", "odd & ~low", "--prompt", "w1 w2", "--prompt", "", "--json", "--compare"]
    options += ["--strength", "1"]
    code, out, _ = run("generate", *steered, *options)
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    assert first["prompt"] == "w1 w2"
    for row in (first, second):
        words = numbers(row["text"])
        assert words
        assert all(number % 2 == 1 for number in words)
        assert max(words) >= 32
        assert row["probability"][0] > 0.99
        assert row["bare"]["probability"][0] < 0.01
        assert 0.1 < row["price"] < 10
        assert "price" not in row["bare"]


def test_batches_from_a_file_with_several_goals(
    run: Run, steered: list[str], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("w1\nw2 w3 w4\n\nw5\n")
    options = ["--goal", "odd", "--goal", "low", "--strength", 2, "--strength", 1, "--seed", 3]
    options += ["--prompts", tmp_path / "prompts.txt", "--batch-size", 2, "--temperature", 0]
    code, out, _ = run("generate", *steered, *options)
    assert code == 0
    texts = [line for line in out.splitlines() if line]
    assert [text.split()[0] for text in texts] == ["w1", "w2", "w5"]
    assert all(number % 2 == 1 and number < 32 for text in texts for number in numbers(text)[4:])
    side = ["--prompts", tmp_path / "prompts.txt", "--goal", "odd", "--compare"]
    side += ["--strength", 1]
    code, out, _ = run("generate", *steered, *side)
    assert code == 0
    assert out.count("probability of odd 1.000") >= 3
    assert out.count("nats per token") == 3


def test_levels_steer_more_and_more(run: Run, steered: list[str]) -> None:
    """Without settings, the level is medium; the attribute is not calibrated, which is printed."""
    options = ["--goal", "odd", "--json", "--max-new-tokens", 20, "--batch-size", 16]
    options += [word for index in range(16) for word in ("--prompt", f"w{index}")]
    prices = {}
    for level in ("mild", "medium", "strong", None):
        named = [] if level is None else ["--level", level]
        code, out, error = run("generate", *steered, *options, *named)
        assert code == 0
        assert error.count("\n") == 1
        assert error.startswith("foretrace: 'odd' was not calibrated")
        prices[level] = fmean(json.loads(line)["price"] for line in out.splitlines())
    assert 0 < prices["mild"] < prices["medium"] < prices["strong"]
    assert prices[None] == prices["medium"]


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of an LM with a byte-level tokenizer, and attributes `nontoxic` and `formal`."""
    folder = write_docs_folder(tmp_path_factory.mktemp("docs"))
    hmm, attributes = folder / "my-hmm", folder / "attributes"
    return [str(folder / "my-lm"), "--hmm", str(hmm), "--attributes", str(attributes)]


@pytest.mark.parametrize(
    ("prompt", "window", "steered"),
    [("Hm.</t>", [], True), ("Hm.", [], False), ("Hm.</t>", ["--window", "4"], True)],
)
def test_a_goal_begins_after_a_marker(
    run: Run, spelled: list[str], prompt: str, window: list[str], steered: bool
) -> None:
    """Here in the prompt; without it, the text is as bare and has no probability."""
    options = ["--must-contain", "ship", "--after", "</t>", "--prompt", prompt, *window]
    options += ["--json", "--compare", "--max-new-tokens", "8"]
    code, out, error = run("generate", *spelled, *options)
    assert code == 0, error
    row = json.loads(out)
    assert ("ship" in row["text"]) == steered
    assert (row["text"] == row["bare"]["text"]) == (not steered)
    assert row["probability"] == ([1.0] if steered else [])
    assert (row["price"] > 0) == steered


def test_an_hmm_is_optional(run: Run, spelled: list[str]) -> None:
    """Goals, required and forbidden text work; only where the text occurs may be worse."""
    options = [spelled[0], *spelled[3:], "--goal", "nontoxic", "--prompt", "hello"]
    options += ["--max-new-tokens", "12"]
    texts = ["--must-contain", "ship", "--must-not-contain", "z"]
    done = run("generate", *options, *texts, "--json")
    assert done.code == 0, done.err
    assert "ship" in json.loads(done.out)["text"]
    assert "z" not in json.loads(done.out)["text"]
    assert done.err.startswith("Without --hmm, goals look at the next token alone.")
    assert "found with token frequencies alone" in done.err
    explained = run("explain", *options)
    assert explained.code == 0, explained.err
    assert "mean price" in explained.out


@pytest.mark.parametrize(
    "settings",
    [
        ["--strength", 2, "--strength", 3],
        ["--transform", "5,-5", "--transform", "2,0", "--no-neutral-end"],
    ],
)
def test_required_text_joins_several_goals(
    run: Run, spelled: list[str], settings: list[object]
) -> None:
    """Each goal has its probability, and the required and forbidden texts have one."""
    options = ["--goal", "nontoxic", "--goal", "formal", "--prompt", "hello", "--json"]
    options += ["--must-contain", "ship", "--must-not-contain", "z"]
    if settings[0] == "--strength":  # one product: several goals may require text
        options[3] = 'formal & contains("coast") & ~contains("fool")'
    options += ["--max-new-tokens", "12", "--horizon", "2"]
    code, out, error = run("generate", *spelled, *options, *settings)
    assert code == 0, error
    assert not error
    row = json.loads(out)
    assert "ship" in row["text"]
    assert len(row["probability"]) == 3
    assert row["probability"][2] == 1.0


def test_goals_that_share_a_level_are_explained_as_they_are_generated(
    run: Run, spelled: list[str]
) -> None:
    options = [*spelled, "--goal", "nontoxic", "--goal", "formal", "--level", "strong"]
    options += ["--prompt", "hello", "--max-new-tokens", "8"]
    generated, explained = run("generate", *options, "--json"), run("explain", *options)
    assert generated.code == explained.code == 0, generated.err + explained.err
    assert f"mean price: {json.loads(generated.out)['price']:.4f} nats" in explained.out


@pytest.mark.parametrize("option", ["--must-contain", "--must-not-contain"])
def test_the_price_of_required_text_is_beside_the_level(
    run: Run, spelled: list[str], option: str
) -> None:
    options = [option, "ship", "--prompt", "hello", "--compare", "--max-new-tokens", "8"]
    code, out, error = run("generate", *spelled, *options)
    assert code == 0, error
    assert ("includes the required text" in out) == (option == "--must-contain")


def test_required_text_is_met_and_has_no_probability(run: Run, spelled: list[str]) -> None:
    options = ["--must-contain", "ship", "--prompt", "hello", "--max-new-tokens", "8"]
    done = run("generate", *spelled, *options)
    assert done.code == 0, done.err
    assert re.search(r"price [\d.]+ nats per token; 'ship': met", done.err)


@pytest.mark.shows("transformers generate", "streaming")
def test_streamed_text_equals_the_result(run: Run, steered: list[str]) -> None:
    options = ["--goal", "odd", "--prompt", "w1 [bold]w2", "--max-new-tokens", "6"]
    streamed, as_json = (run("generate", *steered, *options, *more) for more in ([], ["--json"]))
    assert streamed.code == as_json.code == 0, streamed.err + as_json.err
    row = json.loads(as_json.out)
    assert row["text"].startswith(" w")
    assert streamed.out == f"{row['prompt']}{row['text']}\n\n"


def test_results_follow_each_text(run: Run, steered: list[str]) -> None:
    options = ["--goal", "odd & ~low", "--goal", "odd", "--strength", 1, "--max-new-tokens", 8]
    options += ["--prompt", "w1", "--prompt", "w2"]
    done = run("generate", *steered, *options)
    own = r" \(by the attribute itself\)"
    results = rf"price [\d.]+ nats per token; probability of \(odd & ~low\) [\d.]+{own}; "
    results += rf"probability of odd 1.000{own}"
    assert len(re.findall(results, done.err)) == len(done.err.splitlines()) == 2
    quiet = run("generate", *steered, *options, "--quiet")
    assert (quiet.out, quiet.err) == (done.out, "")


def test_texts_without_a_goal_are_bare(run: Run, steered: list[str]) -> None:
    options = ["--prompt", "w1 w2", "--max-new-tokens", 8, "--json"]
    done = run("generate", steered[0], *options)
    assert (done.code, done.err) == (0, "")
    row = json.loads(done.out)
    assert row.keys() == {"prompt", "text", "probability"}
    compared = run("generate", *steered, "--goal", "odd", "--strength", 1, *options, "--compare")
    assert json.loads(compared.out)["bare"]["text"] == row["text"]


def test_explain_a_given_and_a_generated_text(run: Run, steered: list[str], tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    shutil.copytree(steered[4], tmp_path / "attributes")
    steered = [*steered[:4], str(tmp_path / "attributes")]
    store = AttributeStore(steered[4])
    store.add(Attribute.from_weights(torch.ones(len(WORDS)), name="</script>"))
    options = ["--goal", 'odd & "</script>"', "--goal", "low", "--candidates", 3, "--html", page]
    text = ["--prompt", "w1 w2", "--text", "w3 w40 w5"]
    code, out, _ = run("explain", *steered, *options, *text)
    assert code == 0
    assert out.startswith("w1 w2 w3 w40 w5")
    html = page.read_text()
    assert html.count('class="token"') == 3
    assert html.count("</script>") == 1  # a name cannot close the page's script
    assert not re.search(r"https?://", html)
    assert "medium" in html
    assert "<dt>price</dt><dd>0." in html
    assert len(re.search(r"prices = \[(.*?)\]", html)[1].split(",")) == 3  # type: ignore[index]
    code, out, _ = run("explain", *steered, *options[:6], *text)
    assert code == 0
    assert "' w40'" in out
    assert out.count("> ") == 3
    assert re.search(r"mean price: 0\.\d{4} nats per token", out)
    code, out, _ = run("explain", *steered, *options[:2], "--prompt", "w1")
    assert code == 0
    assert out.count("> ") >= 1


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--goal", "od", "--prompt", "w1"], 1, "Did you mean odd?"),
        (["--goal", "odd &", "--prompt", "w1"], 1, "not an expression"),
        (["--goal", "odd & ~odd & ~always", "--prompt", "w1"], 1, "contradict each other"),
        (["--goal", "~odd", "--prompt", "w1", "--strength", "2"], 1, "no strength other than 1"),
        (["--goal", "odd", "--prompt", "w1", "--transform", "1,inf"], 2, "finite shift"),
        (
            ["--must-contain", "w9", "--prompt", "w1", "--strength", "1"],
            2,
            "--strength needs a --goal",
        ),
        (
            ["--goal", "odd", "--prompt", "w1", "--strength", "1", "--strength", "2"],
            2,
            "given 2 times, for 1 goals",
        ),
        (["--prompt", "w1", "--compare"], 2, "--compare needs a --goal, which is missing"),
        (["--prompt", "w1", "--window", "4"], 2, "--window needs a --goal, which is missing"),
        (["--goal", "odd", "--prompt", "w1", "--ignore-case"], 2, "which are missing"),
        (
            ["--must-contain", "W9", "--must-not-contain", "w9", "--ignore-case", "--prompt", "w1"],
            1,
            'contains("W9", ignore_case=True) and ~contains("w9", ignore_case=True)',
        ),
        (["--goal", "odd", "--prompts", "no.jsonl"], 1, "There is no file"),
        (["--goal", "odd", "--prompt", "w1", "--attributes", "."], 1, "There are no attributes in"),
        (["--goal", "odd", "--prompt", "w1", "--dtype", "float3"], 1, "cannot be loaded"),
    ],
)
def test_errors_are_one_line(
    run: Run, steered: list[str], options: list[str], code: int, expected: str
) -> None:
    exit_code, _, error = run("generate", *steered, *options)
    assert expected in error
    assert exit_code == code


def test_a_misspelt_attribute_is_found_before_the_lm_is_loaded(
    run: Run, steered: list[str]
) -> None:
    for command in ("generate", "explain"):
        options = ["--goal", "od", "--prompt", "w1"]
        assert "Did you mean odd?" in run(command, "no-such-lm", *steered[1:], *options).err


def test_an_attribute_that_was_measured_to_have_no_effect_is_named(
    run: Run, steered: list[str], tmp_path: Path
) -> None:
    chance = LevelReport("strong", 3.0, 0.15, 0.50, 0.52, 0.03, 1.05)
    report = AttributeReport((chance,), True, 0.9, num_texts=1000, num_prompts=32)
    odd = AttributeStore(steered[-1])["odd"]
    config = replace(odd.config, name="idle", fit={"report": report.to_record()})
    AttributeStore(tmp_path).add(replace(odd, config=config))
    config = replace(config, name="later", fit={"report": {"levels": []}})
    AttributeStore(tmp_path).add(replace(odd, config=config))
    options = ["--strength", "1", "--prompt", "w1", "--max-new-tokens", "2"]
    for goal, is_named in (("idle", True), ("~idle", False), ("later", False)):
        code, _, error = run("generate", *steered[:-1], str(tmp_path), "--goal", goal, *options)
        assert code == 0, error
        assert ("idle: `strong` moves 0.50 to 0.52: does not work." in error) == is_named


def test_errors_follow_no_prompt(run: Run, spelled: list[str]) -> None:
    """A required text that is longer than the limit is an error before anything is printed."""
    options = ["--must-contain", "a very long text", "--prompt", "Hm.", "--max-new-tokens", 2]
    done = run("generate", *spelled, *options)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("foretrace: ")


def test_an_empty_prompt_begins_a_new_text(run: Run, steered: list[str]) -> None:
    options = ["--goal", "odd", "--strength", "1", "--max-new-tokens", 4, "--quiet", "--prompt"]
    assert "begins a new text" in run("generate", *steered, *options, "").err
    assert not run("generate", *steered, *options, "w1").err


def test_a_missing_folder_is_not_taken_for_a_hub_id(run: Run, steered: list[str]) -> None:
    done = run("generate", "./nolm", *steered[1:], "--goal", "odd", "--prompt", "w1")
    assert done.code == 1
    assert "There is no file or folder ./nolm." in done.err


def test_prompts_are_answered_as_chats(run: Run, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    write_tiny_lm(tmp_path / "lm", tokenizer)
    tiny_hmm(tokenizer).save_pretrained(tmp_path / "hmm")
    weights = torch.ones(len(tokenizer))
    weights[:32] = 1e-6
    AttributeStore(tmp_path / "attributes").add(Attribute.from_weights(weights, name="high"))
    options = [tmp_path / "lm", "--hmm", tmp_path / "hmm", "--attributes", tmp_path / "attributes"]
    options += ["--goal", "high", "--strength", 1, "--max-new-tokens", 8, "--prompt", "w1 w2"]
    (tmp_path / "prompts.txt").write_text("w3\n")
    prompts = ["--prompts", tmp_path / "prompts.txt", "--json"]
    as_chat = ["--chat", *prompts], ["--system", "w5", *prompts], prompts
    texts = []
    for chat in as_chat:
        code, out, _ = run("generate", *options, *chat)
        assert code == 0
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["prompt"] for row in rows] == ["w1 w2", "w3"]
        texts.append([row["text"] for row in rows])
    assert texts[0] != texts[1] != texts[2] != texts[0]  # the LM reads other prompts
    code, out, _ = run("generate", *options, "--chat")
    assert code == 0
    assert out.splitlines()[0] == "w1 w2"


def test_a_chat_needs_a_template(run: Run, steered: list[str]) -> None:
    options = ["--goal", "odd", "--prompt", "w1", "--chat"]
    code, _, err = run("generate", *steered, *options)
    assert code == 1
    assert "no chat template" in err


def test_context_rewards_need_no_file(
    run: Run, steered: list[str], tiny_lm: Path, tmp_path: Path
) -> None:
    """Commands make the probe of the LM, if an attribute has a context reward."""
    generator = torch.Generator().manual_seed(0)
    readers, writers = (0.3 * torch.randn(2, width, generator=generator) for width in (33, 32))
    reward = ContextReward(readers, writers, read_head(tiny_lm).fingerprint)
    store = AttributeStore(tmp_path / "attributes")
    store.add(AttributeStore(steered[4])["low"].with_context(reward).renamed("moody"))
    folders = [*steered[:3], "--attributes", store.folder]
    calibrated = run("calibrate", *folders, "--attribute", "moody", "--max-new-tokens", 4)
    assert calibrated.code == 0, calibrated.err
    options = ["--strength", 1, "--prompt", "w1", "--max-new-tokens", 4, "--temperature", 0]
    explained = run("explain", *folders, "--goal", "moody", *options)
    assert explained.code == 0, explained.err
    assert run("probe", tiny_lm, "--out", tmp_path / "p", "--no-run").code == 0
    commands: list[list[object]] = [
        [*folders, "--goal", "moody"],
        [*folders, "--goal", "moody", "--probe", tmp_path / "p"],
        [*steered, "--goal", "low"],
    ]
    rows = [json.loads(run("generate", *one, *options, "--json").out) for one in commands]
    assert rows[0]["price"] == pytest.approx(rows[1]["price"], rel=0.05)
    assert rows[0]["price"] != pytest.approx(rows[2]["price"], rel=0.05)
