"""Make pairs of a bare and a steered text for a blind reader, and score what the reader answers.

    python benchmarks/blind_pairs.py make LM FOLDER --hmm HMM --attributes ATTRIBUTES --goal GOAL
    python benchmarks/blind_pairs.py score FOLDER ANSWERS

`make` continues everyday openings, or the lines of --prompts, without and with steering from the
same random numbers. FOLDER/pairs.json has the texts as `prompt`, `a` and `b`, in random order, and
FOLDER/key.json says which one is steered. Give only the pairs to the reader, who answers `a`, `b`
or `tie` for each: which text is more like the goal? ANSWERS is a JSON list of these. `score` splits
ties, and prints the share of pairs in which the reader chose the steered text.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

STEERED = "steered"
ANSWERS = ("a", "b", "tie")
SIGNIFICANCE = 0.05
# Openings that can be continued in any style.
PROMPTS = """\
Yesterday morning we
The weather this week
After lunch, my sister
When I got to the office,
The new neighbours
Last weekend, the two of us
On the way home, I
The people next door
It took a long time before
My first day at the job
The bus was late, so
Before the trip, we
At the end of the evening,
The kitchen was
I called the shop because
Our plans for the summer
The man at the counter
Nobody had told us that
The film we saw
When the phone rang,
This morning the children
The package that arrived
Everyone in the room
I have been thinking about
The dinner was
Our teacher asked us to
The car made a noise, and
A few days ago, someone
The apartment had
She looked at the letter and
The game on Sunday
We waited outside until
The doctor said that
My brother wants to
The street was quiet when
Before going to bed, I
The party was supposed to
They decided that
It was almost midnight when
The coffee at that place"""


def make(arguments: argparse.Namespace) -> None:
    """Write pairs and their key, and print the price and the perplexity of both sides."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import foretrace as ft
    from foretrace._hardware import default_dtype
    from foretrace.evaluate.perplexity import token_nll

    lm = AutoModelForCausalLM.from_pretrained(arguments.lm, dtype=default_dtype("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(arguments.lm)
    prompts = (arguments.prompts.read_text("utf-8") if arguments.prompts else PROMPTS).splitlines()
    steerer = ft.Steerer(lm, tokenizer, hmm=arguments.hmm, attributes=arguments.attributes)
    strength: dict[str, Any] = {"level": arguments.level}
    if arguments.scale != 1:
        levels = steerer.attributes[arguments.goal].config.levels
        strength = {"strength": arguments.scale * levels[arguments.level]}
    texts = steerer.generate(
        prompts,
        arguments.goal,
        max_new_tokens=arguments.tokens,
        top_p=arguments.top_p,
        seed=arguments.seed,
        bare=True,
        **strength,
    )
    pairs = [
        (prompt, text.bare or "", text.text) for prompt, text in zip(prompts, texts, strict=True)
    ]
    write_pairs(pairs, arguments.out, arguments.seed)
    nats = token_nll(
        lm,
        lambda batch: tokenizer(list(batch)).input_ids,
        prompts,
        [sides for _, *sides in pairs],
    )
    bare, steered = (exp(fmean(chain.from_iterable(row[side] for row in nats))) for side in (0, 1))
    price = fmean(text.price for text in texts)
    print(f"perplexity {bare:.1f} bare, {steered:.1f} steered; {price:.3f} nats per token")


def write_pairs(pairs: Sequence[tuple[str, str, str]], folder: Path, seed: int) -> None:
    """Write prompts with their bare and steered texts, in random order, and the key."""
    choose = random.Random(seed)
    shown, key = [], []
    for prompt, bare, steered in pairs:
        letter = choose.choice("ab")
        a, b = (steered, bare) if letter == "a" else (bare, steered)
        shown.append({"prompt": prompt, "a": a, "b": b})
        key.append({STEERED: letter})
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("pairs", shown), ("key", key)):
        text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, "utf-8")


@dataclass(frozen=True)
class Reading:
    """What a blind reader chose.

    Attributes:
        steered: Pairs in which the reader chose the steered text.
        bare: Pairs in which the reader chose the bare text.
        ties: The other pairs.
    """

    steered: int
    bare: int
    ties: int

    @classmethod
    def of(cls, answers: Sequence[str], key: Sequence[str]) -> "Reading":
        """Compare answers with the letters of the steered texts."""
        if len(answers) != len(key) or not set(answers) <= set(ANSWERS):
            raise SystemExit(
                f"There are {len(answers)} answers for {len(key)} pairs. Give one of "
                f"{', '.join(ANSWERS)} for each pair, in their order."
            )
        ties = answers.count("tie")
        steered = sum(answer == letter for answer, letter in zip(answers, key, strict=True))
        return cls(steered, len(key) - ties - steered, ties)

    @property
    def count(self) -> int:
        """The number of pairs."""
        return self.steered + self.bare + self.ties

    @property
    def wins(self) -> float:
        """The number of pairs that the steered text wins, with half of the ties."""
        return self.steered + self.ties / 2

    def interval(self) -> tuple[float, float]:
        """Return a 95% interval of the share of wins, by Clopper and Pearson.

        Half a win makes the interval that of a number of pairs between two whole ones.
        """
        from scipy.stats import beta

        lost, half = self.count - self.wins, SIGNIFICANCE / 2
        low = beta.ppf(half, self.wins, lost + 1) if self.wins else 0.0
        high = beta.ppf(1 - half, self.wins + 1, lost) if lost else 1.0
        return float(low), float(high)


def score(arguments: argparse.Namespace) -> None:
    """Print the share of pairs that the steered texts win."""
    key = [row[STEERED] for row in json.loads((arguments.folder / "key.json").read_text("utf-8"))]
    reading = Reading.of(json.loads(arguments.answers.read_text("utf-8")), key)
    low, high = reading.interval()
    print(
        f"steered {reading.steered}, bare {reading.bare}, ties {reading.ties}: "
        f"{reading.wins / reading.count:.0%} [{low:.0%}, {high:.0%}]"
    )


def main() -> None:
    """Make pairs, or score answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    maker = commands.add_parser("make", help="write pairs and their key")
    maker.add_argument("lm")
    maker.add_argument("out", type=Path, metavar="FOLDER")
    maker.add_argument("--hmm", required=True)
    maker.add_argument("--attributes", required=True, help="the folder of attributes")
    maker.add_argument("--goal", required=True, help="an expression of attributes")
    maker.add_argument("--level", default="strong")
    maker.add_argument("--scale", type=float, default=1.0, help="times the strength of the level")
    maker.add_argument("--prompts", type=Path, help="a text file with one prompt per line")
    maker.add_argument("--tokens", type=int, default=40)
    maker.add_argument("--top-p", type=float, default=0.9)
    maker.add_argument("--seed", type=int, default=0)
    maker.set_defaults(run=make)
    scorer = commands.add_parser("score", help="score the answers of a reader")
    scorer.add_argument("folder", type=Path, metavar="FOLDER")
    scorer.add_argument("answers", type=Path, metavar="ANSWERS")
    scorer.set_defaults(run=score)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
