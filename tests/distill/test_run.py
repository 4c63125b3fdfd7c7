"""Distill an HMM end to end, killed at every stage and resumed."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

import foretrace as ft
import forked
from foretrace.chat import as_messages
from foretrace.distill import EMConfig, LatentConfig, LMConfig
from foretrace.distill.run import StageProgress, publish
from foretrace.errors import InvalidFileError, InvalidInputError, TokenizerMismatchError
from foretrace.hmm.storage import named_tensors
from tiny_lm import WORDS, chat_tokenizer, word_tokenizer, write_tiny_lm

pytest.importorskip("transformers", reason="needs the extra `transformers`")
pytest.importorskip("faiss", reason="needs the extra `transformers`")

CONFIG = ft.DistillConfig(
    num_states=8,
    sequences=600,
    length=16,
    shard_rows=40,
    latent=LatentConfig(iterations=3),
    em=EMConfig(epochs=4, batch_size=50, held_out=100, evaluations=4, checkpoint_minutes=0),
)

SMALL = ft.DistillConfig(
    num_states=4, sequences=90, length=8, start="random", em=EMConfig(epochs=1, held_out=0)
)


@pytest.fixture(scope="module")
def finished(tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted distillation."""
    out = tmp_path_factory.mktemp("finished")
    ft.distill(str(tiny_lm), CONFIG, out=out, prompts=["w1 w2 w3"])
    return out


def test_the_folder_holds_hmm_card_and_metrics(finished: Path, tiny_lm: Path) -> None:
    hmm = ft.HMM.from_pretrained(finished)
    assert (hmm.num_states, hmm.vocab_size) == (8, 64)
    assert hmm.config.source_model == tiny_lm.name  # not its path
    facts = hmm.config.distillation
    assert facts["sequences"] == 500
    assert facts["settings"]["start"] == "latent"
    assert set(facts["memory_gain"]) == {"1", "2", "4"}
    card = (finished / "README.md").read_text()
    assert "library_name: foretrace" in card
    assert f"{facts['held_out_log_likelihood']:.4f}" in card
    assert "likelihood.png" in card
    assert str(tiny_lm.parent) not in card
    assert (finished / "likelihood.png").read_bytes().startswith(b"\x89PNG")
    assert len((finished / "metrics.jsonl").read_text().splitlines()) == 40
    assert not list(finished.rglob("*.partial"))
    assert not list(finished.rglob("hidden-*"))


def test_the_likelihood_grows(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    measured = [row["held_out"] for row in rows if row["held_out"] is not None]
    assert measured[-1] > measured[0] - 0.01
    assert measured[-1] > rows[-1]["baselines"]["unigram"] - 0.05


SCRIPT = """
import json, sys
import foretrace as ft
from foretrace.chat import as_messages
from foretrace.distill import EMConfig, LatentConfig
settings = json.loads(sys.argv[1])
settings["latent"] = LatentConfig(**settings["latent"])
settings["em"] = EMConfig(**settings["em"])
ft.distill(sys.argv[2], ft.DistillConfig(**settings), out=sys.argv[3], prompts=["w1 w2 w3"])
"""


def _start(tiny_lm: Path, out: Path) -> ForkServerProcess:
    arguments = (json.dumps(asdict(CONFIG)), str(tiny_lm), str(out))
    return forked.start(forked.script, SCRIPT, *arguments, stderr=Path(os.devnull))


def _kill_when(tiny_lm: Path, out: Path, reached: Callable[[], bool]) -> None:
    process = _start(tiny_lm, out)
    deadline = time.monotonic() + 120
    while not reached():
        assert process.is_alive(), "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.join()


def test_a_run_killed_at_every_stage_gives_the_same_hmm(
    tiny_lm: Path, tmp_path: Path, finished: Path
) -> None:
    """kill -9 while sampling, while computing hidden states, in EM: no shard is sampled twice."""
    work = tmp_path / "work"

    def shards() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in (work / "corpus").glob("shard-*")}

    _kill_when(tiny_lm, tmp_path, lambda: len(shards()) >= 3)
    sampled = shards()
    assert 3 <= len(sampled) < 15
    _kill_when(tiny_lm, tmp_path, lambda: any(work.rglob("hidden-*")))
    assert not (work / "start" / "hmm.safetensors").exists()
    assert sampled.items() <= shards().items()
    sampled = shards()
    assert len(sampled) == 15
    _kill_when(tiny_lm, tmp_path, lambda: (work / "em" / "checkpoint.safetensors").exists())
    assert not (tmp_path / "hmm.safetensors").exists()
    last = _start(tiny_lm, tmp_path)
    last.join()
    assert last.exitcode == 0
    assert shards() == sampled
    ours, theirs = (named_tensors(ft.HMM.from_pretrained(out)) for out in (tmp_path, finished))
    for name, table in theirs.items():
        assert torch.allclose(ours[name], table, atol=1e-6), name


def test_a_finished_distillation_is_not_repeated(tiny_lm: Path, finished: Path) -> None:
    observed: list[StageProgress] = []
    before = (finished / "hmm.safetensors").stat().st_mtime_ns
    ft.distill(
        str(tiny_lm), CONFIG, out=finished, prompts=["w1 w2 w3"], on_progress=observed.append
    )
    assert not observed
    assert (finished / "hmm.safetensors").stat().st_mtime_ns == before


def test_progress_of_a_random_start(tiny_lm: Path, tmp_path: Path) -> None:
    observed: list[StageProgress] = []
    hmm = ft.distill(str(tiny_lm), SMALL, out=tmp_path, on_progress=observed.append)
    assert hmm.num_states == 4
    assert [(item.stage, item.done, item.total) for item in observed] == [
        ("sampling", 720, 720),
        ("EM", 1, 1),
    ]


