"""The cache: tables built once, by whoever admits, and read by whoever decodes."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from foretrace import _io
from foretrace.attribute import Attribute, LogitAffine
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.vllm.params import SteeringParams, parse
from foretrace.engines.vllm.table_cache import TableCache
from foretrace.errors import ForetraceError, InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead, levels
from foretrace.steering.conjunction import conjunction

WORDS = 40
HORIZON = 6


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


def _write(folder: Path, name: str, seed: int) -> Attribute:
    weights = torch.rand(WORDS, generator=torch.Generator().manual_seed(seed))
    attribute = Attribute.from_weights(weights)
    attribute.save(folder / f"{name}.safetensors")
    return attribute


def _load_all(folder: Path) -> dict[str, Attribute]:
    return {path.stem: Attribute.load(path) for path in folder.glob("*.safetensors")}


def _params(goal: str | list[str], **more: object) -> SteeringParams:
    params = parse({"goal": goal, **more})
    assert params is not None
    return params


def _cache(hmm: HMM, folder: Path, memory: int = 1 << 30, disk: int = 1 << 30) -> TableCache:
    tables = folder.parent / "tables"
    return TableCache(hmm, folder, tables, horizon=HORIZON, memory=memory, disk=disk)


@pytest.mark.parametrize(
    ("goal", "more"),
    [
        ("nontoxic", {"strength": 2}),
        ("nontoxic & ~formal", {"level": "strong", "neutral_end": 0}),
        ("~(formal | mixed)", {"transform": [3, -1]}),
        (["mixed & nontoxic", "~kind"], {"strength": [2, 0.5]}),
    ],
)
def test_one_process_admits_and_another_decodes(
    hmm: HMM, folder: Path, goal: str | list[str], more: dict[str, Any]
) -> None:
    params = _params(goal, **more)
    attributes = _load_all(folder)
    keys = _cache(hmm, folder).admit(params)
    for file in folder.iterdir():
        file.unlink()  # after admission: the request is served all the same
    (found,) = _cache(hmm, folder).goals(params, keys)
    assert found.strength == 1  # the strengths are inside the lookahead
    assert found.neutral_end == ("neutral_end" not in more)
    assert found.transform == LogitAffine(*more.get("transform", ()))
    exact = Lookahead(hmm, conjunction(params.goals[0].operands, attributes, None, hmm), HORIZON)
    assert torch.equal(found.lookahead.tables.values, exact.tables.values)
    assert torch.equal(found.lookahead.tables.log_scales, exact.tables.log_scales)
    assert torch.equal(found.lookahead.token_weights, exact.token_weights)


def test_every_strength_and_every_level_has_its_own_table(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    settings: list[dict[str, Any]] = [
        {"strength": 1},
        {"strength": 2},
        {"level": "mild"},
        {"level": "medium"},
        {"level": "strong"},
    ]
    keys = [cache.admit(_params("formal", **more))[0] for more in settings]
    assert len(set(keys)) == len(keys)
    assert len(list(cache.disk.folder.glob("*.table"))) == len(keys)
    (one,), (two,) = (
        cache.goals(_params("formal", **more), [key])
        for more, key in zip(settings[:2], keys[:2], strict=True)
    )
    torch.testing.assert_close(two.lookahead.token_weights, 2 * one.lookahead.token_weights)
    assert cache.keys(_params("formal")) == [keys[3]]  # medium
    assert cache.keys(_params("formal", transform=[5, -3])) == [keys[0]]


def test_strengths_that_are_rounded_alike_share_a_table(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    near = {cache.keys(_params("formal", strength=x))[0] for x in (2.46, 2.5, 2.5449)}
    assert len(near) == 1
    assert cache.keys(_params("formal", strength=2.6))[0] not in near


def test_a_list_of_goals_is_one_table(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    params = _params(["formal", "nontoxic"], strength=[3, 2])
    keys = cache.admit(params)
    assert len(keys) == len(list(cache.disk.folder.glob("*.table"))) == 1
    (goal,) = cache.goals(params, keys)
    attributes = _load_all(folder)
    product = attributes["formal"] ** 3 & attributes["nontoxic"] ** 2
    torch.testing.assert_close(
        goal.lookahead.tables.values, Lookahead(hmm, product, HORIZON).tables.values
    )
    assert cache.keys(_params(["nontoxic", "formal"], strength=[2, 3])) == keys
    assert cache.keys(_params(["nontoxic", "formal"], strength=[3, 2])) != keys
    assert len(cache.admit(_params(["formal", "nontoxic"], transform=[3, 0]))) == 2


def test_levels_of_attributes_that_were_not_calibrated_are_found_once(
    hmm: HMM, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated = Attribute.load(folder / "mixed.safetensors")
    config = replace(calibrated.config, levels={"medium": 7.0})
    replace(calibrated, config=config).save(folder / "mixed.safetensors")
    cache, found = _cache(hmm, folder), []
    hmm_price = levels.hmm_price

    def counted(hmm: HMM, attribute: Attribute, strength: float) -> float:
        found.append(strength)
        return hmm_price(hmm, attribute, strength)

    monkeypatch.setattr(levels, "hmm_price", counted)
    (goal,) = cache.goals(_params("mixed"), cache.admit(_params("mixed")))
    assert goal.lookahead.attribute.name.endswith("** 7")
    assert not found
    keys = cache.admit(_params("formal"))
    assert "was not calibrated" in caplog.text
    count = len(found)
    assert count > 0
    cache.admit(_params("formal & mixed"))  # the strength of formal is known
    assert len(found) == count
    decoding = _cache(hmm, folder)
    decoding.goals(_params("formal"), keys, build=False)
    decoding.read_only = True
    decoding.admit(_params("formal"))
    assert len(found) == count


def test_evidence_is_stored_with_its_rewards(hmm: HMM, folder: Path) -> None:
    params = _params("kind & formal", strength=3)
    (goal,) = _cache(hmm, folder).goals(params, _cache(hmm, folder).admit(params))
    assert goal.lookahead.once_rewards is not None
    assert bool((goal.lookahead.tables.log_scales > 0).any())
    (rewards,) = (one.rewards for one in goal.lookahead.attribute.evidence)
    torch.testing.assert_close(rewards, 3 * _load_all(folder)["kind"].evidence[0].rewards)


@pytest.mark.parametrize(
    ("goal", "more", "why"),
    [
        ("kind | formal", {}, "evidence, which | cannot combine"),
        ("kind & (formal | mixed)", {}, "combines evidence with a sum of 3 products"),
        ("~(kind & formal)", {}, "Negate single attributes"),
        ("kind", {"transform": [2, 0]}, "Steer toward it by strength or level"),
        ("~formal", {"strength": 2}, "~formal is a sum of 2 products"),
        (["formal", "mixed | nontoxic"], {"strength": 2}, "is a sum of 3 products"),
    ],
)
def test_goals_that_cannot_be_combined_are_refused_before_any_build(
    hmm: HMM,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    goal: str | list[str],
    more: dict[str, Any],
    why: str,
) -> None:
    cache = _cache(hmm, folder)
    monkeypatch.setattr(cache, "_build", None)
    with pytest.raises(InvalidInputError, match=re.escape(why)):
        cache.admit(_params(goal, **more))


def test_transforms_of_evidence_are_refused_also_when_the_table_is_there(
    hmm: HMM, folder: Path
) -> None:
    cache = _cache(hmm, folder)
    cache.admit(_params("kind", strength=1))
    with pytest.raises(InvalidInputError, match="by strength or level"):
        cache.admit(_params("kind", transform=[2, 0]))


def test_the_order_of_operands_makes_no_other_table(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    keys = {
        cache.admit(_params(goal))[0]
        for goal in (
            "nontoxic & formal & mixed",
            "mixed & (formal & nontoxic)",
            "~~nontoxic & (mixed & formal)",
        )
    }
    assert len(keys) == 1
    assert cache.admit(_params("nontoxic & nontoxic")) != cache.admit(_params("nontoxic"))


def test_keys_depend_on_the_hmm_the_horizon_and_the_end_tokens(hmm: HMM, folder: Path) -> None:
    tables = folder.parent / "tables"
    ends = replace(hmm.config, eos_token_ids=(0, 1))
    caches = [
        TableCache(hmm, folder, tables, horizon=HORIZON),
        TableCache(hmm, folder, tables, horizon=HORIZON + 1),
        TableCache(HMM.random(8, WORDS, eos_token_id=0, seed=1), folder, tables, horizon=HORIZON),
        TableCache(
            HMM(hmm.initial, hmm.transition, hmm.emission, ends), folder, tables, horizon=HORIZON
        ),
    ]
    assert len({cache.keys(_params("formal"))[0] for cache in caches}) == len(caches)


def test_the_least_recently_used_table_leaves_memory_first(hmm: HMM, folder: Path) -> None:
    size = Lookahead(hmm, Attribute.load(folder / "formal.safetensors"), HORIZON).nbytes
    events: list[str] = []
    cache = _cache(hmm, folder, memory=2 * size)
    cache.observe = lambda event, value: events.append(event)
    for name in ("nontoxic", "formal", "nontoxic", "mixed", "nontoxic", "mixed", "formal"):
        params = _params(name)
        cache.goals(params, cache.admit(params))
    used = [event for event in events if event != "build"]
    assert used == ["miss", "miss", "hit", "miss", "hit", "hit", "miss"]  # formal was dropped


def test_a_table_larger_than_the_memory_is_kept_alone(hmm: HMM, folder: Path) -> None:
    events: list[tuple[str, float]] = []
    cache = _cache(hmm, folder, memory=1)
    cache.observe = lambda event, value: events.append((event, value))
    for name in ("formal", "formal", "mixed", "formal"):
        params = _params(name)
        cache.goals(params, cache.admit(params))
    assert all(0 < value < 60 for event, value in events if event == "build")  # seconds
    counted = [event for event in events if event[0] != "build"]
    assert counted == [("miss", 1), ("hit", 1), ("miss", 1), ("miss", 1)]


def test_the_least_recently_used_table_leaves_the_disk_first(hmm: HMM, folder: Path) -> None:
    size = _stored_size(hmm, folder, "formal")
    cache = _cache(hmm, folder, disk=int(3.2 * size))
    keys = {name: cache.admit(_params(name))[0] for name in ("nontoxic", "formal", "mixed")}
    for age, name in enumerate(("mixed", "nontoxic", "formal")):  # mixed was used last
        os.utime(cache.disk._files(keys[name])[1], (1e9 - age, 1e9 - age))
    cache.admit(_params("nontoxic | mixed"))
    assert cache.disk.has(keys["mixed"])
    assert not cache.disk.has(keys["formal"])


def test_a_table_with_impossible_values_is_built_again(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    (key,) = cache.admit(_params("formal"))
    path = cache.disk._files(key)[1]
    tensors, _ = _io.read_tensors(path)
    exact = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, wrong in (("values", 1.5), ("values", -0.1), ("log_scales", float("inf"))):
        _io.write_tensors(path, exact | {name: torch.full_like(exact[name], wrong)}, {})
        (goal,) = _cache(hmm, folder).goals(_params("formal"), [key])
        assert torch.equal(goal.lookahead.tables.values, exact["values"])


def test_a_replaced_attribute_is_another(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    (before,) = cache.admit(_params("formal"))
    assert cache.admit(_params("formal")) == [before]
    _write(folder, "formal", 7)
    assert cache.admit(_params("formal")) != [before]
    (old,) = cache.goals(_params("formal"), [before])  # one that was admitted before
    assert not torch.equal(
        old.lookahead.token_weights,
        cache.goals(_params("formal"), cache.admit(_params("formal")))[0].lookahead.token_weights,
    )


def test_a_broken_file_is_refused_and_named_in_the_log(
    hmm: HMM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "broken.safetensors").write_bytes(b"nothing of the kind")
    cache = _cache(hmm, folder)
    with pytest.raises(InvalidInputError, match=r"'broken' cannot be used.* damaged") as refusal:
        cache.admit(_params("broken"))
    (record,) = caplog.records
    cause = refusal.value.__cause__
    assert record.getMessage() == f"The attribute 'broken' is refused: {cause}"
    assert record.__dict__["attribute"] == "broken"  # for logs in JSON
    assert cache.admit(_params("formal"))


def test_a_file_that_disappears_while_it_is_read_is_unknown(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    file = cache._file("formal")
    (folder / "formal.safetensors").unlink()
    with pytest.raises(InvalidInputError, match="no attribute called formal"):
        cache._read_attribute("formal", file)


@pytest.mark.parametrize("name", ["../formal", "/etc/passwd", "..", "a/../formal", "x" * 300, "\0"])
def test_names_do_not_leave_the_folder(hmm: HMM, folder: Path, name: str) -> None:
    cache = _cache(hmm, folder / "inner")
    (folder / "inner").mkdir()
    with pytest.raises(InvalidInputError, match="no attribute"):
        cache.admit(_params(f'"{name}"'))


def test_a_misspelt_name_is_guessed(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    with pytest.raises(InvalidInputError, match="Did you mean nontoxic"):
        cache.admit(_params("nontoxc"))
    cache.admit(_params("formal", horizon=6))
    with pytest.raises(InvalidInputError, match="at most 6 tokens"):
        cache.admit(_params("formal", horizon=7))
    folder.rename(folder.with_name("gone"))
    with pytest.raises(InvalidInputError, match="Check the spelling"):
        cache.admit(_params("nontoxc"))


def test_names_that_differ_by_more_than_three_letters_are_not_compared(
    hmm: HMM, folder: Path
) -> None:
    """A folder may have thousands of names."""
    for length in (13, 14):
        _write(folder, "a" * length, 0)
        with pytest.raises(InvalidInputError, match="Did you mean" if length == 13 else "Check"):
            _cache(hmm, folder).admit(_params("a" * 10))
        (folder / f"{'a' * length}.safetensors").unlink()


def test_a_long_name_is_cut(hmm: HMM, folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"called b{100}\. Check the spelling\.$"):
        _cache(hmm, folder).admit(_params("b" * 101))


def test_names_are_listed_again_when_the_folder_changes(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    assert cache.names() is cache.names()
    _write(folder, "another", 0)
    assert "another" in cache.names()


def test_too_many_terms_are_refused(hmm: HMM, folder: Path) -> None:
    many = " & ".join(["(nontoxic | formal)"] * 6)
    with pytest.raises(InvalidInputError, match="16 are allowed"):
        _cache(hmm, folder).admit(_params(many))


def test_terms_of_all_goals_count_also_when_tables_are_there(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    goals = [
        "(nontoxic | formal) & ~mixed",
        "~formal | mixed",
        "(nontoxic | mixed) & ~mixed & ~formal",
    ]
    for goal in goals:
        cache.admit(_params(goal, strength=1))
    with pytest.raises(InvalidInputError, match="have 19 terms"):
        cache.admit(_params(goals, transform=[1, 0]))
    assert len(cache.admit(_params(goals[:2], transform=[1, 0]))) == 2


def test_terms_of_a_conjunction_multiply(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    cache.admit(_params(["nontoxic | formal", "nontoxic | mixed"]))
    with pytest.raises(InvalidInputError, match="are allowed"):
        cache.admit(_params(["nontoxic | formal", "nontoxic | mixed", "~formal", "~mixed"]))


def test_sizes_are_checked_before_anything_is_computed(
    hmm: HMM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TableCache(
        hmm, folder, folder.parent / "tables", horizon=HORIZON, load_token_bytes=lambda: LETTERS
    )
    monkeypatch.setattr(cache, "_build", None)
    monkeypatch.setattr(TokenBytes, "contains", None)  # would go through the whole vocabulary
    for goal, why in {
        f'contains("{"abcdefghijklmnopqrstuvwxyz" * 3}")': "79 states",
        'contains("abcdefgh") & contains("ijklmnop") & contains("qrstuvwx")': "92 states",
        "nontoxic & ~mixed & ~formal & ~nontoxic & (formal | nontoxic | "
        '~contains("abcdefghijklmnopqrstuvwxyz"))': "for all terms",
        "~nontoxic & ~formal & ~mixed & (nontoxic | formal | mixed)": "are allowed",
    }.items():
        with pytest.raises(InvalidInputError, match=why):
            cache.admit(_params(goal))


def test_a_read_only_library_builds_nothing(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    cache.read_only = True
    why = r"^The tables of this goal are not built\. .* JSON requests to /v1/ only: send the goal"
    with pytest.raises(InvalidInputError, match=why):
        cache.admit(_params("formal"))
    assert not list(cache.disk.folder.iterdir())
    keys = _cache(hmm, folder).admit(_params("formal"))
    assert cache.admit(_params("formal")) == keys


def test_leased_tables_are_not_evicted(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    cache.admit(_params("formal"))
    size = sum(file.stat().st_size for file in cache.disk.folder.iterdir())
    other = _cache(hmm, folder, disk=size)  # as another process would
    leases = cache.lease(_params("formal"))
    assert leases is not None
    assert cache.lease(_params("mixed")) is None
    with pytest.raises(InvalidInputError, match="does not fit"):
        other.admit(_params("mixed"))
    for lease in leases:
        lease.release()
        lease.release()
    other.admit(_params("mixed"))
    assert cache.lease(_params("formal")) is None


def test_the_decoding_process_does_not_build(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    keys = cache.admit(_params("formal"))
    for file in cache.disk.folder.iterdir():
        file.unlink()
    with pytest.raises(ForetraceError):
        cache.goals(_params("formal"), keys, build=False)
    assert cache.goals(_params("formal"), keys)
    assert cache.disk.has(keys[0])


def test_an_attribute_of_another_tokenizer_is_refused(hmm: HMM, folder: Path) -> None:
    config = replace(hmm.config, tokenizer_fingerprint="ours")
    hmm = HMM(hmm.initial, hmm.transition, hmm.emission, config)
    for name in ("ours", "theirs"):
        weights = torch.rand(WORDS)
        attribute = Attribute.from_weights(weights, name=name, tokenizer_fingerprint=name)
        attribute.save(folder / f"{name}.safetensors")
    cache = _cache(hmm, folder)
    cache.admit(_params("ours"))
    with pytest.raises(InvalidInputError, match="'theirs' cannot be used"):
        cache.admit(_params("theirs"))


def _stored_size(hmm: HMM, folder: Path, name: str) -> int:
    cache = TableCache(hmm, folder, folder.parent / "measured", horizon=HORIZON)
    cache.admit(_params(name))
    return sum(file.stat().st_size for file in cache.disk.folder.iterdir())


def test_memory_and_disk_have_their_budgets(hmm: HMM, folder: Path) -> None:
    one = Lookahead(hmm, Attribute.load(folder / "formal.safetensors"), HORIZON).nbytes
    events: list[str] = []
    cache = _cache(hmm, folder, memory=2 * one, disk=_stored_size(hmm, folder, "formal") + 100)
    cache.observe = lambda event, value: events.append(event)
    for name in ("nontoxic", "formal", "mixed", "mixed", "nontoxic"):
        params = _params(name)
        cache.goals(params, cache.admit(params))
    assert events.count("hit") == 1  # mixed, the second time
    assert len(cache._kept) == 2
    assert events.count("build") == 4  # the disk holds one table
    assert len(list(cache.disk.folder.glob("*.table"))) == 1


def test_threads_build_a_table_once(hmm: HMM, folder: Path) -> None:
    events: list[str] = []
    cache = _cache(hmm, folder)
    cache.observe = lambda event, value: events.append(event)
    threads = [Thread(target=cache.admit, args=(_params("nontoxic & formal"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.count("build") == 1
    assert not cache._building


def test_what_was_admitted_is_not_exchanged(hmm: HMM, folder: Path) -> None:
    """Neither its file nor its table is there any more: better no text than another attribute's."""
    cache = _cache(hmm, folder)
    keys = cache.admit(_params("formal"))
    _write(folder, "formal", 7)
    for file in cache.disk.folder.iterdir():
        file.unlink()
    with pytest.raises(ForetraceError):
        cache.goals(_params("formal"), keys)


