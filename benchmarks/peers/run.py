"""Compare foretrace with other methods: train what they need, run the suites, write the page.

Set FORETRACE_DATA to the folder of the suites' data, FORETRACE_ENCODER and
FORETRACE_SECOND_ENCODER to sentence-transformers models for the judges, and FORETRACE_RESULTS to
the folder of all outputs. A run takes hours and resumes where it stopped. It keeps the texts of all
methods in docs/results/generations, and writes docs/results/peers.md from all suites that are
there. --suite runs one suite. --prompts, --continuations and --texts make a smaller comparison.
With --score, it judges such a file of texts again and prints the tables. With --quick, it trains on
a few texts and runs one suite on a few prompts, in a temporary folder.
Install first:

    pip install -r benchmarks/peers/requirements-experts.txt
    pip install -r benchmarks/peers/requirements-judges.txt
    pip install --no-deps -r benchmarks/peers/requirements-control-vectors.txt
"""

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

from transformers import AutoTokenizer

from evaluation import EXAMPLE, ROOT, run_suite
from foretrace.attribute import Attribute
from foretrace.cli.terminal import ProgressBars
from foretrace.evaluate.suite import Suite, load_suite
from foretrace.hmm import HMM
from peers.kept import ENDING, KeptTexts
from peers.page import GENERATIONS, SuitePart, judges_and_summary, write_page
from peers.parts import COMMAND, part
from peers.scores import compare_methods, judge_texts, score_by_attribute
from peers.sides import MOST_TEXTS
from peers.sizes import measure_sizes
from peers.train import ATTRIBUTE, Workshop, list_made
from smollm2 import find_smollm2

FOLDER = Path(__file__).parent  # of the suites
SUITES = ("detox-hard", "sentiment", "politics")
ATTRIBUTES = "attributes"  # the folder of fitted attributes in the outputs of `foretrace evaluate`
PROMPTS = 100
ENVIRONMENT = (
    "export FORETRACE_DATA=data FORETRACE_RESULTS=results "
    "FORETRACE_ENCODER=sentence-transformers/all-MiniLM-L6-v2 "
    "FORETRACE_SECOND_ENCODER=sentence-transformers/all-mpnet-base-v2\n"
)

# Few samples for the fit, and no judge to train.
QUICK = """
extends: {suite}
attributes:
  positive: {{file: sentiment/sst2_train.jsonl.xz, score: positive, samples: 32}}
judges:
  positive, VADER:
    figures: [mean]
    source: "peers.judges:sentiment"
    calibration: {{file: sentiment/sst2_dev.jsonl.xz}}
    calibration_score: positive
"""


def main() -> None:
    """Run everything that is not done."""
    arguments = parse_arguments()
    if arguments.score is not None:
        kept = KeptTexts.read(arguments.score)
        suite = load_suite(FOLDER / f"{kept.suite}.yaml")
        print("\n".join(judges_and_summary(compare_methods(judge_texts(kept, suite), suite))))
        return
    lm, data = find_smollm2(), Path(os.environ["FORETRACE_DATA"])
    hmm = Path(os.environ.get("FORETRACE_HMM", EXAMPLE))
    # The processes of `foretrace evaluate` import the plug-ins.
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not arguments.quick:
        workshop = Workshop(lm, hmm, data, most_texts=arguments.texts)
        counts = arguments.prompts, arguments.continuations
        pages = ROOT / "docs" / "results"
        for name in [arguments.suite] if arguments.suite else SUITES:
            run(FOLDER / f"{name}.yaml", workshop, pages, *counts)
            write(pages)
        return
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FORETRACE_RESULTS"] = scratch
        suite_file = Path(scratch) / "sentiment.yaml"
        suite_file.write_text(QUICK.format(suite=FOLDER / suite_file.name))
        run(suite_file, Workshop(lm, hmm, data, most_texts=64, pairs=16), Path(scratch), 2, 2)
        print(write(Path(scratch), Path(scratch)).read_text())


def parse_arguments() -> argparse.Namespace:
    """Parse the options from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few texts of one suite")
    parser.add_argument("--suite", choices=SUITES, help="run one suite")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of each suite")
    parser.add_argument("--continuations", type=int, help="of each prompt; else the suites'")
    parser.add_argument(
        "--texts", type=int, default=MOST_TEXTS, help="that each expert is trained on, at most"
    )
    parser.add_argument("--score", type=Path, metavar="FILE", help="of kept texts, to judge again")
    return parser.parse_args()


def run(
    suite_file: Path, workshop: Workshop, pages: Path, prompts: int, continuations: int | None
) -> None:
    """Train, run a suite, and keep its texts with all that the page says of them.

    Args:
        suite_file: The file of the suite.
        workshop: Makes what the methods need.
        pages: The folder of the page.
        prompts: The number of prompts.
        continuations: The number of continuations of each prompt; None for the suite's.
    """
    folder = Path(os.environ["FORETRACE_RESULTS"])
    suite = load_suite(suite_file)
    out, judges = folder / "peers" / suite.name, folder / "judges"
    with ProgressBars(resumes=True) as bars:
        workshop.make(suite, out / ATTRIBUTES, bars)
    more = () if continuations is None else ("--continuations", continuations)
    results = run_suite(str(suite_file), out, prompts, *more, judges=judges)
    kept = KeptTexts.collect(suite.name, results, out, workshop.data / suite.prompts.file)
    made = [one._asdict() for one in list_made(attribute_of(suite))]
    facts = {"made": made, "texts of a side": workshop.most_texts, "skip": suite.skip}
    facts |= serving_facts(workshop, suite)
    attribute = Attribute.load(part(attribute_of(suite), ATTRIBUTE))
    kept = score_by_attribute(kept, attribute, AutoTokenizer.from_pretrained(workshop.lm))
    judge_texts(kept, suite).record(**facts).write(pages / GENERATIONS)


def write(pages: Path, suites: Path = FOLDER) -> Path:
    """Write the page from all suites whose texts are kept; return its path.

    Args:
        pages: The folder of the page.
        suites: The folder of the suites' files.
    """
    parts = {}
    for name in SUITES:
        file = pages / GENERATIONS / f"{name}{ENDING}"
        if file.is_file():
            kept = KeptTexts.read(file)
            suite = load_suite(suites / f"{name}.yaml")
            not_run = tuple(method for method in suite.methods if method not in kept.methods)
            parts[name] = SuitePart(kept, file, compare_methods(kept, suite), not_run)
    return write_page(pages, ENVIRONMENT + COMMAND, parts)


def serving_facts(workshop: Workshop, suite: Suite) -> dict[str, Any]:
    """Measure what the needs of many attributes are computed from."""
    lm, tokenizer = workshop.load_lm()
    name, hmm = attribute_of(suite), HMM.from_pretrained(workshop.hmm)
    sizes = measure_sizes(lm, workshop.hmm, hmm, Attribute.load(part(name, ATTRIBUTE)), name)
    instruction = str(suite.methods["prompting"].instruction)
    return {
        "sizes": asdict(sizes),
        "instruction tokens": len(tokenizer(instruction).input_ids),
    }


def attribute_of(suite: Suite) -> str:
    """Return the name of the attribute that a suite steers toward."""
    return next(iter(suite.attributes))


if __name__ == "__main__":
    main()