def test_other_settings_in_the_same_folder_are_refused(tiny_lm: Path, finished: Path) -> None:
    config = replace(CONFIG, num_states=9)
    with pytest.raises(InvalidFileError, match=r"num_states differ.*another --out"):
        ft.distill(str(tiny_lm), config, out=finished, prompts=["w1 w2 w3"])


def test_a_tokenizer_other_than_that_of_the_corpus_is_refused(
    tmp_path: Path, tiny_lm: Path, finished: Path
) -> None:
    """The corpus exists, and a model of the same name has other words."""
    import shutil

    shutil.copytree(finished / "work" / "corpus", tmp_path / "out" / "work" / "corpus")
    model = write_tiny_lm(tmp_path / tiny_lm.name, word_tokenizer([WORDS[0], *reversed(WORDS[1:])]))
    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        ft.distill(str(model), CONFIG, out=tmp_path / "out", prompts=["w1 w2 w3"])


def test_too_little_disk_space(tiny_lm: Path, tmp_path: Path) -> None:
    config = ft.DistillConfig(sequences=10**15)
    with pytest.raises(InvalidInputError, match=r"GB on disk, but has.*fewer sequences or states"):
        ft.distill(str(tiny_lm), config, out=tmp_path)


def test_a_mistake_can_be_corrected_in_the_same_folder(tiny_lm: Path, tmp_path: Path) -> None:
    """A wrong model name or other settings leave the folder usable."""
    with pytest.raises(InvalidFileError, match="no file or folder"):
        ft.distill(str(tmp_path / "nowhere"), SMALL, out=tmp_path)
    (tmp_path / "work" / "corpus").mkdir(parents=True)  # killed before the manifest was written
    ft.distill(str(tiny_lm), SMALL, out=tmp_path)
    (tmp_path / "hmm.safetensors").unlink()
    with pytest.raises(InvalidFileError, match=r"start was made with.*num_states.*remove it"):
        ft.distill(str(tiny_lm), replace(SMALL, num_states=5), out=tmp_path)
    with pytest.raises(InvalidFileError, match=r"corpus was drawn with.*length.*remove it"):
        ft.distill(str(tiny_lm), replace(SMALL, length=9), out=tmp_path)


def test_a_context_gain_that_cannot_be_measured_is_omitted(tiny_lm: Path, tmp_path: Path) -> None:
    """Rows are too short for a prefix of 12 tokens; the HMM is written nevertheless."""
    hmm = ft.distill(str(tiny_lm), SMALL, out=tmp_path)
    assert "memory_gain" not in hmm.config.distillation


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": "best"},
        {"num_states": 1},
        {"sequences": 0},
        {"seed": -1},
        {"sequences": 4096},  # as many as are held out
        {"sequences": 5000, "length": 2, "num_states": 50_000},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        ft.DistillConfig(**wrong)  # type: ignore[arg-type]


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="transformers or vllm"):
        LMConfig(engine="llama.cpp")


def test_publishing_uploads_hmm_card_and_metrics(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test double replaces the client of the hub."""
    import huggingface_hub

    uploaded: list[str] = []

    class HubDouble:
        def create_repo(self, repository: str, *, exist_ok: bool) -> str:
            assert exist_ok
            return f"https://hub.invalid/{repository}"

        def upload_folder(
            self, *, repo_id: str, folder_path: Path, allow_patterns: list[str]
        ) -> None:
            assert (repo_id, folder_path) == ("me/my-hmm", finished)
            uploaded.extend(allow_patterns)

    monkeypatch.setattr(huggingface_hub, "HfApi", HubDouble)
    assert publish(finished, "me/my-hmm") == "https://hub.invalid/me/my-hmm"
    assert all((finished / name).exists() for name in uploaded)
    assert {"hmm.safetensors", "config.json", "README.md"} <= set(uploaded)


def test_a_failed_upload_is_explained(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class HubDoubleThatIsDown:
        def create_repo(self, *args: object, **kwargs: object) -> str:
            raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "HfApi", HubDoubleThatIsDown)
    with pytest.raises(InvalidInputError, match=r"no route.*hf auth login"):
        publish(finished, "me/my-hmm")


@pytest.mark.parametrize(
    ("sequences", "shards"), [(300, 2), (4_000, 16), (102_400, 25), (1_000_000_000, 10_173)]
)
def test_the_default_shard_size_follows_the_number_of_sequences(
    sequences: int, shards: int
) -> None:
    config = ft.DistillConfig(num_states=8, sequences=sequences, em=EMConfig(held_out=10))
    assert config.sampling.shards == shards


@pytest.mark.parametrize("start", ["latent", "random"])
def test_an_hmm_of_answers_knows_all_ends(start: str, tmp_path: Path) -> None:
    model = write_tiny_lm(tmp_path / "lm", chat_tokenizer())
    config = replace(CONFIG, sequences=200, start=start, shard_rows=100)
    chats = [as_messages("w1 w2"), as_messages("w3")]
    hmm = ft.distill(str(model), config, out=tmp_path / "out", prompts=chats)
    end, other = hmm.config.eos_token_ids
    assert (end, other) == (1, 0)
    emission = hmm.emission.of_tokens(torch.tensor([end, other]))
    assert (emission[:, :-1] == 0).all()  # the last state alone ends texts
    assert emission[0, -1] > 0.99
    assert emission[1, -1] > 0
    assert float(emission[:, -1].sum()) == pytest.approx(1.0)
    sparse = hmm.sparsify(1e-3).emission.of_tokens(torch.tensor([end, other]))
    torch.testing.assert_close(sparse, emission, rtol=1e-3, atol=1e-5)
    again = ft.distill(str(model), config, out=tmp_path / "out", prompts=chats)
    assert torch.equal(again.initial, hmm.initial)