def test_a_folder_that_others_can_write_to_is_refused(hmm: HMM, folder: Path) -> None:
    mine = folder.parent / "tables" / f"foretrace-{os.getuid()}"
    mine.mkdir(parents=True)
    mine.chmod(0o777)
    with pytest.raises(InvalidInputError, match="others can write"):
        _cache(hmm, folder)


def test_a_damaged_table_is_built_again(hmm: HMM, folder: Path) -> None:
    cache = _cache(hmm, folder)
    (key,) = cache.admit(_params("formal"))
    cache.disk._files(key)[1].write_bytes(b"?")
    assert cache.goals(_params("formal"), [key])


def test_markers_are_those_of_the_request(hmm: HMM, folder: Path) -> None:
    tables = folder.parent / "tables"
    cache = TableCache(hmm, folder, tables, horizon=HORIZON, load_token_bytes=lambda: LETTERS)
    for after, window in (("ab", "cd"), (None, "cd"), ("ab", 7), (None, None)):
        given = {"after": after, "window": window}
        params = _params("formal", **{name: value for name, value in given.items() if value})
        (goal,) = cache.goals(params, cache.admit(params))
        marker = None if after is None else LETTERS.marker(after)
        assert goal.after == marker
        assert goal.window == (LETTERS.marker(window) if isinstance(window, str) else window)


