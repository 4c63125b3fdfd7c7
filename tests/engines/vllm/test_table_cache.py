"""The library: tables built once, by whoever admits, and read by whoever decodes."""

import os
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch

from foretrace.attribute import Attribute
from foretrace.engines.token_bytes import Spelling
from foretrace.engines.vllm.params import Asked, read_asked
from foretrace.engines.vllm.table_cache import Library
from foretrace.errors import ForetraceError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead

WORDS = 40
HORIZON = 6


@pytest.fixture
def hmm() -> HMM:
    return HMM.random(8, WORDS, eos_token_id=0, seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place, name in enumerate(("nontoxic", "formal", "mixed")):
        _write(tmp_path / "attributes", name, place)
    return tmp_path / "attributes"


def _write(folder: Path, name: str, seed: int) -> Attribute:
    weights = torch.rand(WORDS, generator=torch.Generator().manual_seed(seed))
    attribute = Attribute.from_weights(weights)
    attribute.save(folder / f"{name}.safetensors")
    return attribute


def _asked(goal: str | list[str], **more: object) -> Asked:
    asked = read_asked({"goal": goal, **more})
    assert asked is not None
    return asked


def _library(hmm: HMM, folder: Path, memory: int = 1 << 30, disk: int = 1 << 30) -> Library:
    tables = folder.parent / "tables"
    return Library(hmm, folder, tables, horizon=HORIZON, memory=memory, disk=disk)


@pytest.mark.parametrize("goal", ["nontoxic", "nontoxic & ~formal", "~(formal | mixed)"])
def test_one_process_admits_and_another_decodes(hmm: HMM, folder: Path, goal: str) -> None:
    asked = _asked(goal, strength=2, neutral_end=1)
    keys = _library(hmm, folder).admit(asked)
    for file in folder.iterdir():
        file.unlink()  # after admission: the request is served all the same
    (found,) = _library(hmm, folder).goals(asked, keys)
    assert found.strength == 2
    assert found.neutral_end
    for place, name in enumerate(("nontoxic", "formal", "mixed")):
        _write(folder, name, place)
    attributes = {
        name: Attribute.load(folder / f"{name}.safetensors")
        for name in ("nontoxic", "formal", "mixed")
    }
    exact = Lookahead(hmm, asked.goals[0].expression.build(attributes), HORIZON)
    assert torch.equal(found.lookahead.tables.values, exact.tables.values)
    assert torch.equal(found.lookahead.token_weights, exact.token_weights)


def test_a_replaced_attribute_is_another(hmm: HMM, folder: Path) -> None:
    library = _library(hmm, folder)
    (before,) = library.admit(_asked("formal"))
    assert library.admit(_asked("formal")) == [before]
    _write(folder, "formal", 7)
    assert library.admit(_asked("formal")) != [before]
    (old,) = library.goals(_asked("formal"), [before])  # one that was admitted before
    assert not torch.equal(
        old.lookahead.token_weights,
        library.goals(_asked("formal"), library.admit(_asked("formal")))[0].lookahead.token_weights,
    )


def test_a_broken_file_is_refused_and_named_in_the_log(
    hmm: HMM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "broken.safetensors").write_bytes(b"nothing of the kind")
    library = _library(hmm, folder)
    with pytest.raises(InvalidInputError, match="broken"):
        library.admit(_asked("broken"))
    assert "broken" in caplog.text
    assert library.admit(_asked("formal"))


@pytest.mark.parametrize("name", ["../formal", "/etc/passwd", "..", "a/../formal", "x" * 300, "\0"])
def test_names_do_not_leave_the_folder(hmm: HMM, folder: Path, name: str) -> None:
    library = _library(hmm, folder / "inner")
    (folder / "inner").mkdir()
    with pytest.raises(InvalidInputError, match="no attribute"):
        library.admit(_asked(f'"{name}"'))


def test_a_misspelt_name_is_guessed(hmm: HMM, folder: Path) -> None:
    library = _library(hmm, folder)
    with pytest.raises(InvalidInputError, match="Did you mean nontoxic"):
        library.admit(_asked("nontoxc"))
    with pytest.raises(InvalidInputError, match="6 tokens ahead"):
        library.admit(_asked("formal", horizon=7))
    folder.rename(folder.with_name("gone"))
    with pytest.raises(InvalidInputError, match="Check the spelling"):
        library.admit(_asked("nontoxc"))


def test_too_many_terms_are_refused(hmm: HMM, folder: Path) -> None:
    many = " & ".join(["(nontoxic | formal)"] * 6)
    with pytest.raises(InvalidInputError, match="16 is the most"):
        _library(hmm, folder).admit(_asked(many))


def test_terms_of_all_goals_count_also_when_tables_are_there(hmm: HMM, folder: Path) -> None:
    library = _library(hmm, folder)
    goals = [
        "(nontoxic | formal) & ~mixed",
        "~formal | mixed",
        "(nontoxic | mixed) & ~mixed & ~formal",
    ]
    for goal in goals:
        library.admit(_asked(goal))
    with pytest.raises(InvalidInputError, match="come to 19 terms"):
        library.admit(_asked(goals))
    assert len(library.admit(_asked(goals[:2]))) == 2


def test_sizes_are_checked_before_anything_is_computed(
    hmm: HMM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(
        hmm, folder, folder.parent / "tables", horizon=HORIZON, spelled=lambda: LETTERS
    )
    monkeypatch.setattr(library, "_build", None)
    monkeypatch.setattr(Spelling, "mentions", None)  # would go through the whole vocabulary
    for goal, why in {
        f'mentions("{"abcdefghijklmnopqrstuvwxyz" * 3}")': "79 states",
        'mentions("abcdefgh") & mentions("ijklmnop") & mentions("qrstuvwx")': "92 states",
        "nontoxic & ~mixed & ~formal & ~nontoxic & (formal | nontoxic | "
        '~mentions("abcdefghijklmnopqrstuvwxyz"))': "for all terms",
        "~nontoxic & ~formal & ~mixed & (nontoxic | formal | mixed)": "is the most here",
    }.items():
        with pytest.raises(InvalidInputError, match=why):
            library.admit(_asked(goal))


def test_a_read_only_library_builds_nothing(hmm: HMM, folder: Path) -> None:
    library = _library(hmm, folder)
    library.read_only = True
    with pytest.raises(InvalidInputError, match="not built"):
        library.admit(_asked("formal"))
    assert not list(library.shelf.folder.iterdir())
    keys = _library(hmm, folder).admit(_asked("formal"))
    assert library.admit(_asked("formal")) == keys


def test_leased_tables_are_not_evicted(hmm: HMM, folder: Path) -> None:
    library = _library(hmm, folder)
    library.admit(_asked("formal"))
    size = sum(file.stat().st_size for file in library.shelf.folder.iterdir())
    other = _library(hmm, folder, disk=size)  # as another process would
    leases = library.lease(_asked("formal"))
    assert leases is not None
    assert library.lease(_asked("mixed")) is None
    with pytest.raises(InvalidInputError, match="does not fit"):
        other.admit(_asked("mixed"))
    for lease in leases:
        lease.release()
        lease.release()
    other.admit(_asked("mixed"))
    assert library.lease(_asked("formal")) is None


def test_the_decoding_process_does_not_build(hmm: HMM, folder: Path) -> None:
    library = _library(hmm, folder)
    keys = library.admit(_asked("formal"))
    for file in library.shelf.folder.iterdir():
        file.unlink()
    with pytest.raises(ForetraceError):
        library.goals(_asked("formal"), keys, build=False)
    assert library.goals(_asked("formal"), keys)


def _stored_size(hmm: HMM, folder: Path, name: str) -> int:
    library = Library(hmm, folder, folder.parent / "measured", horizon=HORIZON)
    library.admit(_asked(name))
    return sum(file.stat().st_size for file in library.shelf.folder.iterdir())


def test_memory_and_disk_have_their_budgets(hmm: HMM, folder: Path) -> None:
    one = Lookahead(hmm, Attribute.load(folder / "formal.safetensors"), HORIZON).nbytes
    events: list[str] = []
    library = _library(hmm, folder, memory=2 * one, disk=_stored_size(hmm, folder, "formal") + 100)
    library.observe = lambda event, value: events.append(event)
    for name in ("nontoxic", "formal", "mixed", "mixed", "nontoxic"):
        asked = _asked(name)
        library.goals(asked, library.admit(asked))
    assert events.count("hit") == 1  # mixed, the second time
    assert len(library._kept) == 2
    assert events.count("build") == 4  # the disk holds one table
    assert len(list(library.shelf.folder.glob("*.table"))) == 1


def test_threads_build_a_table_once(hmm: HMM, folder: Path) -> None:
    events: list[str] = []
    library = _library(hmm, folder)
    library.observe = lambda event, value: events.append(event)
    threads = [Thread(target=library.admit, args=(_asked("nontoxic & formal"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.count("build") == 1
    assert not library._building


def test_what_was_admitted_is_not_exchanged(hmm: HMM, folder: Path) -> None:
    """Neither its file nor its table is there any more: better no text than another attribute's."""
    library = _library(hmm, folder)
    keys = library.admit(_asked("formal"))
    _write(folder, "formal", 7)
    for file in library.shelf.folder.iterdir():
        file.unlink()
    with pytest.raises(ForetraceError):
        library.goals(_asked("formal"), keys)


def test_a_folder_that_others_can_write_to_is_refused(hmm: HMM, folder: Path) -> None:
    mine = folder.parent / "tables" / f"foretrace-{os.getuid()}"
    mine.mkdir(parents=True)
    mine.chmod(0o777)
    with pytest.raises(InvalidInputError, match="others can write"):
        _library(hmm, folder)


def test_a_damaged_table_is_built_again(hmm: HMM, folder: Path) -> None:
    library = _library(hmm, folder)
    (key,) = library.admit(_asked("formal"))
    library.shelf._files(key)[1].write_bytes(b"?")
    assert library.goals(_asked("formal"), [key])


LETTERS = Spelling([b"", *(bytes([97 + place % 26]) for place in range(WORDS - 1))])


def test_what_must_occur_is_built_and_read_again(hmm: HMM, folder: Path) -> None:
    asked = _asked('nontoxic & mentions("abc") & ~mentions("z", "y")')
    tables = folder.parent / "tables"
    admitting, decoding = (
        Library(hmm, folder, tables, horizon=HORIZON, spelled=lambda: LETTERS) for _ in range(2)
    )
    keys = admitting.admit(asked)
    (goal,) = decoding.goals(asked, keys)
    assert goal.lookahead.attribute.terms.states == 5  # what is forbidden is never left
    text = [[1, 2, 3], [1, 2, 3, 25], [3, 2, 1]]
    assert [each > 0 for each in goal.lookahead.attribute.probability(text)] == [True, False, False]
    admitting.admit(asked, 3)
    with pytest.raises(InvalidInputError, match="takes 3 tokens at least"):
        admitting.admit(asked, 2)


def test_texts_that_are_too_much_are_refused(hmm: HMM, folder: Path) -> None:
    asked = _asked("nontoxic", must_contain=["abcdefgh", "ijklmnop", "qrstuvwx"])
    with pytest.raises(InvalidInputError, match="does not know its tokenizer"):
        _library(hmm, folder).admit(asked)
    tables = folder.parent / "tables"
    knowing = Library(hmm, folder, tables, horizon=HORIZON, spelled=lambda: LETTERS)
    with pytest.raises(InvalidInputError, match="64 states is the most"):
        knowing.admit(asked)


def test_texts_alone_are_one_term_however_many(hmm: HMM, folder: Path) -> None:
    tables = folder.parent / "tables"
    knowing = Library(hmm, folder, tables, horizon=HORIZON, spelled=lambda: LETTERS)
    knowing.admit(_asked(" & ".join(f'~mentions("{letter}")' for letter in "abcdefghijkl")))


def test_saved_goals_that_remember_are_checked_as_well(hmm: HMM, folder: Path) -> None:
    for name in ("abc", "xyz"):
        occurs = Attribute.occurrence(name, LETTERS.tokens)
        occurs.save(folder / f"{name}.safetensors")
    library = _library(hmm, folder)
    with pytest.raises(InvalidInputError, match="takes 3 tokens at least"):
        library.admit(_asked("abc"), 2)
    with pytest.raises(InvalidInputError, match="Join them by &"):
        library.admit(_asked(["abc", "xyz"]), 20)


def test_another_spelling_is_another_table(hmm: HMM, folder: Path) -> None:
    tables, keys = folder.parent / "tables", []
    other = Spelling([b"", *LETTERS.tokens[:0:-1]])
    for spelling in (LETTERS, other):
        library = Library(
            hmm, folder, tables, horizon=HORIZON, spelled=partial(Spelling, spelling.tokens)
        )
        keys += library.admit(_asked('mentions("ab")'))
    assert keys[0] != keys[1]


def test_a_tokenizer_that_fails_is_asked_once(hmm: HMM, folder: Path) -> None:
    asked = []

    def failing() -> Spelling:
        asked.append(1)
        raise InvalidInputError("It spells nothing.")

    library = Library(hmm, folder, folder.parent / "tables", horizon=HORIZON, spelled=failing)
    for _ in range(3):
        with pytest.raises(InvalidInputError, match="cannot be used: It spells nothing"):
            library.admit(_asked('mentions("ab")'))
    assert asked == [1]


def test_a_tokenizer_that_cannot_be_read_is_refused_once(hmm: HMM, folder: Path) -> None:
    tried = []

    def absent() -> Spelling:
        tried.append(1)
        raise OSError("no such repository")

    library = Library(hmm, folder, folder.parent / "tables", horizon=HORIZON, spelled=absent)
    for _ in range(3):
        with pytest.raises(InvalidInputError, match="tokenizer cannot be used: its log says why"):
            library.admit(_asked('mentions("ab")'))
    assert tried == [1]
