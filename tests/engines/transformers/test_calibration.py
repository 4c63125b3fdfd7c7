"""Calibration with a language model: levels whose price is that of the samples."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `transformers`")

from transformers import PreTrainedModel

from foretrace.attribute import Attribute
from foretrace.engines.transformers.calibration import (
    TOLERANCE,
    SteeredRuns,
    calibrate,
    write_openings,
)
from foretrace.engines.transformers.sampler import Sampler
from foretrace.errors import InvalidInputError
from foretrace.hmm import HMM
from foretrace.lookahead.levels import BUDGETS
from goals import compiled
from tiny_lm import WORDS, tiny_hmm, word_tokenizer

ENDS = [0]
PROMPTS = [[5, 6, 7], [8], [9, 10]]


@pytest.fixture(scope="module")
def hmm() -> HMM:
    return tiny_hmm(word_tokenizer())


def attributes() -> list[Attribute]:
    weights = torch.linspace(0.2, 1.0, len(WORDS))
    return [
        Attribute.from_weights(weights, name="weights"),
        Attribute.from_rewards(weights - 0.6, name="rewards"),
    ]


@pytest.mark.parametrize("attribute", attributes(), ids=lambda one: one.name)
def test_levels_cost_their_budgets(model: PreTrainedModel, hmm: HMM, attribute: Attribute) -> None:
    openings = write_openings(model, [0], ends=ENDS)
    runs = SteeredRuns(model, openings, ends=ENDS, max_new_tokens=12)
    levels = calibrate(runs, hmm, attribute)
    assert list(levels) == list(BUDGETS)
    for name, level in levels.items():
        assert level.price == pytest.approx(BUDGETS[name], rel=TOLERANCE)
        goal = compiled(hmm, attribute, 12, level.strength)
        assert runs.price(goal) == pytest.approx(level.price, rel=1e-4)


def test_price_is_that_of_the_sampler(model: PreTrainedModel, hmm: HMM) -> None:
    """Both estimate the same mean, from different random numbers."""
    goal = compiled(hmm, attributes()[0], 6, 3.0)
    torch.manual_seed(1)
    drawn = Sampler(model, ENDS, max_new_tokens=6, top_p=1.0).draw(PROMPTS, 300, goal)
    rows = [row for prompt in drawn for row in prompt]
    nats = sum(row.price * len(row.tokens) for row in rows)
    expected = nats / sum(len(row.tokens) for row in rows)
    runs = SteeredRuns(model, PROMPTS, ends=ENDS, copies=300, max_new_tokens=6)
    assert runs.price(goal) == pytest.approx(expected, rel=0.02)


def test_runs_use_the_same_random_numbers(model: PreTrainedModel, hmm: HMM) -> None:
    seen: list[tuple[str, int, int, str]] = []
    runs = SteeredRuns(
        model,
        PROMPTS,
        ends=ENDS,
        max_new_tokens=8,
        on_progress=lambda *update: seen.append(update),
    )
    prices = [
        runs.price(compiled(hmm, attributes()[0], 8, strength)) for strength in (1.0, 1.0, 1.01)
    ]
    assert prices[0] == prices[1] < prices[2] < 1.05 * prices[0]
    assert [done for _, done, *_ in seen] == [*range(1, 9)] * 3
    assert {update[2:] for update in seen} == {(8, "tokens")}


def test_continuations_have_prices_and_the_likelihood_of_the_bare_lm(
    model: PreTrainedModel, hmm: HMM
) -> None:
    runs = SteeredRuns(model, PROMPTS, ends=ENDS, copies=2, max_new_tokens=6)
    for goal in (None, compiled(hmm, attributes()[0], 6, 3.0)):
        drawn = runs.draw(goal)
        assert len(drawn) == 2 * len(PROMPTS)
        for prompt, row in zip(runs.prompts, drawn, strict=True):
            ids = torch.tensor([[*prompt, *row.tokens]])
            with torch.inference_mode():
                predicted = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            nats = -predicted.gather(1, ids[0, len(prompt) :, None]).sum()
            assert row.nats == pytest.approx(float(nats), rel=1e-4)
            assert (row.price == 0) is (goal is None)


def test_openings_do_not_end(model: PreTrainedModel) -> None:
    openings = write_openings(model, [0], ends=[0, 5], count=20)
    assert len(openings) == len({tuple(opening) for opening in openings}) == 20
    assert all(opening[0] == 0 and not {0, 5} & set(opening[1:]) for opening in openings)


def test_attributes_without_strength_are_refused(model: PreTrainedModel, hmm: HMM) -> None:
    runs = SteeredRuns(model, PROMPTS, ends=ENDS, max_new_tokens=4)
    for attribute in (~attributes()[0], Attribute.from_weights(torch.ones(len(WORDS)))):
        with pytest.raises(InvalidInputError, match="no strength to calibrate"):
            calibrate(runs, hmm, attribute)
    with pytest.raises(InvalidInputError, match="above 0 nats"):
        calibrate(runs, hmm, attributes()[0], {"mild": 0.0})
