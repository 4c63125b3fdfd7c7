"""Speed of EM: against bare matrix products, against hmmlearn, and as the vocabulary grows."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import Tensor

import harness
from foretrace._hardware import default_dtype
from foretrace.distill import Corpus, EMConfig, Manifest, train
from foretrace.distill.em.e_step import (
    STRETCH,
    BatchCounts,
    BatchParameters,
    EStep,
    Workspace,
)
from foretrace.distill.em.m_step import SMALLEST_FACTOR, Counts
from foretrace.hmm import HMM

LENGTH = 32
WORKSPACE = Workspace(torch.zeros(1))


def batch(states: int, sequences: int, length: int) -> tuple[BatchParameters, Tensor, BatchCounts]:
    """Build parameters, (sequences, length) tokens and zero counts."""
    torch.manual_seed(0)
    distinct = min(12_000, sequences * length // 4)  # tokens, about as many as in real text
    parameters = BatchParameters(
        initial=torch.softmax(torch.rand(states), 0),
        transition=torch.softmax(torch.randn(states, states), 1),
        rows=torch.softmax(torch.randn(distinct, states), 0),
    )
    index = torch.randint(0, distinct, (sequences, length))
    return parameters, index, BatchCounts.zeros(distinct, states, Workspace(parameters.initial))


def bare_products(
    left: Tensor, right: Tensor, matrix: Tensor, pair_sums: Tensor, length: int
) -> None:
    """Run the matrix products of EM alone: forward, backward and counting, per transition."""
    for _ in range(length - 1):
        torch.mm(left, matrix, out=right)
    for _ in range(length - 1):
        torch.mm(left, matrix.T, out=right)
        torch.mm(left.T, right, out=pair_sums)


def against_products(
    report: harness.Report, states: int, sequences: int, length: int, goal: float, repeats: int
) -> None:
    """Compare the E-step with its bare products, in float32, and in bfloat16 where it is native."""
    parameters, index, counts = batch(states, sequences, length)
    jobs = []
    has_bfloat16 = default_dtype("cpu") == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,):
        operands = torch.rand(sequences, states), torch.rand(sequences, states)
        squares = torch.rand(states, states), torch.zeros(states, states)
        left, right, matrix, pair_sums = (tensor.to(dtype) for tensor in (*operands, *squares))
        e_step = EStep(states, length, dtype, parameters.initial)
        jobs.append(partial(e_step.accumulate, parameters, index, counts))
        jobs.append(partial(bare_products, left, right, matrix, pair_sums, length))
    single, single_bare, *narrow = harness.seconds(*jobs, repeats=repeats)
    label = f"{states:,} states"
    work = 6 * sequences * (length - 1) * states**2 / 1e9
    report.add(f"{label}: E-step / bare products, float32", single / single_bare, "x", at_most=goal)
    report.add(f"{label}: E-step, float32", work / single, "GFLOPS")
    if has_bfloat16:
        half, half_bare = narrow
        report.add(f"{label}: E-step / bare products, bfloat16", half / half_bare, "x")
        report.add(f"{label}: E-step, float32 / bfloat16", single / half, "x", at_least=2)
        report.add(f"{label}: E-step, bfloat16", work / half, "GFLOPS")
    report.add(f"{label}: E-step, float32", sequences * length / single, "tokens/s")


def one_step(counts: Counts, e_step: EStep, texts: Tensor, step: float) -> None:
    """Run one EM step; a step size of 1 with all texts is an iteration of plain EM."""
    tokens, index = torch.unique(texts, return_inverse=True)
    batch_counts = BatchCounts.zeros(len(tokens), len(counts.initial), WORKSPACE)
    e_step.accumulate(counts.parameters(tokens), index, batch_counts)
    counts.update(tokens, batch_counts, step)


def plain_em(start: HMM) -> tuple[Counts, EStep]:
    """Set up EM without pseudocounts."""
    counts = Counts.from_hmm(start, LENGTH, pseudocount=0.0)
    return counts, EStep(start.num_states, LENGTH, torch.float32, counts.initial)


def hmmlearn_iteration(start: HMM, texts: Tensor) -> float:
    """Time one iteration of hmmlearn from the same start, with its fastest implementation."""
    from hmmlearn.hmm import CategoricalHMM

    identity = torch.eye(start.num_states)
    peer = CategoricalHMM(
        start.num_states,
        n_iter=1,
        init_params="",
        implementation="scaling",
        n_features=start.vocab_size,
    )
    peer.startprob_ = start.initial.double().numpy()
    peer.transmat_ = start.transition.predict(identity).double().numpy()
    peer.emissionprob_ = start.emission.predict(identity).double().numpy()
    peer.startprob_ /= peer.startprob_.sum()
    peer.transmat_ /= peer.transmat_.sum(1, keepdims=True)
    peer.emissionprob_ /= peer.emissionprob_.sum(1, keepdims=True)
    started = perf_counter()
    peer.fit(texts.reshape(-1, 1).numpy(), [LENGTH] * len(texts))
    return perf_counter() - started


def against_hmmlearn(report: harness.Report, vocab: int, sequences: int) -> None:
    """Compare one full-batch iteration with hmmlearn's."""
    start = HMM.random(256, vocab, seed=0)
    texts = torch.randint(0, vocab, (sequences, LENGTH), generator=torch.Generator().manual_seed(1))
    theirs = hmmlearn_iteration(start, texts)
    threads = torch.get_num_threads()
    iteration = partial(one_step, *plain_em(start), texts, 1.0)
    (ours,) = harness.seconds(iteration, repeats=5)
    torch.set_num_threads(1)
    (alone,) = harness.seconds(iteration, repeats=5)
    torch.set_num_threads(threads)
    label = f"256 states, V={vocab:,}, {sequences:,} sequences"
    report.add(f"{label}: hmmlearn", theirs, "s")
    report.add(f"{label}: foretrace", ours, "s")
    report.add(
        f"{label}: hmmlearn / foretrace, {threads} threads", theirs / ours, "x", at_least=100
    )
    report.add(f"{label}: hmmlearn / foretrace, 1 thread", theirs / alone, "x", at_least=60)


