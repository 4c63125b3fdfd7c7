"""Tables and markers of goals: built once, and refused before they cost anything."""

import re
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from foretrace.attribute import Attribute
from foretrace.context import Head, Probe
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.vllm.builder import TableBuilder, require_small
from foretrace.engines.vllm.params import SteeringParams, parse
from foretrace.engines.vllm.table_store import TableStore
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from foretrace.steering import Compiler
from random_attributes import random_context

WORDS = 40
HORIZON = 6
LETTERS = TokenBytes([b"", *(bytes([97 + place % 26]) for place in range(WORDS - 1))])


@pytest.fixture
def hmm() -> HMM:
    return HMM.random(8, WORDS, eos_token_id=0, seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place, name in enumerate(("nontoxic", "formal", "mixed")):
        _write(tmp_path / "attributes", name, place)
    rewards = torch.randn(WORDS, generator=torch.Generator().manual_seed(3))
    Attribute.from_rewards(rewards, name="kind").save(tmp_path / "attributes" / "kind.safetensors")
    return tmp_path / "attributes"


def _write(folder: Path, name: str, seed: int) -> None:
    weights = torch.rand(WORDS, generator=torch.Generator().manual_seed(seed))
    attribute = Attribute.from_weights(weights)
    config = replace(attribute.config, levels={"mild": 1.0, "medium": 2.0, "strong": 4.0})
    replace(attribute, config=config).save(folder / f"{name}.safetensors")


def _load_all(folder: Path) -> dict[str, Attribute]:
    return {path.stem: Attribute.load(path) for path in folder.glob("*.safetensors")}


def _params(goal: str | list[str] | None = None, **more: object) -> SteeringParams:
    params = parse(more if goal is None else {"goal": goal, **more})
    assert params is not None
    return params


def _builder(hmm: HMM, folder: Path, **options: Any) -> TableBuilder:
    store = TableStore(folder.parent / "tables", 1 << 30)
    return TableBuilder(hmm, folder, store, **{"horizon": HORIZON, **options})


def _with_letters(hmm: HMM, folder: Path) -> TableBuilder:
    return _builder(hmm, folder, load_token_bytes=lambda: LETTERS)


def _keys(builder: TableBuilder, goal: str | list[str], **more: object) -> list[str]:
    return list(builder.admit(_params(goal, **more)).tables)


@pytest.mark.parametrize(
    ("goal", "more"),
    [
        ("nontoxic", {"strength": 2}),
        ("nontoxic & ~formal", {"level": "strong"}),
        ("~(formal | mixed)", {"transform": [3, -1]}),
        (["mixed & nontoxic", "~kind"], {"strength": [2, 0.5]}),
    ],
)
def test_a_table_is_that_of_the_conjunction(
    hmm: HMM, folder: Path, goal: str | list[str], more: dict[str, Any]
) -> None:
    params, builder = _params(goal, **more), _builder(hmm, folder)
    (key,) = builder.build(params).tables
    found = builder.store.lookahead(key, hmm, HORIZON)
    goals = params.goals[0].goals(_load_all(folder))
    exact = Compiler(hmm, HORIZON).compile(goals).factors[0].lookahead
    assert isinstance(exact, Lookahead)
    assert torch.equal(found.tables.values, exact.tables.values)
    assert torch.equal(found.tables.log_scales, exact.tables.log_scales)
    assert torch.equal(found.tables.log_missing, exact.tables.log_missing)
    assert torch.equal(found.token_weights(), exact.token_weights())


def test_an_admission_names_all_that_the_decoding_process_loads(hmm: HMM, folder: Path) -> None:
    builder = _with_letters(hmm, folder)
    params = _params("formal", transform=[3, -1], after="ab", window="cd", neutral_end=0, horizon=4)
    admission = builder.build(params)
    assert admission.transforms == [[3.0, -1.0]]
    assert (admission.after, admission.window, admission.horizon) == ("ab", "cd", 4)
    assert not admission.neutral_end
    assert list(admission.markers) == ["ab", "cd"]
    assert len(set(admission.keys)) == 3
    assert all(builder.store.has(key) for key in admission.keys)
    assert type(admission).from_plain(admission.to_plain()) == admission


def test_a_marker_is_compiled_once_and_finds_its_text(hmm: HMM, folder: Path) -> None:
    events: list[str] = []
    builder = _with_letters(hmm, folder)
    builder.observe = lambda event, value: events.append(event)
    for goal in ("formal", "mixed"):
        (key,) = builder.build(_params(goal, after="ab")).markers.values()
    assert events == ["build"] * 3  # two tables and one marker
    marker = builder.store.marker(key, builder.marker("ab"))
    assert marker.end_of_first([3, 1, 2, 1, 2]) == 3  # c a b
    with pytest.raises(InvalidInputError, match="markers need the tokenizer, which this server "):
        _builder(hmm, folder).admit(_params("formal", after="ab"))


def test_every_strength_and_every_level_has_its_own_table(hmm: HMM, folder: Path) -> None:
    builder = _builder(hmm, folder)
    settings: list[dict[str, Any]] = [
        {"strength": 1},
        {"strength": 2.5},
        {"level": "mild"},
        {"level": "medium"},
        {"level": "strong"},
    ]
    keys = [_keys(builder, "formal", **more)[0] for more in settings]
    assert len(set(keys)) == len(keys)
    assert _keys(builder, "formal") == [keys[3]]  # medium
    assert _keys(builder, "formal", transform=[5, -3]) == [keys[0]]
    assert _keys(builder, "formal", strength=2.5449) == [keys[1]]  # rounded
    assert _keys(builder, "formal", strength=2.6) != [keys[1]]


def test_equal_goals_have_one_table_in_whatever_order(hmm: HMM, folder: Path) -> None:
    builder = _builder(hmm, folder)
    goals = (
        "nontoxic & formal & mixed",
        "mixed & (formal & nontoxic)",
        "~~nontoxic & mixed & formal",
    )
    assert len({_keys(builder, goal)[0] for goal in goals}) == 1
    assert _keys(builder, "nontoxic & nontoxic") != _keys(builder, "nontoxic")
    pair = _keys(builder, ["formal", "nontoxic"], strength=[3, 2])
    assert _keys(builder, ["nontoxic", "formal"], strength=[2, 3]) == pair
    assert _keys(builder, ["nontoxic", "formal"], strength=[3, 2]) != pair
    assert len(_keys(builder, ["formal", "nontoxic"], transform=[3, 0])) == 2


def test_texts_that_are_given_again_count_once(hmm: HMM, folder: Path) -> None:
    builder = _with_letters(hmm, folder)
    once, often = (builder.admit(_params(must_contain=texts)) for texts in ("t", ["t"] * 64))
    assert once == often
    repeated = " & ".join(['contains("t")'] * 16)
    assert _keys(builder, repeated) == list(once.tables)


def test_keys_depend_on_the_hmm_the_horizon_the_ends_and_the_tokenizer(
    hmm: HMM, folder: Path
) -> None:
    ends = replace(hmm.config, eos_token_ids=(0, 1))
    builders = [
        _builder(hmm, folder),
        _builder(hmm, folder, horizon=HORIZON + 1),
        _builder(HMM.random(8, WORDS, eos_token_id=0, seed=1), folder),
        _builder(HMM(hmm.initial, hmm.transition, hmm.emission, ends), folder),
    ]
    assert len({_keys(builder, "formal")[0] for builder in builders}) == len(builders)
    other = TokenBytes([b"", *LETTERS.tokens[:0:-1]])
    spelled = [
        _builder(hmm, folder, load_token_bytes=lambda each=one: each) for one in (LETTERS, other)
    ]
    keys = [builder.admit(_params('contains("ab")', after="c")).keys for builder in spelled]
    assert not set(keys[0]) & set(keys[1])


def test_levels_come_from_the_file_or_from_the_hmm(
    hmm: HMM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = _builder(hmm, folder)
    (key,) = builder.build(_params("mixed")).tables
    assert builder.store.attribute(key).name.endswith("** 2")
    assert not caplog.messages
    builder.build(_params("kind"))
    assert "was not calibrated" in caplog.text


@pytest.mark.parametrize(
    ("goal", "more", "why"),
    [
        ("kind | formal", {}, "rewards, which | cannot combine"),
        ("kind & (formal | mixed)", {}, "combines rewards with a sum of 3 products"),
        ("~(kind & formal)", {}, "Negate single attributes"),
        ("kind", {"transform": [2, 0]}, "Steer toward it by strength or level"),
        ("~formal", {"strength": 2}, "~formal is a sum of 2 products"),
        (["formal", "mixed | nontoxic"], {"strength": 2}, "is a sum of 3 products"),
        (" & ".join(["(nontoxic | formal)"] * 6), {}, "16 are allowed"),
        (["nontoxic | formal", "nontoxic | mixed", "~formal"], {}, "18 terms"),
        ([" & ".join(["~formal"] * 3), "~(formal & mixed)"] * 2, {"transform": [1, 0]}, "20 terms"),
        (f'contains("{"abcdefghijklmnopqrstuvwxyz" * 3}")', {}, "79 states"),
        ('contains("abcdefgh") & contains("ijklmnop") & contains("qrstuvwx")', {}, "92 states"),
        ('~nontoxic & ~mixed & ~formal & (formal | contains("abcdefghijkl"))', {}, "all terms"),
    ],
)
def test_goals_that_are_too_large_are_refused_before_any_build(
    hmm: HMM, folder: Path, goal: str | list[str], more: dict[str, Any], why: str
) -> None:
    builder = _with_letters(hmm, folder)
    with pytest.raises(InvalidInputError, match=re.escape(why)):
        builder.build(_params(goal, **more))
    assert not list(builder.store.folder.iterdir())


def test_context_rewards_need_the_probe_of_their_lm(hmm: HMM, folder: Path) -> None:
    probes = [Probe.build(Head(torch.rand(WORDS, 8), scale=scale)) for scale in (1.0, 2.0)]
    random_context(probes[0], rank=20).save(folder / "moody.safetensors")
    for probe, why in ((None, "which needs a probe"), (probes[1], "but the probe is of")):
        with pytest.raises(InvalidInputError, match=why):
            _builder(hmm, folder, probe=probe).build(_params("moody & formal", strength=1))
    builder = _builder(hmm, folder, probe=probes[0])
    (key,) = builder.build(_params("moody & formal", strength=2)).tables
    size, loaded = builder.store.size(key), builder.store.lookahead(key, hmm, HORIZON)
    assert (size.terms, size.rank, size.has_evidence) == (1, 20, True)
    expected = Attribute.load(folder / "moody.safetensors").context
    assert expected is not None
    assert loaded.attribute.context is not None
    assert torch.equal(loaded.attribute.context.writers, 2 * expected.writers)
    for goals in (" & ".join(["moody"] * 4), ["moody & moody", "formal & ~moody & moody"]):
        with pytest.raises(InvalidInputError, match="80 components of context rewards, but 64"):
            builder.build(_params(goals, strength=1))


def test_texts_alone_are_one_term_however_many(hmm: HMM, folder: Path) -> None:
    builder = _with_letters(hmm, folder)
    texts = " & ".join(f'~contains("{letter}")' for letter in "abcdefghijkl")
    (key,) = builder.build(_params(texts)).tables
    assert builder.store.size(key).terms == 1


EXPRESSIONS = st.recursive(
    st.sampled_from(
        [
            "nontoxic",
            "formal",
            'contains("ab")',
            'contains("ba", "c")',
            'contains("ba", whole_word=True)',
            'contains("Ks", "c", whole_word=True, ignore_case=True)',
            "kind",
        ]
    ),
    lambda part: st.one_of(
        part.map(lambda a: f"~{a}"),
        st.tuples(part, st.sampled_from([" & ", " | "]), part).map(lambda abc: f"({''.join(abc)})"),
    ),
    max_leaves=5,
)


@given(EXPRESSIONS)
@example('(contains("ab") & ~contains("ab"))')
def test_bounds_are_not_below_the_sizes(expression: str) -> None:
    """What passes the bounds can be combined, and has no more terms and states than are allowed."""
    weights = torch.rand(2, WORDS, generator=torch.Generator().manual_seed(0))
    loaded = dict(zip(("nontoxic", "formal"), map(Attribute.from_weights, weights), strict=True))
    loaded["kind"] = Attribute.from_rewards(weights[0])
    params = _params(expression, strength=1)
    try:
        require_small(params.goals, loaded.__getitem__)
    except InvalidInputError:
        return
    hmm = HMM.random(2, WORDS, eos_token_id=0, seed=0)
    try:
        goals = params.goals[0].goals(loaded, lambda one: LETTERS.contains(one))
    except InvalidInputError as error:
        if "The goals contradict each other" not in str(error):
            raise
        return
    ((attribute, _),) = Compiler(hmm, HORIZON).merge(goals)
    assert len(attribute.terms) <= 16
    assert attribute.terms.num_states <= 64
    assert attribute.is_never_true or not attribute.evidence or attribute.terms.is_product


def test_the_bound_of_states_is_met_by_texts_that_share_nothing(hmm: HMM, folder: Path) -> None:
    builder = _with_letters(hmm, folder)
    (key,) = builder.build(_params(must_contain=["abcd", "efgh"], must_not_contain="xyz")).tables
    # 4 sets of texts that have occurred, with 2 inner states of the forbidden text in each, and
    # 3 of a required text in half of them; and one state after the forbidden text.
    assert builder.store.attribute(key).terms.num_states == 4 * (1 + 2) + 2 * 6 + 1


def test_a_replaced_attribute_is_another(hmm: HMM, folder: Path) -> None:
    builder = _builder(hmm, folder)
    before = builder.build(_params("formal"))
    assert builder.build(_params("formal")) == before
    _write(folder, "formal", 7)
    (after,) = builder.build(_params("formal")).tables
    weights = [
        builder.store.lookahead(key, hmm, HORIZON).token_weights()
        for key in (before.tables[0], after)
    ]
    assert not torch.equal(*weights)


def test_a_broken_file_is_refused_and_named_in_the_log(
    hmm: HMM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "broken.safetensors").write_bytes(b"nothing of the kind")
    builder = _builder(hmm, folder)
    with pytest.raises(InvalidInputError, match=r"'broken' cannot be used.* damaged") as refusal:
        builder.build(_params("broken"))
    (record,) = caplog.records
    assert record.getMessage() == f"The attribute 'broken' is refused: {refusal.value.__cause__}"
    assert record.__dict__["attribute"] == "broken"  # for logs in JSON
    assert builder.build(_params("formal"))


@pytest.mark.parametrize("name", ["../formal", "/etc/passwd", "..", "a/../formal", "x" * 300, "\0"])
def test_names_do_not_leave_the_folder(hmm: HMM, folder: Path, name: str) -> None:
    (folder / "inner").mkdir()
    with pytest.raises(InvalidInputError, match="no attribute"):
        _builder(hmm, folder / "inner").admit(_params(f'"{name}"'))


def test_a_misspelt_name_is_guessed(hmm: HMM, folder: Path) -> None:
    """Only among names of about the same length: a folder may have thousands."""
    builder = _builder(hmm, folder)
    with pytest.raises(InvalidInputError, match="Did you mean nontoxic"):
        builder.admit(_params("nontoxc"))
    for length in (13, 14):
        _write(folder, "a" * length, 0)
        with pytest.raises(InvalidInputError, match="Did you mean" if length == 13 else "Check"):
            builder.admit(_params("a" * 10))
        (folder / f"{'a' * length}.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"called b{100}\. Check the spelling\.$"):
        builder.admit(_params("b" * 101))
    folder.rename(folder.with_name("gone"))
    with pytest.raises(InvalidInputError, match="Check the spelling"):
        builder.admit(_params("nontoxc"))


def test_the_horizon_is_at_most_that_of_the_server(hmm: HMM, folder: Path) -> None:
    _builder(hmm, folder).admit(_params("formal", horizon=HORIZON))
    with pytest.raises(InvalidInputError, match=f"at most {HORIZON} tokens"):
        _builder(hmm, folder).admit(_params("formal", horizon=HORIZON + 1))


def test_an_attribute_of_another_tokenizer_is_refused(hmm: HMM, folder: Path) -> None:
    config = replace(hmm.config, tokenizer_fingerprint="ours")
    hmm = HMM(hmm.initial, hmm.transition, hmm.emission, config)
    weights = torch.rand(WORDS)
    for name in ("ours", "theirs"):
        attribute = Attribute.from_weights(weights, name=name, tokenizer_fingerprint=name)
        attribute.save(folder / f"{name}.safetensors")
    builder = _builder(hmm, folder)
    builder.build(_params("ours", strength=1))
    with pytest.raises(InvalidInputError, match="'theirs' cannot be used"):
        builder.build(_params("theirs"))


def test_threads_build_a_table_once(hmm: HMM, folder: Path) -> None:
    events: list[str] = []
    builder = _builder(hmm, folder, observe=lambda event, value: events.append(event))
    threads = [Thread(target=builder.build, args=(_params("nontoxic & formal"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events == ["build"]


def test_a_tokenizer_that_fails_is_asked_once(
    hmm: HMM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for error, why in (
        (InvalidInputError("It spells nothing."), "cannot be used: It spells nothing"),
        (OSError("no such repository"), "cannot be used: its log says why"),
    ):
        tried: list[int] = []

        def failing(error: Exception = error, tried: list[int] = tried) -> TokenBytes:
            tried.append(1)
            raise error

        builder = _builder(hmm, folder, load_token_bytes=failing)
        builder.load_tokenizer()
        for _ in range(3):
            with pytest.raises(InvalidInputError, match=why):
                builder.admit(_params('contains("ab")'))
        assert tried == [1]
    assert "no such repository" in caplog.text
