"""A step of steering equals its definition, for every way in which it can be computed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from foretrace.attribute import Attribute, LogitAffine
from foretrace.hmm import HMM
from foretrace.steering import Compiler, Goal, Marker, Request, Steering
from foretrace.steering.batch_index import Kernels
from tiny import TOKENS, tiny_hmm
from tiny_attributes import SPELLED, attributes

KERNELS = {
    "cpu": Kernels.for_device(torch.device("cpu")),
    "gpu": Kernels.for_device(torch.device("cuda")),
    "rows in blocks": Kernels(1 << 19, TOKENS, False, False, False, True),
    "one correction": Kernels(1 << 19, None, True, False, True, True),
    "all rows limited": Kernels(1 << 19, TOKENS, False, True, True, False),
}
HORIZON, LIMIT = 2, 6
MARKER = Marker("ab", SPELLED)


def rewards(*values: float, first_only: bool = True) -> Attribute:
    return Attribute.from_rewards(values, first_only=first_only)


def goals() -> dict[str, list[Goal]]:
    """Return goals of every kind, by name."""
    known = attributes()
    plain = {name: [Goal(attribute, 1.0)] for name, attribute in known.items()}
    evidence = rewards(0.25, -0.5, 1.0, 0.1)
    must = known["must"]
    return {
        **plain,
        "two goals": [Goal(known["one"], 2.0), Goal(known["mixture"], 1.0)],
        "transform": [Goal(known["one"], transform=LogitAffine(3.0, -2.0))],
        "transform of a sum": [Goal(known["all"], transform=LogitAffine(0.5, 1.0))],
        "transform of a constraint": [Goal(must & known["one"], transform=LogitAffine(2.0, -1.0))],
        "product and transform": [
            Goal(known["one"], 1.0),
            Goal(known["or"], transform=LogitAffine(2.0, 0.0)),
        ],
        "evidence": [Goal(evidence, 1.0)],
        "evidence, every time": [Goal(rewards(0.25, -0.5, 1.0, 0.1, first_only=False), 1.0)],
        "evidence and product": [Goal(evidence, 1.0), Goal(known["one"], 1.0)],
        "evidence and constraint": [Goal(evidence, 1.0), Goal(must, 1.0)],
        "strong evidence": [Goal(rewards(9.0, -9.0, 3.0, -4.0), 1.0)],
        "strong evidence and constraint": [Goal(rewards(9.0, -9.0, 3.0, -4.0), 1.0), Goal(must)],
    }


def check_rows(
    hmm: HMM,
    rows: list[tuple[list[Goal], list[int]]],
    logits: Tensor,
    kernels: Kernels,
    **options: int | tuple[int, ...],
) -> Tensor:
    """Steer rows in one batch, compare them with the oracle, and return their logits."""
    compiler, steering = Compiler(hmm, HORIZON, exact=True), Steering(hmm, kernels=kernels)
    requests, expected = {}, []
    for row, (row_goals, generated) in enumerate(rows):
        request = Request(compiler.compile(row_goals), (1, 2), LIMIT, **options)  # type: ignore[arg-type]
        requests[row] = request
        expected.append(
            oracle.Row(
                hmm,
                compiler.merge(row_goals),
                generated,
                LIMIT,
                prompt=(1, 2),
                table_horizon=HORIZON,
                horizon=1 << 40 if request.horizon is None else request.horizon,
                stop_ids=request.stop_ids,
                neutral_end=row_goals[0].neutral_end,
            )
        )
    steering.start(requests, {row: generated for row, (_, generated) in enumerate(rows)})
    steered = logits.clone()
    prices = steering.reweight_(steered, [*range(len(rows))], measure=True)
    assert prices is not None
    for row, nats in enumerate(prices.nats.tolist()):
        assert nats == pytest.approx(oracle.price(logits[row], steered[row]), abs=2e-5)
        exact = expected[row].steer(logits[row])
        # A histogram finds the limit of the price, to about a percent.
        assert_same(steered[row], exact, atol=0.02 if expected[row].is_limited else 1e-5)
    return steered


def assert_same(steered: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """Compare probabilities, and which tokens are impossible."""
    assert torch.equal(steered.isinf(), expected.isinf())
    torch.testing.assert_close(
        steered.double().softmax(-1), expected.softmax(-1), rtol=0, atol=atol
    )


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("form", ["dense", "sparse", "eos"])
def test_all_kinds_of_goals_in_one_batch(form: str, kernels: Kernels) -> None:
    """With a stop token that may or may not be neutral, and tokens that the HMM does not know."""
    hmm, extra = tiny_hmm(form), 2
    cases = {name: goal for name, goal in goals().items() if not name.startswith("strong")}
    rows = []
    for number, (name, row_goals) in enumerate(cases.items()):
        if "transform" not in name and number % 2:
            row_goals = [replace(goal, neutral_end=False) for goal in row_goals]
        rows.append((row_goals, [[], [0], [3, 1], [0, TOKENS + 1, 0]][number % 4]))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(rows), TOKENS + extra, generator=generator)
    check_rows(hmm, rows, logits, kernels, stop_ids=(1, TOKENS))


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_the_horizon_of_a_request_limits_the_lookahead_but_not_constraints(
    kernels: Kernels,
) -> None:
    rows = [(goals()[name], [0]) for name in ("one", "all", "must", "weighed and must", "evidence")]
    logits = torch.randn(len(rows), TOKENS, generator=torch.Generator().manual_seed(1))
    check_rows(tiny_hmm("dense"), rows, logits, kernels, horizon=1)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_strong_rewards_are_limited(kernels: Kernels) -> None:
    """To one nat per step."""
    names = ("strong evidence", "strong evidence and constraint", "evidence")
    rows = [(goals()[name], generated) for name in names for generated in ([], [2])]
    logits = torch.randn(len(rows), TOKENS, generator=torch.Generator().manual_seed(2))
    steered = check_rows(tiny_hmm("dense"), rows, logits, kernels)
    assert oracle.price(logits[0], steered[0]) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", ["evidence and constraint", "strong evidence and constraint"])
def test_a_row_that_can_only_end_ends(name: str, kernels: Kernels) -> None:
    """A grammar leaves the end alone, and a constraint forbids it: its logit stays finite."""
    logits = torch.full((2, TOKENS), -torch.inf)
    logits[:, 3] = 0.0
    logits[1, 2] = 1.0
    rows = [(goals()[name], [0]), (goals()[name], [0])]
    hmm = tiny_hmm("dense")
    steered = check_rows(hmm, rows, logits, kernels, stop_ids=(3,))
    assert steered[0].softmax(-1)[3] == 1.0
    assert not steered.softmax(-1).isnan().any()


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(
    ("after", "window", "generated", "begin", "end"),
    [
        (None, 2, [0], 0, 2),
        (None, 2, [0, 1], 0, 2),
        (MARKER, None, [0], None, None),
        (MARKER, None, [0, 1], 2, None),
        (MARKER, 2, [3, 1, 0], 1, 3),
        (None, MARKER, [2, 0], 0, None),
        (None, MARKER, [0, 1, 2], 0, 2),
        (MARKER, Marker("c", SPELLED), [0, 1, 3], 2, None),
    ],
)
def test_a_goal_is_about_its_window(
    after: Marker | None,
    window: int | Marker | None,
    generated: list[int],
    begin: int | None,
    end: int | None,
    kernels: Kernels,
) -> None:
    hmm, attribute = tiny_hmm("dense"), attributes()["all"]
    goal = Goal(attribute, 1.0, after=after, window=window)
    steering = Steering(hmm, kernels=kernels)
    compiled = Compiler(hmm, HORIZON, exact=True).compile(goal)
    steering.start({0: Request(compiled, (1, 2), LIMIT)}, {0: generated})
    logits = torch.randn(1, TOKENS, generator=torch.Generator().manual_seed(3))
    row = oracle.Row(
        hmm, [(attribute, LogitAffine())], generated, LIMIT, (1, 2), HORIZON, begin=begin, end=end
    )
    expected = row.steer(logits[0])
    steering.reweight_(logits, [0])
    assert_same(logits, expected[None])
