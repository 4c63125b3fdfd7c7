"""Test attribute files."""

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

from foretrace.attribute import Attribute, AttributeConfig, AttributeStore
from foretrace.attribute.terms import Terms
from foretrace.errors import InvalidFileError, InvalidInputError, TokenizerMismatchError

WEIGHTS = torch.tensor([0.5, 1.0, 0.0, 0.9])
TEXTS = [[0, 1], [2], [3, 3, 1], []]


def some(name: str = "a", fingerprint: str | None = "sha256:a") -> Attribute:
    return Attribute.from_weights(WEIGHTS, name=name, tokenizer_fingerprint=fingerprint)


def test_a_saved_attribute_is_loaded_unchanged(tmp_path: Path) -> None:
    occurs = Attribute.contains("ab", [b"a", b"b", b"c", b"ab"], tokenizer_fingerprint="sha256:a")
    for attribute in (some(), ~some(), some() | ~some("b"), some() & occurs, ~occurs):
        attribute.save(tmp_path / "file")
        loaded = Attribute.load(tmp_path / "file")
        assert loaded.config == attribute.config
        assert torch.equal(loaded.probability(TEXTS), attribute.probability(TEXTS))


def many() -> list[Attribute]:
    """Return attributes whose contents differ."""
    other = Attribute.from_weights([0.5, 1.0, 0.0, 0.8])
    kind = Attribute.from_rewards([0.5, 0.0, -1.5, 0.25], bias=-0.125)
    ab, abc = (Attribute.contains(text, [b"a", b"b", b"c", b"ab"]) for text in ("ab", "abc"))
    tokens = Attribute.from_weights([1.0, 0.5, 0.0, 0.9])
    single = [some(), ~some(), other, tokens, kind, ~kind, kind**2, ab, ~ab, abc]
    return [*single, some() | other, some() & ab, some() & kind, kind & kind, kind & kind**2]


def test_the_checksum_tells_contents_apart_and_is_the_same_in_every_process(tmp_path: Path) -> None:
    attributes = [
        *many(),
        Attribute.from_rewards([0.5, 0, -1.5, 0.25], bias=-0.125, first_only=False),
    ]
    checksums = [attribute.checksum for attribute in attributes]
    assert len(set(checksums)) == len(attributes)
    for number, attribute in enumerate(attributes):
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
    wide = Attribute(Terms(torch.ones(1), tokens.long(), log_weights.double().neg().neg()))
    half = Attribute(replace(one.terms, log_weights=log_weights.bfloat16()))
    assert one.checksum == wide.checksum == half.checksum
    assert (~~one).checksum == one.checksum


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


@pytest.mark.parametrize("once", [True, False])
def test_saved_evidence_is_loaded_unchanged(tmp_path: Path, once: bool) -> None:
    rewards = torch.tensor([0.5, 0.0, -1.5, 0.25])
    kind = Attribute.from_rewards(rewards, bias=-0.125, first_only=once, name="kind")
    none = Attribute.from_rewards(torch.zeros(4), bias=1.0)
    for attribute in (kind, ~kind, kind**2.5, some() & kind, kind & none & ~kind, none):
        attribute.save(tmp_path / "file")
        loaded = Attribute.load(tmp_path / "file")
        assert loaded.config == attribute.config
        assert [one.first_only for one in loaded.evidence] == [
            one.first_only for one in attribute.evidence
        ]
        assert torch.equal(loaded.probability(TEXTS), attribute.probability(TEXTS))


def evidence(**changed: Tensor) -> dict[str, Tensor]:
    """Return the tensors of two pieces of evidence, with some replaced."""
    return {
        "evidence_bias": torch.tensor([0.5, -1.0], dtype=torch.float64),
        "evidence_once": torch.tensor([1, 0], dtype=torch.uint8),
        "evidence_sizes": torch.tensor([2, 1]),
        "evidence_tokens": torch.tensor([0, 3, 1], dtype=torch.int32),
        "evidence_rewards": torch.tensor([0.5, -1.5, 2.0]),
        **{f"evidence_{name}": tensor for name, tensor in changed.items()},
    }


