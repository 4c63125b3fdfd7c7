"""Compare attributes that were made from a sentence with the same sentence as a prompt.

Set FORETRACE_DATA to a folder with `sentiment` and `detox`, whose prompts are continued, and
FORETRACE_TEXTS to a folder with NAME.texts.jsonl for each NAME of DESCRIPTIONS, as `foretrace fit
--describe` writes them. The judges are trained on `judge_texts`, which another language model
wrote, and the judge of *positive* on reviews: they have seen neither attributes nor prompts.
FORETRACE_ENCODER is their sentence encoder. The results are kept in FORETRACE_OUT, from which an
interrupted run resumes. --quick runs one description on a few prompts.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import yaml
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretrace import HMM, Attribute, FitConfig
from foretrace._hardware import default_dtype
from foretrace._tabular import read_rows
from foretrace.attribute import tokenize, word_tokens
from foretrace.context import Head, token_embeddings
from foretrace.engines.contrast import instruction_words
from foretrace.evaluate.report import write_report
from foretrace.evaluate.run import EvaluationConfig, evaluate
from foretrace.evaluate.suite import load_suite
from harness import Report, options
from smollm2 import find_smollm2

NUM_PROMPTS = 40
METHODS = "prompting", "medium", "strong"
JUDGE_TEXTS = Path(__file__).parent / "judge_texts"
HMM_FOLDER = Path(__file__).parent.parent / "examples" / "smollm2-135m"


class Description(NamedTuple):
    """A description, what it is held against, and the prompt that asks for the same."""

    wish: str
    against: str | None
    prompt: str


DESCRIPTIONS = {
    "positive": Description(
        "very positive, enthusiastic",
        "very negative, disappointed",
        "The following is a very positive, enthusiastic review.",
    ),
    "formal": Description(
        "formal business English",
        "casual chat",
        "The following text is written in formal business English.",
    ),
    "sea": Description("about the sea", None, "The following text is about the sea."),
    "polite": Description(
        "polite and friendly", "rude and insulting", "The following text is polite and friendly."
    ),
    "children": Description(
        "in simple words for small children",
        "in scientific language for experts",
        "The following text is in simple words for small children.",
    ),
}
REVIEW_TEXTS = "sentiment/sst2_test.jsonl.xz"
REVIEWS = {
    "train": {"file": REVIEW_TEXTS},
    "label": "positive",
    "judged": "1",
}


def suite_of(name: str, texts: Path) -> dict[str, Any]:
    """Return the suite of a description, as YAML has it."""
    description = DESCRIPTIONS[name]
    keep = instruction_words(description.wish, description.against)
    judge = REVIEWS
    if name != "positive":
        train = {"file": str((JUDGE_TEXTS / f"{name}.texts.jsonl").resolve())}
        judge = {"train": train, "label": "side", "judged": "for"}
    file = str((texts / f"{name}.texts.jsonl").resolve())
    steered = {level: {"goals": name, "level": level, "curve": "steered"} for level in METHODS[1:]}
    return {
        "prompts": {
            "file": "sentiment/prompts.jsonl.xz",
            "text": "prompt",
            "where": {"kind": "neutral"},
        },
        "calibration": {"file": "detox/train_prompts.jsonl.xz", "text": "prompt"},
        "continuations": 5,
        "attributes": {name: {"file": file, "score": "score", "keep": keep}},
        "methods": {
            "bare": {},
            "prompting": {"instruction": description.prompt + "\n\n{prompt}", "curve": "prompting"},
            **steered,
        },
        "judges": {name: {"figures": ["mean"], **judge}},
    }


def main() -> None:
    """Evaluate every description."""
    args = options(__doc__)
    folders = {key: Path(os.environ[f"FORETRACE_{key}"]) for key in ("DATA", "TEXTS", "OUT")}
    report = Report("Attributes from a sentence, against the sentence as a prompt")
    lm = AutoModelForCausalLM.from_pretrained(find_smollm2(), dtype=default_dtype("cpu"))
    tokenizer, hmm = AutoTokenizer.from_pretrained(find_smollm2()), HMM.from_pretrained(HMM_FOLDER)
    for name in list(DESCRIPTIONS)[: 1 if args.quick else None]:
        out = folders["OUT"] / name
        out.mkdir(parents=True, exist_ok=True)
        suite = out / f"{name}.yaml"
        suite.write_text(yaml.safe_dump(suite_of(name, folders["TEXTS"])), "utf-8")
        config = EvaluationConfig(
            data=folders["DATA"],
            out=out,
            prompts=4 if args.quick else NUM_PROMPTS,
            methods=("strong",) if args.quick else METHODS,
            encoder=os.environ.get("FORETRACE_ENCODER"),
        )
        results = evaluate(load_suite(str(suite)), lm, tokenizer, hmm, config)
        write_report(results, out)
        add_rows(report, name, results)
        add_transfer(report, name, folders, tokenizer, hmm, lm)
    report.publish(args.json)


def add_transfer(
    report: Report, name: str, folders: dict[str, Path], tokenizer: Any, hmm: HMM, lm: Any
) -> None:
    """Add the AUC on the judge's texts, which another language model wrote."""
    own = read_rows(folders["TEXTS"] / f"{name}.texts.jsonl", ["text", "score"])
    if name == "positive":
        rows = read_rows(folders["DATA"] / REVIEW_TEXTS, ["text", "positive"])
        truth = [int(row["positive"]) for row in rows]
    else:
        rows = read_rows(JUDGE_TEXTS / f"{name}.texts.jsonl", ["text", "side"])
        truth = [int(row["side"] == "for") for row in rows]
    description = DESCRIPTIONS[name]
    keep = word_tokens(instruction_words(description.wish, description.against), tokenizer)
    fitted, judged = (tokenize([row["text"] for row in part], tokenizer) for part in (own, rows))
    frequencies = hmm.token_frequencies()
    embeddings = token_embeddings(Head.of_model(lm, tokenizer))
    kinds = {
        "words": (None, None),
        "priced": (frequencies, None),
        "shared": (frequencies, embeddings),
    }
    for kind, (p, table) in kinds.items():
        attribute = Attribute.fit(
            fitted.token_ids,
            [float(own[text]["score"]) for text in fitted.texts],
            vocab_size=len(tokenizer),
            groups=fitted.texts,
            config=FitConfig(objective="evidence", keep=keep),
            frequencies=p,
            embeddings=table,
        )
        labels = [truth[text] for text in judged.texts]
        auc = roc_auc_score(labels, attribute.probability(judged.token_ids))
        report.add(f"{name}, {kind}: AUC on the judge's texts", float(auc), "")


def add_rows(report: Report, name: str, results: dict[str, Any]) -> None:
    """Add the figures of a description."""
    metric = f"{name}, mean"
    for method, result in results["methods"].items():
        for figure, unit in ((metric, ""), ("perplexity", ""), ("price", "nats per token")):
            value = result["figures"].get(figure)
            if value is None:  # a prompt has no price
                continue
            label = f"{name}, {method}: {figure.removeprefix(f'{name}, ')}"
            report.add(label, value["value"], unit, interval=[value["low"], value["high"]])
    for comparison in results["at equal perplexity"]:
        if comparison["curve"] == "steered" and comparison["difference"] is not None:
            value, *interval = comparison["difference"]
            label = f"{name}, steered minus {comparison['rival']}, at its perplexity"
            report.add(label, value, "", at_least=0, interval=interval)


if __name__ == "__main__":
    main()
