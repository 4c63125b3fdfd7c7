"""The examples in public docstrings run, and public docstrings have every section they need."""

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

import foretrace as ft
from docs_folder import docs_tokenizer, nontoxic
from tiny_lm import tiny_hmm, tiny_model

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "python.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# `ft.distill` may also be the package of that name; `__getattr__` always returns the function.
EXPORTED: dict[str, Any] = {f"foretrace.{name}": ft.__getattr__(name) for name in ft.__all__}


def resolve(path: str) -> Any:
    """Import the object that a line of the reference names."""
    if path in EXPORTED:
        return EXPORTED[path]
    try:
        return import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(resolve(module), name)


def documented(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object and, for a class or a module, its public members from foretrace."""
    yield path, value
    if inspect.ismodule(value):
        for name, member in vars(value).items():
            defined = getattr(member, "__module__", "") == value.__name__
            if not name.startswith("_") and (defined or name in getattr(value, "__all__", ())):
                yield from documented(f"{path}.{name}", member)
    elif inspect.isclass(value):
        for attribute in inspect.classify_class_attrs(value):
            inherited = not attribute.defining_class.__module__.startswith("foretrace")
            # A default value has the docstring of its type.
            default = attribute.kind == "data" and not isinstance(attribute.object, cached_property)
            if not (inherited or default or attribute.name.startswith("_")):
                yield f"{path}.{attribute.name}", attribute.object


def examples() -> dict[str, str]:
    """Return the docstrings that contain an example, by the first path of their object."""
    listed = re.findall(r"^::: (\S+)$", REFERENCE.read_text("utf-8"), re.MULTILINE)
    roots = {**EXPORTED, **{path: resolve(path) for path in listed}}
    found: dict[str, str] = {}
    for path, value in roots.items():
        for name, member in documented(path, value):
            text = inspect.getdoc(member) or ""
            if ">>>" in text and text not in found.values():
                found[name] = text
    return dict(sorted(found.items()))


EXAMPLES = examples()


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    """The names that every example may use."""
    tokenizer = docs_tokenizer()
    return {
        "ft": ft,
        "torch": torch,
        "tokenizer": tokenizer,
        "model": tiny_model(tokenizer),
        "hmm": tiny_hmm(tokenizer),
        "attribute": nontoxic(tokenizer),
    }


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_example_runs(
    path: str, shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {**shared, "folder": tmp_path}
    example = doctest.DocTestParser().get_doctest(EXAMPLES[path], names, path, path, 0)
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=printed.append)
    assert result.failed == 0, "".join(printed)


def needs_arguments(value: Callable[..., Any]) -> bool:
    """Return whether a function or a constructor has parameters with names."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(value).parameters.values()
    return any(parameter.kind not in kinds for parameter in parameters)


def has_section(text: str, names: str) -> bool:
    return re.search(f"^({names}):$", text, re.MULTILINE) is not None


@pytest.mark.parametrize("path", [path for path, value in EXPORTED.items() if callable(value)])
def test_the_docstring_is_complete(path: str) -> None:
    value = EXPORTED[path]
    if inspect.ismodule(value):  # the callable package foretrace.distill
        value = resolve(f"{value.__name__}.run.{value.__name__.rpartition('.')[2]}")
    text = inspect.getdoc(value) or ""
    is_class = inspect.isclass(value)
    missing = []
    if ">>>" not in text or not has_section(text, "Examples?"):
        missing.append("Example")
    if needs_arguments(value) and not has_section(text, "Args|Attributes" if is_class else "Args"):
        missing.append("Args")
    returns = not is_class and inspect.signature(value).return_annotation is not None
    if returns and not has_section(text, "Returns|Yields"):
        missing.append("Returns")
    assert not missing, f"{path}: the docstring lacks the sections {', '.join(missing)}"
