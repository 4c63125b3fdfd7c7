"""Attributes on disk, one by one and in a store."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from foretrace.attribute import Attribute, AttributeStore, parse
from foretrace.errors import InvalidFileError, InvalidInputError, TokenizerMismatchError

WEIGHTS = torch.tensor([0.5, 1.0, 0.0, 0.9])
TEXTS = [[0, 1], [2], [3, 3, 1], []]


def some(name: str = "a", fingerprint: str | None = "sha256:a") -> Attribute:
    return Attribute.from_weights(WEIGHTS, name=name, tokenizer_fingerprint=fingerprint)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    occurs = Attribute.occurrence("ab", [b"a", b"b", b"c", b"ab"], tokenizer_fingerprint="sha256:a")
    for attribute in (some(), ~some(), some() | ~some("b"), some() & occurs, ~occurs):
        attribute.save(tmp_path / "file")
        loaded = Attribute.load(tmp_path / "file")
        assert loaded.config == attribute.config
        assert torch.equal(loaded.probability(TEXTS), attribute.probability(TEXTS))


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


def damaged(path: Path, kind: str) -> None:
    """Write a file that is no attribute, in one way or another."""
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
    elif kind == "no numbers":
        tensors["log_weights"] += float("nan")
    elif kind == "no dimension":
        tensors["coefficients"] = torch.tensor(1.0, dtype=torch.float64)
    elif kind == "other shape":
        tensors["log_weights"] = torch.zeros(2, 2)
    elif kind == "newer":
        header["format_version"] = 3
    elif kind in ("memory is missing", "memory is of others"):
        header["format_version"] = 2
        if kind == "memory is of others":
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
        "no numbers",
        "other shape",
        "no dimension",
        "newer",
        "memory is missing",
        "memory is of others",
        "no header",
        "header of a list",
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str) -> None:
    damaged(tmp_path / "file", kind)
    with pytest.raises(InvalidFileError, match="file"):
        Attribute.load(tmp_path / "file")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="no file"):
        Attribute.load(tmp_path / "none")


@pytest.mark.parametrize(
    "name",
    ["a", "Dr. Who", "v1.2", "../up", "a/b", "100%", "größe", ".hidden", "x" * 200, "名" * 60],
)
def test_a_store_keeps_any_name(tmp_path: Path, name: str) -> None:
    store = AttributeStore(tmp_path / "store")
    store.add(some(name))
    assert list(store) == [name]
    assert name in store
    assert "other" not in store
    assert store[name].name == name
    assert [path.parent for path in tmp_path.rglob("*.safetensors")] == [tmp_path / "store"]


def test_a_store_lists_what_it_can_open(tmp_path: Path) -> None:
    store = AttributeStore(tmp_path)
    for file in ("nontoxic.v2", "größe", "%zz"):
        some(file).save(tmp_path / f"{file}.safetensors")
    assert list(store) == ["größe", "nontoxic.v2"]
    assert [attribute.name for attribute in store.values()] == list(store)
    assert "x" * 300 not in store
    for name in ("", "x" * 201):
        with pytest.raises(InvalidInputError, match="needs a name"):
            store.add(some(name))
    with pytest.raises(InvalidFileError, match="no folder"):
        list(AttributeStore(tmp_path / "typo"))


def test_expressions_are_built_from_a_store(tmp_path: Path) -> None:
    store = AttributeStore(tmp_path)
    store.add(some("a"))
    store.add(some("Twilight Sparkle"))
    built = parse('a & ~"Twilight Sparkle"').build(store)
    torch.testing.assert_close(
        built.probability(TEXTS), (some() & ~some()).probability(TEXTS), rtol=1e-12, atol=0
    )
    with pytest.raises(InvalidInputError, match="no attribute called b"):
        parse("a & b").build(store)
    with pytest.raises(KeyError):
        store["b"]
    assert len(store) == 2
