"""Measure the price of attributes and of expressions over them, at every level.

SmolLM2 is steered with the HMM and the attributes of `examples/`, on prompts that their calibration
did not use. The environment variable FORETRACE_DATA names the folder of data with these prompts;
without it, openings that the LM writes take their place. Required text has a price of its own,
which is measured alone and added to the budget. --quick runs two expressions at `medium`, on fewer
and shorter texts.
"""

from collections import defaultdict
from functools import cache
from statistics import fmean

from transformers import AutoModelForCausalLM, AutoTokenizer

import foretrace as ft
from foretrace._hardware import default_dtype
from foretrace.attribute.expression import Contains
from foretrace.engines.token_bytes import TokenBytes
from foretrace.engines.transformers import calibration
from foretrace.lookahead.levels import BUDGETS
from foretrace.steering.goal_text import describe_goals
from harness import Report, options
from price import END, EXAMPLES, held_out_prompts
from smollm2 import find_smollm2

TOLERANCE = 0.25  # of the price, relative
PAIRS = (
    "positive & sport",
    "positive & political",
    "positive & nontoxic",
    "positive & entertainment",
    "negative & political",
    "negative & business",
    "nontoxic & technical",
    "business & technical",
    "sport & entertainment",
    "political & business",
    "positive & ~political",
    "nontoxic & positive & business",
)
TEXTS = ("water", "money", "phone", "family", "government", "summer", "music", "doctor")
QUICK = ("~positive", "positive & sport")


def main() -> None:
    """Measure every expression at every level, then the share that keeps its budget."""
    args = options(__doc__)
    report = Report("Prices of levels")
    source = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source)
    lm = AutoModelForCausalLM.from_pretrained(source, dtype=default_dtype("cpu"))
    hmm = ft.HMM.from_pretrained(EXAMPLES / "smollm2-135m")
    store = ft.AttributeStore(EXAMPLES / "attributes")
    prompts = held_out_prompts(tokenizer, lm, hmm, 16 if args.quick else 32)
    runs = calibration.SteeredRuns(lm, prompts, ends=END, max_new_tokens=8 if args.quick else 24)
    compiler = ft.Compiler(hmm, runs.max_new_tokens, exact=True)
    token_bytes = TokenBytes.of(tokenizer)

    @cache
    def contains(operand: Contains) -> ft.Attribute:
        return token_bytes.contains(operand)

    @cache
    def price(expression: str, level: str = "medium") -> float:
        (text,) = describe_goals([ft.parse(expression)], level=level)
        return runs.price(compiler.compile(text.goals(store, contains)))

    groups = _groups(sorted(store))
    if args.quick:
        groups = {"quick": dict.fromkeys(QUICK)}
    for group, expressions in groups.items():
        ratios = defaultdict(list)
        for expression, text in expressions.items():
            alone = 0.0 if text is None else price(text)
            if text is not None:
                report.add(f"{text}: price", alone, "nats")
            for level in ["medium"] if args.quick else BUDGETS:
                ratio = price(expression, level) / (BUDGETS[level] + alone)
                name = f"{expression}, {level}: price / budget"
                report.add(name, ratio, "", at_least=1 - TOLERANCE, at_most=1 + TOLERANCE)
                ratios[level].append(ratio)
        for level, values in ratios.items():
            held = fmean(abs(value - 1) <= TOLERANCE for value in values)
            report.add(f"{group}, {level}: mean of price / budget", fmean(values), "")
            report.add(f"{group}, {level}: share within {TOLERANCE:.0%}", held, "")
    report.publish(args.json)


def _groups(names: list[str]) -> dict[str, dict[str, str | None]]:
    """Return the expressions of each kind, and the required text that each has."""
    texts = [f'contains("{text}")' for text in TEXTS]
    return {
        "~a": dict.fromkeys(f"~{name}" for name in names),
        "a & b": dict.fromkeys(PAIRS),
        "a & contains": {
            f"{name} & {text}": text for name, text in zip(names, texts, strict=False)
        },
        "a": dict.fromkeys(names),
    }


if __name__ == "__main__":
    main()
