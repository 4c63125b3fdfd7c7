"""Time a filter step and the next-token probabilities of all tokens, sparse against dense.

4,096 states, V = 50,257 and 262,144, density 1% and 3%, float32. Both run in turns in one process.
"""

import torch

import harness
from foretrace.hmm import HMM, SparseEmission, inference

STATES = 4096
BATCHES = (1, 8)


def dense_hmm(vocab: int) -> HMM:
    """Build a dense HMM with uniform tables; the values do not affect the time."""
    return HMM(
        initial=torch.full((STATES,), 1 / STATES),
        transition=torch.full((STATES, STATES), 1 / STATES),
        emission=torch.full((vocab, STATES), 1 / vocab),
    )


def sparse_emission(vocab: int, density: float, num_states: int = STATES) -> SparseEmission:
    """Build a sparse emission with `density` of the entries, equally many for each token."""
    per_token = max(1, round(density * num_states))
    # One random state from each range.
    bounds = torch.arange(per_token + 1) * num_states // per_token
    states = bounds[:-1] + (torch.rand(vocab, per_token) * bounds.diff()).long()
    return SparseEmission(
        offsets=torch.arange(0, vocab * per_token + 1, per_token),
        states=states.flatten(),
        values=torch.rand(vocab * per_token) + 1e-3,
        background=torch.full((vocab,), 1 / vocab),
        leak=torch.full((num_states,), 1e-3),
    )


def memory_bytes(emission: SparseEmission) -> int:
    """Return the size of a sparse emission in memory."""
    tensors = emission.offsets, emission.states, emission.values, emission.background, emission.leak
    return sum(tensor.nbytes for tensor in tensors)


def compare(report: harness.Report, dense: HMM, density: float, repeats: int) -> None:
    """Time one sparse HMM against the dense one."""
    vocab = dense.vocab_size
    sparse = HMM(dense.initial, dense.transition, sparse_emission(vocab, density))
    assert isinstance(sparse.emission, SparseEmission)
    label = f"V={vocab:,} density {density:.0%}"
    dense_bytes = 4 * STATES * vocab
    sparse_bytes = memory_bytes(sparse.emission)
    report.add(f"{label}: emission in memory", sparse_bytes / 1e6, "MB")
    report.add(
        f"{label}: memory, dense / sparse", dense_bytes / sparse_bytes, "x", at_least=0.3 / density
    )
    for batch in BATCHES:
        predicted = dense.initial.expand(batch, -1).contiguous()
        tokens = torch.randint(0, vocab, (batch,))
        step_dense, step_sparse, all_dense, all_sparse = harness.seconds(
            lambda: inference.step(dense, predicted, tokens),  # noqa: B023
            lambda: inference.step(sparse, predicted, tokens),  # noqa: B023
            lambda: dense.emission.predict(predicted),  # noqa: B023
            lambda: sparse.emission.predict(predicted),  # noqa: B023
            repeats=repeats,
        )
        name = f"{label} batch {batch}"
        report.add(f"{name}: filter step", step_sparse * 1e3, "ms")
        report.add(
            f"{name}: filter step, sparse / dense", step_sparse / step_dense, "x", at_most=1.5
        )
        report.add(f"{name}: vocabulary, dense", all_dense * 1e3, "ms")
        report.add(f"{name}: vocabulary, sparse", all_sparse * 1e3, "ms")
        report.add(f"{name}: vocabulary, dense / sparse", all_dense / all_sparse, "x", at_least=3)


def main() -> None:
    """Run the comparison."""
    arguments = harness.options(__doc__)
    report = harness.Report(
        f"Inference at {STATES:,} states, float32, {torch.get_num_threads()} threads"
    )
    torch.manual_seed(0)
    for vocab in (50_257, 262_144):
        dense = dense_hmm(vocab)
        for density in (0.01, 0.03):
            compare(report, dense, density, repeats=5 if arguments.quick else 30)
        del dense
    report.publish(arguments.json)


if __name__ == "__main__":
    main()
