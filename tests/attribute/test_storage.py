"""Test attribute files."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from foretrace.attribute import Attribute, AttributeConfig, AttributeStore, ContextReward
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidFileError, InvalidInputError, TokenizerMismatchError

WEIGHTS = torch.tensor([0.5, 1.0, 0.0, 0.9])
TEXTS = [[0, 1], [2], [3, 3, 1], []]


def some(name: str = "a", fingerprint: str | None = "sha256:a") -> Attribute:
    return Attribute.from_weights(WEIGHTS, name=name, tokenizer_fingerprint=fingerprint)


def test_a_saved_attribute_is_loaded_unchanged(tmp_path: Path) -> None:
    none = Attribute.from_rewards(torch.zeros(4), bias=1.0)
    for attribute in (*many(), some() | ~some("b"), some() & none, none):
        attribute.save(tmp_path / "file")
        loaded = Attribute.load(tmp_path / "file")
        assert loaded.config == attribute.config
        assert torch.equal(loaded.probability(TEXTS), attribute.probability(TEXTS))
        once = [[one.first_only for one in each.evidence] for each in (loaded, attribute)]
        assert once[0] == once[1]
        assert loaded.checksum == attribute.checksum


def test_only_files_with_a_context_reward_have_the_version_that_adds_it(tmp_path: Path) -> None:
    rank, width = 16, 576
    reward = ContextReward(torch.randn(rank, width + 1), torch.randn(rank, width), "sha256:head")
    kind = Attribute.from_rewards([0.5, 0.0])
    versions = []
    for attribute in (some(), kind, kind.with_context(reward)):
        attribute.save(tmp_path / "file")
        content = (tmp_path / "file").read_bytes()
        versions.append(content.split(b'\\"format_version\\": ')[1][:1])
    assert versions == [b"1", b"3", b"4"]
    assert len(content) < 100_000


def many() -> list[Attribute]:
    """Return attributes whose contents differ."""
    other, tokens = (Attribute.from_weights(row) for row in ([0.5, 1, 0, 0.8], [1, 0.5, 0, 0.9]))
    kind, every = (
        Attribute.from_rewards([0.5, 0.0, -1.5, 0.25], bias=-0.125, first_only=once)
        for once in (True, False)
    )
    ab, abc = (Attribute.contains(text, [b"a", b"b", b"c", b"ab"]) for text in ("ab", "abc"))
    single = [some(), ~some(), other, tokens, kind, every, ~kind, kind**2, ab, ~ab, abc]
    reward = ContextReward(torch.ones(2, 4), torch.tensor([[1.0, 2.0, 3.0]] * 2), "sha256:head")
    of_other_lm, moody = replace(reward, fingerprint="sha256:other"), kind.with_context(reward)
    single += [moody, ~moody, moody**2, moody & ab, kind.with_context(of_other_lm)]
    single += [kind.with_context(replace(reward, readers=torch.zeros(2, 4)))]
    single += [Attribute(Terms.one(), context=reward)]
    return [*single, some() | other, some() & ab, some() & kind, kind & kind, kind & kind**2]


def test_the_checksum_tells_contents_apart_and_is_the_same_in_every_process(tmp_path: Path) -> None:
    checksums = [attribute.checksum for attribute in many()]
    assert len(set(checksums)) == len(checksums)
    for number, attribute in enumerate(many()):
        attribute.save(tmp_path / f"{number:02}")
        assert attribute.renamed("other").checksum == attribute.checksum
    script = (
        "import sys; from pathlib import Path; from foretrace.attribute import Attribute\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()): print(Attribute.load(path).checksum)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert loaded == checksums


def test_the_checksum_depends_on_values_and_not_on_types() -> None:
    tokens = torch.tensor([0, 2], dtype=torch.int32)
    log_weights = torch.tensor([[-0.5, 0.0]])
    one = Attribute(Terms(torch.ones(1, dtype=torch.float64), tokens, log_weights))
    wide = Attribute(Terms(torch.ones(1), tokens.long(), torch.tensor([[-0.5, -0.0]]).double()))
    half = Attribute(replace(one.terms, log_weights=log_weights.bfloat16()))
    assert one.checksum == wide.checksum == half.checksum


def test_the_complement_of_a_loaded_complement_is_the_attribute(tmp_path: Path) -> None:
    (~some()).save(tmp_path / "file")
    again = ~Attribute.load(tmp_path / "file")
    assert torch.equal(again.terms.log_weights, some().terms.log_weights.double())
    assert again.terms.coefficients.tolist() == [1.0]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    some().save(tmp_path / "file")
    with pytest.raises(TokenizerMismatchError, match="attribute 'a'"):
        Attribute.load(tmp_path / "file", tokenizer_fingerprint="sha256:b")
    AttributeStore(tmp_path).add(some())
    with pytest.raises(TokenizerMismatchError):
        AttributeStore(tmp_path, tokenizer_fingerprint="sha256:b")["a"]


def write_file(
    path: Path,
    changed: dict[str, Any] | None = None,
    header: dict[str, object] | None = None,
    text: str | None = None,
) -> None:
    """Write an attribute file of one term, with some tensors or header fields replaced.

    A tensor that is replaced by None is left out.
    """
    tensors = {
        "coefficients": torch.ones(1, dtype=torch.float64),
        "tokens": torch.tensor([1, 2], dtype=torch.int32),
        "log_weights": torch.tensor([[-1.0, -2.0]]),
    } | (changed or {})
    content = {"format_version": 1, "name": "a", **(header or {})}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {"foretrace_attribute": text or json.dumps(content)})


def evidence(**changed: Tensor | None) -> dict[str, Tensor | None]:
    """Return the tensors of two pieces of evidence, with some replaced."""
    return {
        "evidence_bias": torch.tensor([0.5, -1.0], dtype=torch.float64),
        "evidence_once": torch.tensor([1, 0], dtype=torch.uint8),
        "evidence_sizes": torch.tensor([2, 1]),
        "evidence_tokens": torch.tensor([0, 3, 1], dtype=torch.int32),
        "evidence_rewards": torch.tensor([0.5, -1.5, 2.0]),
        **{f"evidence_{name}": tensor for name, tensor in changed.items()},
    }


def context(**changed: Tensor | None) -> dict[str, Tensor | None]:
    """Return the tensors of a context reward of rank 2, with some replaced."""
    return {
        "context_readers": torch.ones(2, 4),
        "context_writers": torch.ones(2, 3),
        **{f"context_{name}": tensor for name, tensor in changed.items()},
    }


def automaton(weights: Any = ((0.0, 1.0),), **changed: Any) -> dict[str, Tensor | None]:
    """Return the tensors of an automaton that moves to its last state at token 1."""
    states = len(weights[0])
    return {
        "automaton_tokens": torch.tensor([1], dtype=torch.int32),
        "automaton_classes": torch.tensor([1], dtype=torch.int32),
        "automaton_moves": torch.tensor([[q, states - 1] for q in range(states)]).int(),
        "finals": torch.tensor(weights, dtype=torch.float64),
        **{name if name == "finals" else f"automaton_{name}": t for name, t in changed.items()},
    }


def test_rewards_of_all_tokens_take_two_bytes_each(tmp_path: Path) -> None:
    rewards = torch.linspace(-2, 2, 10_000).half().float()
    dense = Attribute.from_rewards(rewards, name="dense")
    both = dense & Attribute.from_rewards(0.3 * torch.eye(10_000)[5], name="sparse")
    for attribute, size in ((dense, 21_000), (both, 22_000)):
        path = tmp_path / "attribute.safetensors"
        attribute.save(path)
        assert path.stat().st_size < size
        loaded = Attribute.load(path)
        assert loaded.checksum == attribute.checksum
        for one, other in zip(loaded.evidence, attribute.evidence, strict=True):
            torch.testing.assert_close(one.rewards, other.rewards.to(one.rewards), rtol=0, atol=0)
            assert torch.equal(one.tokens, other.tokens)


def test_evidence_of_a_file_is_split_by_its_sizes(tmp_path: Path) -> None:
    write_file(tmp_path / "file", evidence(), {"format_version": 3})
    first, second = Attribute.load(tmp_path / "file").evidence
    assert (first.tokens.tolist(), first.bias, first.first_only) == ([0, 3], 0.5, True)
    assert (second.rewards.tolist(), second.bias, second.first_only) == ([2.0], -1.0, False)


NAN, INF = float("nan"), float("inf")
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "changed",
    [
        evidence(bias=torch.tensor([NAN, 0.0], dtype=torch.float64)),
        evidence(bias=torch.zeros(1, dtype=torch.float64)),
        evidence(once=torch.ones(1, dtype=torch.uint8)),
        evidence(once=torch.tensor([0.5, 0.5])),
        evidence(sizes=torch.tensor([2, 2])),
        evidence(sizes=torch.tensor([4, -1])),
        evidence(sizes=torch.tensor([3])),
        evidence(tokens=torch.tensor([3, 0, 1], dtype=torch.int32)),
        evidence(tokens=torch.tensor([3, 3, 1], dtype=torch.int32)),
        evidence(tokens=torch.tensor([-1, 3, 1], dtype=torch.int32)),
        evidence(tokens=torch.tensor([0, 2**32 + 3, 1])),
        evidence(tokens=torch.tensor([0.0, 3.0, 1.0])),
        evidence(rewards=torch.tensor([0.5, INF, 2.0])),
        evidence(rewards=torch.tensor([0.5, 1.0])),
        evidence(rewards=torch.tensor([1, 2, 3])),
        *(evidence(**{name: None}) for name in ("bias", "once", "sizes", "tokens", "rewards")),
        context(readers=None),
        context(writers=None),
        context(readers=torch.ones(2, 3)),
        context(readers=torch.ones(2, 4, dtype=torch.int32)),
        context(writers=torch.full((2, 3), NAN)),
        context(writers=torch.ones(3)),
        context(readers=torch.ones(0, 4), writers=torch.ones(0, 3)),
        automaton(tokens=None),
        automaton(moves=torch.full((2, 1), 2, dtype=torch.int32)),
        *(
            automaton(**{name: torch.ones(1).to(dtype)})
            for name in ("tokens", "classes", "moves")
            for dtype in (torch.float32, FLOAT8)
        ),
        automaton(tokens=torch.tensor([2**32 + 1])),  # 1 after truncation to int32
        automaton(classes=torch.tensor([2**32 + 1])),
        automaton(moves=torch.tensor([[0, 1], [1, 2**32 + 1]])),
        *(automaton(finals=torch.ones(1, 2).to(d)) for d in (FLOAT8, torch.int32)),
        {"tokens": None},
        {"tokens": torch.tensor([2, 1], dtype=torch.int32)},
        {"tokens": torch.tensor([1.0, 2.0])},
        {"tokens": torch.tensor([1.0, 2.0]).to(FLOAT8)},
        {"tokens": torch.tensor([False, True])},
        {"tokens": torch.tensor([1, 2**32 + 2])},
        {"tokens": torch.tensor([1, 2], dtype=torch.uint64)},
        {"log_weights": torch.tensor([[1.0, 1.0]])},
        {"log_weights": torch.tensor([[NAN, NAN]])},
        {"log_weights": torch.zeros(2, 2)},
        {"log_weights": torch.tensor([[-1.0, -2.0]]).to(FLOAT8)},
        {"log_weights": torch.tensor([[-1, -2]])},
        {"log_weights": torch.tensor([[False, False]])},
        {"coefficients": torch.tensor(1.0, dtype=torch.float64)},
        {"coefficients": torch.ones(1).to(torch.float8_e5m2)},
        {"coefficients": torch.ones(1, dtype=torch.bool)},
    ],
)
def test_damaged_tensors_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    version = 3 if "evidence_once" in changed else 2 if "finals" in changed else 1
    version = 4 if "context_writers" in changed else version
    header = {"format_version": version, "context_fingerprint": "sha256:head"}
    write_file(tmp_path / "file", changed, header)
    with pytest.raises(InvalidFileError, match="file"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("coefficients", "log_weights", "finals"),
    [
        ([-1.0], [[-1.0, -2.0]], None),
        ([-1e-12], [[-1.0, -2.0]], None),
        ([-1.0, -0.5], [[-1.0, -2.0], [0.0, 0.0]], None),
        ([1.5], [[-1.0, -2.0]], None),
        ([0.75, 0.75], [[-1.0, -2.0], [-2.0, -1.0]], None),
        ([0.5, -1.0], [[0.0, 0.0], [-1.0, -2.0]], None),  # the empty text: -0.5
        ([1.0, -1.0], [[-1.0, 0.0], [0.0, -1.0]], None),  # token 1: w - 1
        ([1.0, -0.5], [[-0.7, 0.0], [-0.1, 0.0]], None),  # token 1 repeated
        ([1e200, -1e200], [[-1.0, 0.0], [-1.0, 0.0]], None),  # outside float32
        ([1e308, 1e308, -1e308, -1e308], [[-1.0, 0.0]] * 4, None),
        ([-1.0], [[-1.0, -2.0]], [[0.0, 1.0]]),  # 0 for the empty text
        ([0.5, -1.0], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 1.0]]),
    ],
)
def test_terms_that_are_not_a_probability_are_refused(
    tmp_path: Path,
    coefficients: list[float],
    log_weights: list[list[float]],
    finals: list[list[float]] | None,
) -> None:
    terms = {
        "coefficients": torch.tensor(coefficients, dtype=torch.float64),
        "log_weights": torch.tensor(log_weights),
        **({} if finals is None else automaton(finals)),
    }
    write_file(tmp_path / "file", terms, {"format_version": 1 if finals is None else 2})
    with pytest.raises(InvalidFileError, match="probability"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(["vocab_size"], ["4", 4.0, True, -1, [4]]),
        *itertools.product(["name"], [7, None, ["a"], "\ud800"]),
        *itertools.product(["tokenizer_fingerprint"], [7, {}]),
        *itertools.product(["fit"], [[], "text", None]),
        *itertools.product(["levels", "negation_levels"], [[], {"mild": 0.0}, {"mild": "1"}]),
        ("format_version", 5),
    ],
)
def test_invalid_values_in_the_header_are_refused(tmp_path: Path, key: str, value: object) -> None:
    write_file(tmp_path / "file", header={key: value})
    named = key.removeprefix("negation_").replace("_", ".")
    with pytest.raises(InvalidFileError, match=f"file.*{named}"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize("fingerprint", [None, 7, ""])
def test_a_context_reward_without_its_lm_is_refused(tmp_path: Path, fingerprint: object) -> None:
    header = {"format_version": 4, "context_fingerprint": fingerprint}
    write_file(tmp_path / "file", context(), header)
    with pytest.raises(InvalidFileError, match="fingerprint of the LM's head"):
        Attribute.load(tmp_path / "file")


DEEP = ['{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 100_000 + "1" + "]" * 100_000]
DEEP += [f'{{"format_version": 1, "name": "a", "fit": {{"a": {deep}}}}}' for deep in DEEP]


@pytest.mark.parametrize("text", [*DEEP, "[]", "{}"], ids=len)
def test_another_header_is_refused(tmp_path: Path, text: str) -> None:
    write_file(tmp_path / "file", text=text)
    with pytest.raises(InvalidFileError, match="file"):
        Attribute.load(tmp_path / "file")


def test_other_files_are_refused(tmp_path: Path) -> None:
    some().save(tmp_path / "file")
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-8])
    save_file({"tokens": torch.ones(1)}, tmp_path / "other", {"other": "{}"})
    for name in ("file", "other", "missing"):
        with pytest.raises(InvalidFileError, match=name):
            Attribute.load(tmp_path / name)


def test_the_config_checks_its_values() -> None:
    given: list[Any] = [4, np.int64(4), None]
    sizes = [AttributeConfig(vocab_size=size).vocab_size for size in given]
    assert sizes == [4, 4, None]
    assert type(sizes[1]) is int
    with pytest.raises(InvalidInputError, match="vocab_size"):
        AttributeConfig(vocab_size="4")  # type: ignore[arg-type]


SPELLED = [b"a", b"b", b"c", b"ab"]
weights = st.lists(st.sampled_from([0.0, 1.0, 1e-38, 0.3, 0.7, 1 - 2**-24]), min_size=4, max_size=4)


@st.composite
def bases(draw: st.DrawFn) -> Attribute:
    """Draw an attribute of one product, a mixture of products, or an automaton."""
    kind = draw(st.sampled_from(["product", "mixture", "occurrence"]))
    if kind == "occurrence":
        return Attribute.contains(draw(st.sampled_from(["ab", "a", "ca"])), SPELLED)
    if kind == "product":
        return Attribute.from_weights(torch.tensor(draw(weights)))
    table = torch.tensor([draw(weights) for _ in range(3)])
    shares = torch.tensor([draw(st.floats(0.01, 1.0)) for _ in range(3)], dtype=torch.float64)
    tokens = torch.arange(4, dtype=torch.int32)
    return Attribute(Terms(shares / shares.sum(), tokens, table.log()), AttributeConfig("m", 4))


combinations = st.recursive(
    bases(),
    lambda inner: (
        inner.map(lambda a: ~a)
        | st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1])
        | st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1])
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(combinations)
def test_every_combination_of_attributes_can_be_loaded(
    tmp_path_factory: pytest.TempPathFactory, attribute: Attribute
) -> None:
    path = tmp_path_factory.getbasetemp() / "combination"
    attribute.save(path)
    loaded = Attribute.load(path)
    assert torch.equal(loaded.probability(TEXTS), attribute.probability(TEXTS))


def test_an_attribute_many_times_over_can_be_loaded(tmp_path: Path) -> None:
    """Coefficients are binomial: their rounding errors grow with them."""
    goal = some()
    for count in range(2, 41):
        goal = goal | some()
        if count in (10, 20, 40):
            goal.save(tmp_path / "file")
            assert len(Attribute.load(tmp_path / "file").terms) == count


def test_rounding_errors_leave_no_terms() -> None:
    """A mixture's coefficients sum to 1 up to rounding; its complement without weights is 0."""
    for seed in range(100):
        shares = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        none = torch.zeros(0, dtype=torch.int32)
        mixture = Attribute(Terms(shares / shares.sum(), none, torch.zeros(3, 0)))
        assert len((~mixture).terms) == 0