def test_markers_need_a_tokenizer(hmm: HMM, folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"markers need the tokenizer, which this server "):
        _cache(hmm, folder).admit(_params("formal", after="ab"))


def test_a_constraint_is_found_among_the_goals(hmm: HMM, folder: Path) -> None:
    tables = folder.parent / "tables"
    cache = TableCache(hmm, folder, tables, horizon=HORIZON, load_token_bytes=lambda: LETTERS)
    constrained, plain = (
        cache.admit(_params(goal)) for goal in ('formal & contains("ab")', "formal")
    )
    assert cache.has_constraint([*plain, *constrained])
    assert not cache.has_constraint(plain)


def test_the_tokenizer_is_loaded_before_the_first_request(hmm: HMM, folder: Path) -> None:
    loaded: list[int] = []

    def load() -> TokenBytes:
        loaded.append(1)
        return LETTERS

    tables = folder.parent / "tables"
    cache = TableCache(hmm, folder, tables, horizon=HORIZON, load_token_bytes=load)
    assert not loaded
    cache.load_tokenizer()
    cache.admit(_params('contains("ab")'))
    assert loaded == [1]
    _cache(hmm, folder).load_tokenizer()  # without one, nothing happens


LETTERS = TokenBytes([b"", *(bytes([97 + place % 26]) for place in range(WORDS - 1))])


