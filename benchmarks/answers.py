"""Log-likelihood of answers in chats under HMMs, in nats per token of the answer.

    python benchmarks/answers.py sample LM PROMPTS CORPUS [--answers 1000] [--length 100]
    python benchmarks/answers.py score CORPUS HMM [HMM ...] [--json FILE]
    python benchmarks/answers.py join CORPUS OUT

`sample` draws answers to a file of chats, as `foretrace distill --chat` does; it resumes. `score`
compares HMMs on them, with the gain over the first HMM and its standard error. An HMM reads each
prompt twice: after its last end of text, as in steering, and as a whole without ends. `join` writes
a corpus whose rows hold the whole prompts as well: train on both (`foretrace em`) and compare.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretrace.cli.loading import read_chats
from foretrace.distill import Corpus
from foretrace.distill.sampling.sample import SamplingConfig, sample
from foretrace.distill.sampling.transformers_source import TransformersSource
from foretrace.hmm import HMM, inference
from foretrace.steering.state import READ_BACK
from harness import Report

BATCH = 256


class Answers(NamedTuple):
    """Answers with their prompts."""

    prompts: list[list[int]]
    answers: list[list[int]]  # with the end, if they have one


def read_answers(corpus: Corpus) -> Answers:
    """Read all answers of a corpus."""
    answers = Answers([], [])
    for shard in corpus.shards():
        prompts = corpus.read_prompts(shard)
        if prompts is None:
            raise SystemExit(f"{corpus.folder} has no answers in chats.")
        for row, context, length in zip(
            corpus.read(shard).tolist(), prompts.contexts, prompts.lengths.tolist(), strict=True
        ):
            answers.prompts.append([*context, *row[:length]])
            answers.answers.append(_cut_after(row[length:], corpus.manifest.eos_token_id))
    return answers


def _cut_after(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def read_after_end(prompt: list[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt that steering reads."""
    recent = prompt[-READ_BACK:]
    last = max((i for i, token in enumerate(recent) if token in ends), default=-1)
    return recent[last + 1 :]


def read_whole(prompt: list[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt without ends."""
    return [token for token in prompt[-READ_BACK:] if token not in ends]


READINGS = {"after the last end": read_after_end, "whole prompt": read_whole}


@torch.inference_mode()
def log_likelihoods(hmm: HMM, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Tensor:
    """Compute log p(answer | prompt) of every answer: (n,)."""
    totals = []
    for first in range(0, len(answers), BATCH):
        pairs = list(
            zip(prompts[first : first + BATCH], answers[first : first + BATCH], strict=True)
        )
        tokens = pad_sequence([torch.tensor([*a, *b]) for a, b in pairs], batch_first=True)
        position = torch.arange(tokens.shape[1])
        begins = torch.tensor([len(prompt) for prompt, _ in pairs])[:, None]
        ends = begins + torch.tensor([len(answer) for _, answer in pairs])[:, None]
        total = torch.zeros(len(pairs), dtype=torch.float64)
        steps = inference.scan(hmm, tokens, position < ends)
        in_answer = ((position >= begins) & (position < ends)).T
        for counted, step in zip(in_answer, steps, strict=True):
            total += torch.where(counted, step.log_probability.double(), 0.0)
        totals.append(total)
    return torch.cat(totals)


def score(arguments: argparse.Namespace) -> None:
    """Compare HMMs, with the ends of the answers and without."""
    found = read_answers(Corpus(arguments.corpus))
    report = Report(f"{len(found.answers)} answers, nats per token")
    end = Corpus(arguments.corpus).manifest.eos_token_id
    without_end = [answer[:-1] if answer[-1] == end else answer for answer in found.answers]
    for title, answers in (("with ends", found.answers), ("without ends", without_end)):
        lengths = torch.tensor([len(answer) for answer in answers]).double()
        reference = None
        for path in arguments.hmms:
            hmm = HMM.from_pretrained(path)
            for reading, read in READINGS.items():
                prompts = [read(prompt, hmm.config.eos_token_ids) for prompt in found.prompts]
                nats = log_likelihoods(hmm, prompts, answers)
                name = f"{title}, {path.name}, {reading}"
                report.add(name, float(nats.sum() / lengths.sum()), "nats/token")
                if reference is None:
                    reference = nats
                    continue
                gain, error = mean_and_error(nats - reference, lengths)
                report.add("  gain over the first", gain, f"nats/token, s.e. {error:.4f}")
    report.publish(arguments.json)


def mean_and_error(totals: Tensor, lengths: Tensor) -> tuple[float, float]:
    """Return the mean per token of answers' totals, and its standard error."""
    mean = totals.sum() / lengths.sum()
    residuals = totals - mean * lengths
    return float(mean), float(residuals.square().sum().sqrt() / lengths.sum())


def draw(arguments: argparse.Namespace) -> None:
    """Sample answers."""
    source = TransformersSource.load(
        arguments.lm,
        chat=True,
        end_of_text_token=arguments.end_of_text,
        dtype=arguments.dtype,
    )
    config = SamplingConfig(arguments.answers, arguments.length, shard_rows=200, seed=1)
    sample(arguments.corpus, source, config, read_chats(arguments.prompts), print)


def join(arguments: argparse.Namespace) -> None:
    """Write a corpus whose rows begin with the whole prompt, without its ends."""
    corpus = Corpus(arguments.corpus)
    manifest = corpus.manifest
    found = read_answers(corpus)
    rows = [
        [*read_whole(prompt, manifest.eos_token_ids), *answer]
        for prompt, answer in zip(found.prompts, found.answers, strict=True)
    ]
    padded = pad_sequence(
        [torch.tensor(row) for row in rows],
        batch_first=True,
        padding_value=float(manifest.eos_token_id or 0),
    )
    out = Corpus.create(arguments.out, replace(manifest, length=padded.shape[1]))
    for part in torch.split(padded, max(shard.rows for shard in corpus.shards())):
        out.append(part)


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("sample")
    command.add_argument("lm")
    command.add_argument("prompts", type=Path)
    command.add_argument("corpus", type=Path)
    command.add_argument("--answers", type=int, default=1000)
    command.add_argument("--length", type=int, default=100)
    command.add_argument("--end-of-text")
    command.add_argument("--dtype", default="auto")
    command.set_defaults(run=draw)
    command = commands.add_parser("score")
    command.add_argument("corpus", type=Path)
    command.add_argument("hmms", type=Path, nargs="+")
    command.add_argument("--json", type=Path)
    command.set_defaults(run=score)
    command = commands.add_parser("join")
    command.add_argument("corpus", type=Path)
    command.add_argument("out", type=Path)
    command.set_defaults(run=join)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
