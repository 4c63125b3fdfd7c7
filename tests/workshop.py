"""A folder with all that the documentation speaks of: `my-lm`, `my-hmm`, `attributes`, tables."""

import csv
import json
import lzma
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tiny_lm import byte_tokenizer, tiny_hmm, write_tiny_lm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROJECT = Path(__file__).parent.parent
SPOKEN = (
    "the other driver said that a ship on the sea saw the coast and a lighthouse while we took the "
    "road to the city dear customer your refund is very kind hello sir"
)
PLAIN = SPOKEN.split()
RUDE = ["fool", "idiot", "liar"]
SIZE = 400  # tokens
AUTHORS = ["Ann", "Bob", "Cid"]
SCORES = ("toxicity", "rudeness", "toxic")
JUDGE = "def score(texts):\n    return [float('fool' in text) for text in texts]\n"

Row = Mapping[str, object]


def make_workshop(folder: Path, *, lm: Path | None = None) -> Path:
    """Fill a folder; with a tiny LM, or a real one."""
    (folder / "examples").symlink_to(PROJECT / "examples")
    if lm is not None:
        (folder / "my-lm").symlink_to(lm)
        return folder
    rows = list(_scored(160))
    tokenizer = byte_tokenizer([str(row["text"]) for row in rows], SIZE)
    write_tiny_lm(folder / "my-lm", tokenizer, heads=1)  # vLLM knows no heads of 16 on CPUs
    (folder / "my_judge.py").write_text(JUDGE)
    prompts = [{"prompt": row["text"]} for row in rows[:8]]
    roles = [{"role": row["author"], "answer": row["text"]} for row in rows]
    for name, table in (("scored", rows), ("prompts", prompts), ("rolebench", roles)):
        _write_lines(folder / f"{name}.jsonl", table)
    for name in ("scored", "judged"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    for name in ("test_prompts_nontoxic", "train", "judge_train", "perspective_calibration"):
        table = prompts if name.startswith("test") else rows
        _write_lines(folder / "data" / "detox" / f"{name}.jsonl.xz", table)
    _write_lines(folder / "train.jsonl.xz", rows)
    _write_lines(folder / "train_prompts.jsonl.xz", prompts)
    _write_models(folder, tokenizer)
    return folder


def _scored(count: int) -> Iterable[Row]:
    """Make up texts, of which those with a rude word are toxic."""
    chance = random.Random(0)
    for number in range(count):
        rude = number % 2
        words = [*chance.choices(PLAIN, k=7), *chance.choices(RUDE, k=rude)]
        author = AUTHORS[number % 3]
        text = " ".join([*chance.sample(words, len(words)), f"w{number % 3 + 1}"])
        yield {"text": text, "author": author, **dict.fromkeys(SCORES, rude)}


def _write_lines(file: Path, rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(lzma.compress(text) if file.suffix == ".xz" else text)


def _write_models(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Write an HMM, the same as others publish them, a corpus, and attributes."""
    import torch

    from foretrace.attribute import Attribute, AttributeStore
    from foretrace.distill import Corpus, Manifest
    from published import write_published

    size, hmm = len(tokenizer), tiny_hmm(tokenizer)
    hmm.save_pretrained(folder / "my-hmm")
    write_published(folder / "their-checkpoint", hmm, "trace")
    corpus = Corpus.create(folder / "corpus", Manifest(length=8, vocab_size=size, eos_token_id=0))
    corpus.append(torch.randint(1, size, (400, 8)))
    store = AttributeStore(folder / "attributes")
    rude = torch.zeros(size)
    rude[tokenizer(" ".join(RUDE)).input_ids] = 0.5
    weights = {"nontoxic": 1 - rude, "formal": torch.linspace(0.9, 1, size)}
    for name, weight in weights.items():
        store.add(Attribute.from_weights(weight, name=name))