def memory(report: harness.Report) -> None:
    """Measure the peak memory of training relative to the parameters, in a separate process."""
    run = subprocess.run(
        [sys.executable, __file__, "--measure-memory"], capture_output=True, text=True, check=True
    )
    ratio = float(run.stdout)
    report.add("256 states, V=50,257: (peak - batch) / parameters", ratio, "x", at_most=3)


def measure_memory() -> None:
    """Print (peak memory of a training run - its batch) / parameters.

    The batch is the beliefs and messages of its sequences. The emission rows of its tokens, 3 of 4
    tokens of the vocabulary here, are not subtracted; nor is the start, or the checkpoint.
    """
    states, vocab, sequences = 256, 50_257, 2048

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def run(vocab: int) -> None:
        with TemporaryDirectory() as folder:
            corpus = Corpus.create(f"{folder}/corpus", Manifest(length=LENGTH, vocab_size=vocab))
            corpus.append(torch.randint(0, vocab, (sequences, LENGTH)))
            config = EMConfig(epochs=2, batch_size=sequences, held_out=0)
            train(HMM.random(states, vocab, seed=0), corpus, config, folder=f"{folder}/run")

    run(vocab=100)  # the memory of the libraries
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak()
    run(vocab)
    batch_bytes = 4 * states * sequences * (LENGTH + 2 * STRETCH + 1)
    print((peak() - before - batch_bytes) / (4 * states * (vocab + states)))


def as_vocabulary_grows(report: harness.Report, sequences: int, repeats: int) -> None:
    """Time the same batch with vocabularies of 50,257 and 262,144 tokens."""
    texts = torch.randint(0, 50_257, (sequences, LENGTH))
    times = {}
    for vocab in (50_257, 262_144):
        states = 1024
        counts = Counts(
            initial=torch.full((states,), 1 / states),
            transition=torch.full((states, states), LENGTH / states**2),
            emission=torch.full((vocab, states), LENGTH / states / vocab),
            total=torch.full((states,), LENGTH / states),
            pseudocount=1e-8,
            eos_token_id=None,
        )
        e_step = EStep(states, LENGTH, torch.float32, counts.initial)
        step_job = partial(one_step, counts, e_step, texts, 0.01)
        (step,) = harness.seconds(step_job, repeats=repeats)
        (fold,) = harness.seconds(partial(counts.emission.mul_, 0.999), repeats=3)
        # The factor falls by e per step on average, and is multiplied in at its minimum.
        times[vocab] = step + fold / -math.log(SMALLEST_FACTOR)
        report.add(f"one step, 1,024 states, V={vocab:,}", times[vocab], "s")
        del counts
    ratio = times[262_144] / times[50_257]
    report.add("one step, V=262,144 / V=50,257", ratio, "x", at_most=1.2)


def main() -> None:
    """Run all comparisons."""
    if sys.argv[1:] == ["--measure-memory"]:
        measure_memory()
        return
    options = harness.options(__doc__)
    quick = options.quick
    report = harness.Report(f"EM, {torch.get_num_threads()} threads")
    against_products(
        report, 1024, 1536 if quick else 4096, LENGTH, goal=1.2, repeats=3 if quick else 5
    )
    against_products(report, 4096, 256 if quick else 512, 16, goal=1.1, repeats=2 if quick else 9)
    for vocab in (10_000,) if quick else (10_000, 50_257):
        against_hmmlearn(report, vocab, 768 if quick else 2048)
    memory(report)
    as_vocabulary_grows(report, 256 if quick else 1024, repeats=3 if quick else 9)
    report.publish(options.json)


if __name__ == "__main__":
    main()