def test_what_must_occur_is_built_and_read_again(hmm: HMM, folder: Path) -> None:
    params = _params('nontoxic & contains("abc") & ~contains("z", "y")')
    tables = folder.parent / "tables"
    admitting, decoding = (
        TableCache(hmm, folder, tables, horizon=HORIZON, load_token_bytes=lambda: LETTERS)
        for _ in range(2)
    )
    keys = admitting.admit(params)
    (goal,) = decoding.goals(params, keys)
    assert goal.lookahead.attribute.terms.num_states == 5  # what is forbidden is never left
    text = [[1, 2, 3], [1, 2, 3, 25], [3, 2, 1]]
    assert [each > 0 for each in goal.lookahead.attribute.probability(text)] == [True, False, False]
    admitting.admit(params, 3)
    with pytest.raises(InvalidInputError, match="take 3 tokens at least"):
        admitting.admit(params, 2)


def test_texts_that_are_too_much_are_refused(hmm: HMM, folder: Path) -> None:
    params = _params("nontoxic", must_contain=["abcdefgh", "ijklmnop", "qrstuvwx"])
    with pytest.raises(InvalidInputError, match="does not know"):
        _cache(hmm, folder).admit(params)
    tables = folder.parent / "tables"
    cache = TableCache(hmm, folder, tables, horizon=HORIZON, load_token_bytes=lambda: LETTERS)
    with pytest.raises(InvalidInputError, match="At most 64 states"):
        cache.admit(params)


