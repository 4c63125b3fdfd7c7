"""Write prompts for the HMM of a chat model: questions, headlines and reviews as requests.

    python examples/chat_prompts.py DATA OUT [--held-out]

DATA is a folder with `roles/rolebench.jsonl.xz`, `politics/train.jsonl.xz` and
`sentiment/sst2_train.jsonl.xz`; with `--held-out`, the test parts of the three are read. OUT is a
JSON Lines file with a column `messages`, for `foretrace distill --chat`.
"""

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADLINES = (
    "Write a short news article about: {}",
    "Summarise the story behind this headline: {}",
    'What do you think of the news "{}"?',
)
REVIEWS = (
    'Write a review of a film that begins: "{}"',
    "Continue this film review: {}",
    'What would you say about a film of which a critic wrote "{}"?',
)
SYSTEM = "You are {}. Answer in character."
OPENING_WORDS = (3, 10)  # of a review, fewest and most


def chats(data: Path, part: str) -> Iterator[list[dict[str, str]]]:
    """Yield every chat of a part of the data; every second role question has a system message."""
    rows = read(data / "roles" / "rolebench.jsonl.xz")
    questions = {row["question"]: row["role"] for row in rows if row["split"] == part}
    for number, (question, role) in enumerate(questions.items()):
        system = {"role": "system", "content": SYSTEM.format(role)}
        yield [system, user(question)] if number % 2 else [user(question)]
    choose = random.Random(0)
    for row in read(data / "politics" / f"{part}.jsonl.xz"):
        yield [user(choose.choice(HEADLINES).format(row["headline"]))]
    for row in read(data / "sentiment" / f"sst2_{part}.jsonl.xz"):
        words = row["text"].split()[: choose.randint(*OPENING_WORDS)]
        yield [user(choose.choice(REVIEWS).format(" ".join(words)))]


def user(content: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": content}


def read(path: Path) -> list[dict[str, Any]]:
    """Read compressed JSON Lines."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write prompts for `foretrace distill --chat`.")
    parser.add_argument("data", type=Path, help="folder of the data")
    parser.add_argument("out", type=Path, help="the file to write: .jsonl")
    parser.add_argument("--held-out", action="store_true", help="read the test parts")
    options = parser.parse_args()
    found = list(chats(options.data, "test" if options.held_out else "train"))
    lines = (json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in found)
    options.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