def test_evidence_of_a_file_is_split_by_its_sizes(tmp_path: Path) -> None:
    write_file(tmp_path / "file", evidence(), {"format_version": 3})
    first, second = Attribute.load(tmp_path / "file").evidence
    assert (first.tokens.tolist(), first.bias, first.first_only) == ([0, 3], 0.5, True)
    assert (second.rewards.tolist(), second.bias, second.first_only) == ([2.0], -1.0, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"bias": torch.tensor([float("nan"), 0.0], dtype=torch.float64)},
        {"bias": torch.zeros(1, dtype=torch.float64)},
        {"once": torch.ones(1, dtype=torch.uint8)},
        {"once": torch.tensor([0.5, 0.5])},
        {"sizes": torch.tensor([2, 2])},
        {"sizes": torch.tensor([4, -1])},
        {"sizes": torch.tensor([3])},
        {"tokens": torch.tensor([3, 0, 1], dtype=torch.int32)},
        {"tokens": torch.tensor([3, 3, 1], dtype=torch.int32)},
        {"tokens": torch.tensor([-1, 3, 1], dtype=torch.int32)},
        {"tokens": torch.tensor([0, 2**32 + 3, 1])},
        {"tokens": torch.tensor([0.0, 3.0, 1.0])},
        {"rewards": torch.tensor([0.5, float("inf"), 2.0])},
        {"rewards": torch.tensor([0.5, 1.0])},
        {"rewards": torch.tensor([1, 2, 3])},
    ],
)
def test_damaged_evidence_is_refused(tmp_path: Path, changed: dict[str, Tensor]) -> None:
    write_file(tmp_path / "file", evidence(**changed), {"format_version": 3})
    with pytest.raises(InvalidFileError, match="file"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize("name", ["bias", "once", "sizes", "tokens", "rewards"])
def test_missing_tensors_of_evidence_are_refused(tmp_path: Path, name: str) -> None:
    tensors = evidence()
    del tensors[f"evidence_{name}"]
    write_file(tmp_path / "file", tensors, {"format_version": 3})
    with pytest.raises(InvalidFileError, match="file"):
        Attribute.load(tmp_path / "file")


def damaged(path: Path, kind: str) -> None:
    """Write a file that is damaged in one of several ways."""
    tensors = {
        "coefficients": torch.ones(1, dtype=torch.float64),
        "tokens": torch.tensor([1, 2], dtype=torch.int32),
        "log_weights": torch.zeros(1, 2),
    }
    header = {"format_version": 1, "name": "a"}
    if kind == "cut short":
        some().save(path)
        path.write_bytes(path.read_bytes()[:-8])
        return
    if kind == "other tensors":
        del tensors["tokens"]
    elif kind == "unsorted":
        tensors["tokens"] = torch.tensor([2, 1], dtype=torch.int32)
    elif kind == "weights above 1":
        tensors["log_weights"] += 1.0
    elif kind == "not a number":
        tensors["log_weights"] += float("nan")
    elif kind == "no dimension":
        tensors["coefficients"] = torch.tensor(1.0, dtype=torch.float64)
    elif kind == "other shape":
        tensors["log_weights"] = torch.zeros(2, 2)
    elif kind == "newer":
        header["format_version"] = 4
    elif kind in ("no automaton", "invalid automaton"):
        header["format_version"] = 2
        if kind == "invalid automaton":
            none = torch.zeros(0, dtype=torch.int32)
            tensors |= {"automaton_tokens": none, "automaton_classes": none.clone()}
            tensors |= {"automaton_moves": torch.full((2, 1), 2, dtype=torch.int32)}
            tensors |= {"finals": torch.ones(1, 2, dtype=torch.float64)}
    text = "[]" if kind == "header of a list" else json.dumps(header)
    save_file(tensors, path, {"other" if kind == "no header" else "foretrace_attribute": text})


@pytest.mark.parametrize(
    "kind",
    [
        "cut short",
        "other tensors",
        "unsorted",
        "weights above 1",
        "not a number",
        "other shape",
        "no dimension",
        "newer",
        "no automaton",
        "invalid automaton",
        "no header",
        "header of a list",
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str) -> None:
    damaged(tmp_path / "file", kind)
    with pytest.raises(InvalidFileError, match="file"):
        Attribute.load(tmp_path / "file")


def write_file(
    path: Path,
    changed: dict[str, Tensor] | None = None,
    header: dict[str, object] | None = None,
    text: str | None = None,
) -> None:
    """Write an attribute file of one term, with some tensors or header fields replaced."""
    tensors = {
        "coefficients": torch.ones(1, dtype=torch.float64),
        "tokens": torch.tensor([1, 2], dtype=torch.int32),
        "log_weights": torch.tensor([[-1.0, -2.0]]),
    }
    content = {"format_version": 1, "name": "a", **(header or {})}
    save_file(tensors | (changed or {}), path, {"foretrace_attribute": text or json.dumps(content)})


def automaton(finals: list[list[float]]) -> dict[str, Tensor]:
    """Return the tensors of an automaton that moves to its last state at token 1."""
    states = len(finals[0])
    return {
        "automaton_tokens": torch.tensor([1], dtype=torch.int32),
        "automaton_classes": torch.tensor([1], dtype=torch.int32),
        "automaton_moves": torch.tensor([[q, states - 1] for q in range(states)]).int(),
        "finals": torch.tensor(finals, dtype=torch.float64),
    }


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
    weighted = {} if finals is None else automaton(finals)
    terms = {
        "coefficients": torch.tensor(coefficients, dtype=torch.float64),
        "log_weights": torch.tensor(log_weights),
    }
    write_file(tmp_path / "file", terms | weighted, {"format_version": 1 if finals is None else 2})
    with pytest.raises(InvalidFileError, match="probability"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize(
    "changed",
    [
        {"log_weights": torch.tensor([[-1.0, -2.0]], dtype=torch.complex64)},
        {"log_weights": torch.tensor([[-1.0, -2.0]]).to(torch.float8_e4m3fn)},
        {"log_weights": torch.tensor([[-1, -2]])},
        {"log_weights": torch.tensor([[False, False]])},
        {"coefficients": torch.ones(1, dtype=torch.complex64)},
        {"coefficients": torch.ones(1).to(torch.float8_e5m2)},
        {"coefficients": torch.ones(1, dtype=torch.bool)},
        {"tokens": torch.tensor([1.0, 2.0])},
        {"tokens": torch.tensor([1.0, 2.0], dtype=torch.complex64)},
        {"tokens": torch.tensor([False, True])},
        {"tokens": torch.tensor([1, 2**32 + 2])},
        {"tokens": torch.tensor([1, 2], dtype=torch.uint64)},
    ],
)
def test_tensors_of_another_type_are_refused(tmp_path: Path, changed: dict[str, Tensor]) -> None:
    write_file(tmp_path / "file", changed)
    with pytest.raises(InvalidFileError, match=f"file.*{next(iter(changed))}"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize("name", ["automaton_tokens", "automaton_classes", "automaton_moves"])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64, torch.int64])
def test_an_automaton_of_another_type_is_refused(
    tmp_path: Path, name: str, kind: torch.dtype
) -> None:
    tensors = automaton([[0.0, 1.0]])
    tensors[name] = tensors[name].to(kind)
    if kind is torch.int64:
        tensors[name] += 2**32  # the same number after truncation to int32
    write_file(tmp_path / "file", tensors, {"format_version": 2})
    with pytest.raises(InvalidFileError, match=f"file.*{name}"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize("kind", [torch.complex64, torch.float8_e4m3fn, torch.int32])
def test_final_weights_of_another_type_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    tensors = automaton([[0.0, 1.0]])
    tensors["finals"] = tensors["finals"].to(kind)
    write_file(tmp_path / "file", tensors, {"format_version": 2})
    with pytest.raises(InvalidFileError, match=r"file.*finals"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "4"),
        ("vocab_size", 4.0),
        ("vocab_size", True),
        ("vocab_size", -1),
        ("vocab_size", [4]),
        ("name", 7),
        ("name", None),
        ("name", ["a"]),
        ("name", "\ud800"),
        ("tokenizer_fingerprint", 7),
        ("tokenizer_fingerprint", {}),
        ("fit", []),
        ("fit", "text"),
        ("fit", None),
    ],
)
def test_invalid_values_in_the_header_are_refused(tmp_path: Path, key: str, value: object) -> None:
    write_file(tmp_path / "file", header={key: value})
    with pytest.raises(InvalidFileError, match=f"file.*{key}"):
        Attribute.load(tmp_path / "file")


@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_a_deeply_nested_header_is_refused(tmp_path: Path, left: str, right: str) -> None:
    nested = left * 100_000 + "1" + right * 100_000
    for text in (nested, f'{{"format_version": 1, "name": "a", "fit": {{"a": {nested}}}}}'):
        write_file(tmp_path / "file", text=text)
        with pytest.raises(InvalidFileError, match="file"):
            Attribute.load(tmp_path / "file")


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


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="no file"):
        Attribute.load(tmp_path / "none")