def test_texts_alone_are_one_term_however_many(hmm: HMM, folder: Path) -> None:
    tables = folder.parent / "tables"
    cache = TableCache(hmm, folder, tables, horizon=HORIZON, load_token_bytes=lambda: LETTERS)
    cache.admit(_params(" & ".join(f'~contains("{letter}")' for letter in "abcdefghijkl")))


def test_saved_goals_that_remember_are_checked_as_well(hmm: HMM, folder: Path) -> None:
    for name in ("abc", "xyz"):
        occurs = Attribute.contains(name, LETTERS.tokens)
        occurs.save(folder / f"{name}.safetensors")
    cache = _cache(hmm, folder)
    with pytest.raises(InvalidInputError, match="take 3 tokens at least"):
        cache.admit(_params("abc"), 2)
    with pytest.raises(InvalidInputError, match="Join them by &"):
        cache.admit(_params(["abc", "xyz"], transform=[2, 0]), 20)
    with pytest.raises(InvalidInputError, match="take 6 tokens at least"):
        cache.admit(_params(["abc", "xyz"]), 5)
    cache.admit(_params(["abc", "xyz"]), 6)


def test_another_spelling_is_another_table(hmm: HMM, folder: Path) -> None:
    tables, keys = folder.parent / "tables", []
    other = TokenBytes([b"", *LETTERS.tokens[:0:-1]])
    for token_bytes in (LETTERS, other):
        cache = TableCache(
            hmm,
            folder,
            tables,
            horizon=HORIZON,
            load_token_bytes=partial(TokenBytes, token_bytes.tokens),
        )
        keys += cache.admit(_params('contains("ab")'))
    assert keys[0] != keys[1]


def test_a_tokenizer_that_fails_is_asked_once(hmm: HMM, folder: Path) -> None:
    params = []

    def failing() -> TokenBytes:
        params.append(1)
        raise InvalidInputError("It spells nothing.")

    cache = TableCache(
        hmm, folder, folder.parent / "tables", horizon=HORIZON, load_token_bytes=failing
    )
    for _ in range(3):
        with pytest.raises(InvalidInputError, match="cannot be used: It spells nothing"):
            cache.admit(_params('contains("ab")'))
    assert params == [1]


def test_a_tokenizer_that_cannot_be_read_is_refused_once(
    hmm: HMM, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def absent() -> TokenBytes:
        tried.append(1)
        raise OSError("no such repository")

    cache = TableCache(
        hmm, folder, folder.parent / "tables", horizon=HORIZON, load_token_bytes=absent
    )
    for _ in range(3):
        with pytest.raises(InvalidInputError, match="tokenizer cannot be used: its log says why"):
            cache.admit(_params('contains("ab")'))
    assert tried == [1]
    assert caplog.messages == ["The server's tokenizer cannot be used"]
    assert "no such repository" in caplog.text
