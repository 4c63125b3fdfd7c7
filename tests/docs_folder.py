"""A folder with every file that the documentation names: `my-lm`, `my-hmm`, attributes, tables."""

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

    from foretrace.attribute import Attribute

PROJECT = Path(__file__).parent.parent
SENTENCE = (
    "the other driver said that a ship on the sea saw the coast and a lighthouse while we took the "
    "road to the city dear customer your refund is very kind hello sir"
)
POLITE = SENTENCE.split()
RUDE = ["fool", "idiot", "liar"]
NUM_TEXTS = 160
VOCAB_SIZE = 400
AUTHORS = ["Ann", "Bob", "Cid"]
SCORES = ("toxicity", "rudeness", "toxic")
JUDGE = "def score(texts):\n    return [float('fool' in text) for text in texts]\n"

Row = Mapping[str, object]


def write_docs_folder(folder: Path, *, lm: Path | None = None) -> Path:
    """Fill a folder; `lm` is the folder of a real LM to use instead of the tiny one.

    With a real LM the folder holds nothing else: the pages make their own attributes.
    """
    (folder / "examples").symlink_to(PROJECT / "examples")
    if lm is not None:
        (folder / "my-lm").symlink_to(lm)
        return folder
    rows = list(_scored_texts())
    tokenizer = docs_tokenizer()
    write_tiny_lm(folder / "my-lm", tokenizer, heads=1)  # vLLM on CPUs has no head size of 16
    (folder / "my_judge.py").write_text(JUDGE)
    prompts = [{"prompt": row["text"]} for row in rows[:8]]
    roles = [{"role": row["author"], "answer": row["text"]} for row in rows]
    for name, table in (("scored", rows), ("prompts", prompts), ("rolebench", roles)):
        _write_jsonl(folder / f"{name}.jsonl", table)
    for name in ("scored", "judged"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    tables: dict[str, Iterable[Row]] = dict.fromkeys(
        ("train", "judge_train", "perspective_calibration"), rows
    )
    tables["test_prompts_nontoxic"] = prompts
    tables["train_prompts"] = [{"prompt": row["text"]} for row in rows[8:24]]
    for name, content in tables.items():
        _write_jsonl(folder / "data" / "detox" / f"{name}.jsonl.xz", content)
    _write_chat_data(folder / "data", [str(row["text"]) for row in rows[:8]])
    _write_jsonl(folder / "train.jsonl.xz", rows)
    _write_jsonl(folder / "train_prompts.jsonl.xz", prompts)
    _write_models(folder, tokenizer)
    return folder


def docs_tokenizer() -> "PreTrainedTokenizerFast":
    """Train a small byte-level tokenizer on the texts of the tables."""
    return byte_tokenizer([str(row["text"]) for row in _scored_texts()], VOCAB_SIZE)


def nontoxic(tokenizer: "PreTrainedTokenizerFast") -> "Attribute":
    """Make an attribute that gives the tokens of rude words half the weight of others."""
    import torch

    from foretrace.attribute import Attribute

    weights = torch.ones(len(tokenizer))
    weights[tokenizer(" ".join(RUDE)).input_ids] = 0.5
    return Attribute.from_weights(weights, name="nontoxic")


def _scored_texts() -> Iterable[Row]:
    """Make random texts; those with a rude word have a toxicity of 1."""
    generator = random.Random(0)
    for index in range(NUM_TEXTS):
        rude = index % 2
        words = [*generator.choices(POLITE, k=7), *generator.choices(RUDE, k=rude)]
        author = AUTHORS[index % 3]
        text = " ".join([*generator.sample(words, len(words)), f"w{index % 3 + 1}"])
        yield {"text": text, "author": author, **dict.fromkeys(SCORES, rude)}


def _write_chat_data(folder: Path, texts: list[str]) -> None:
    """Write the tables that `examples/chat_prompts.py` reads."""
    questions = [{"role": "Ann", "question": text, "split": "train"} for text in texts]
    _write_jsonl(folder / "roles" / "rolebench.jsonl.xz", questions)
    _write_jsonl(folder / "politics" / "train.jsonl.xz", [{"headline": text} for text in texts])
    _write_jsonl(folder / "sentiment" / "sst2_train.jsonl.xz", [{"text": text} for text in texts])


def _write_jsonl(file: Path, rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(lzma.compress(text) if file.suffix == ".xz" else text)


def _write_models(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Write an HMM, the same HMM in the format of TRACE, a corpus, and attributes."""
    import torch

    from foretrace.attribute import Attribute, AttributeStore
    from foretrace.distill import Corpus, Manifest
    from published import write_published

    vocab_size, hmm = len(tokenizer), tiny_hmm(tokenizer)
    hmm.save_pretrained(folder / "my-hmm")
    tiny_hmm(tokenizer, states=4).save_pretrained(folder / "small-hmm")
    write_published(folder / "their-checkpoint", hmm, "trace")
    manifest = Manifest(length=8, vocab_size=vocab_size, eos_token_id=0)
    Corpus.create(folder / "corpus", manifest).append(torch.randint(1, vocab_size, (400, 8)))
    store = AttributeStore(folder / "attributes")
    store.add(nontoxic(tokenizer))
    store.add(Attribute.from_weights(torch.linspace(0.9, 1, vocab_size), name="formal"))
    for name in ("positive", "negative", "political"):  # in place of examples/attributes
        store.add(Attribute.from_rewards(torch.linspace(-1, 1, vocab_size), name=name))
