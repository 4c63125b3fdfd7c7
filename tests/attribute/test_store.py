"""Test stores of attributes."""

from pathlib import Path

import pytest
import torch

from foretrace.attribute import Attribute, AttributeStore, parse
from foretrace.errors import InvalidFileError, InvalidInputError

WEIGHTS = torch.tensor([0.5, 1.0, 0.0, 0.9])
TEXTS = [[0, 1], [2], [3, 3, 1], []]


def some(name: str = "a") -> Attribute:
    return Attribute.from_weights(WEIGHTS, name=name, tokenizer_fingerprint="sha256:a")


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


def test_a_store_lists_the_files_it_can_open(tmp_path: Path) -> None:
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
    assert len(store) == 2


def test_an_unknown_name_is_an_error_for_people_and_a_key_error(tmp_path: Path) -> None:
    store = AttributeStore(tmp_path / "store")
    for hint in ("Check the spelling", "Did you mean positive"):  # before and after it exists
        with pytest.raises(InvalidInputError, match=f"^There is no attribute.*postive. {hint}"):
            store["postive"]
        with pytest.raises(KeyError):
            store["postive"]
        assert store.get("postive") is None
        store.add(some("positive"))
