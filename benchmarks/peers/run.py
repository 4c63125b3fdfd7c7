"""Compare foretrace with other methods: train what they need, run the suites, write the page.

Set FORETRACE_DATA to the folder of the suites' data, FORETRACE_ENCODER and
FORETRACE_SECOND_ENCODER to sentence-transformers models for the judges, and FORETRACE_RESULTS to
the folder of all outputs. A run takes hours and resumes where it stopped. It writes
docs/results/peers.md and keeps the texts of all methods. --prompts, --continuations and --texts
make a smaller comparison. With --score, it judges such a file of texts again and prints the tables.
With --quick, it trains on a few texts and runs one suite on a few prompts, in a temporary folder.
Install first:

    pip install -r benchmarks/peers/requirements-experts.txt
    pip install -r benchmarks/peers/requirements-judges.txt
    pip install --no-deps -r benchmarks/peers/requirements-control-vectors.txt
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

from evaluation import EXAMPLE, ROOT, run_suite
from foretrace.attribute import Attribute
from foretrace.cli.terminal import ProgressBars
from foretrace.evaluate.suite import Suite, load_suite
from foretrace.hmm import HMM
from peers.kept import KeptTexts
from peers.page import SuitePart, judges_and_summary, write_page
from peers.parts import COMMAND, part
from peers.scores import score
from peers.sides import MOST_TEXTS
from peers.sizes import Serving, Sizes, measure_sizes, serving_needs
from peers.train import ATTRIBUTE, Workshop, list_made
from smollm2 import find_smollm2

BENCHMARKS = Path(__file__).parent.parent
SUITES = ("detox-hard", "sentiment", "politics")
PROMPTS = 100
ENVIRONMENT = (
    "export FORETRACE_DATA=data FORETRACE_RESULTS=results "
    "FORETRACE_ENCODER=sentence-transformers/all-MiniLM-L6-v2 "
    "FORETRACE_SECOND_ENCODER=sentence-transformers/all-mpnet-base-v2\n"
)


def main() -> None:
    """Run everything that is not done."""
    arguments = parse_arguments()
    if arguments.score is not None:
        kept = KeptTexts.read(arguments.score)
        print("\n".join(judges_and_summary(score(kept, load_suite(suite_file(kept.suite))))))
        return
    lm, data = find_smollm2(), Path(os.environ["FORETRACE_DATA"])
    hmm = Path(os.environ.get("FORETRACE_HMM", EXAMPLE))
    # The processes of `foretrace evaluate` import the plug-ins.
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not arguments.quick:
        workshop = Workshop(lm, hmm, data, most_texts=arguments.texts)
        sizes = arguments.prompts, arguments.continuations
        compare(SUITES, workshop, ROOT / "docs" / "results", *sizes)
        return
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FORETRACE_RESULTS"] = scratch
        workshop = Workshop(lm, hmm, data, most_texts=64, pairs=16)
        page = compare(("sentiment",), workshop, Path(scratch), 2, 2)
        print(page.read_text())


def parse_arguments() -> argparse.Namespace:
    """Parse the options from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few texts of one suite")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of each suite")
    parser.add_argument("--continuations", type=int, help="of each prompt; else the suites'")
    parser.add_argument(
        "--texts", type=int, default=MOST_TEXTS, help="that each expert is trained on, at most"
    )
    parser.add_argument("--score", type=Path, metavar="FILE", help="of kept texts, to judge again")
    return parser.parse_args()


def compare(
    names: Sequence[str], workshop: Workshop, pages: Path, prompts: int, continuations: int | None
) -> Path:
    """Train, run suites and write the page; return its path.

    Args:
        names: The suites.
        workshop: Makes what the methods need.
        pages: The folder of the page.
        prompts: The number of prompts of each suite.
        continuations: The number of continuations of each prompt; None for the suites'.
    """
    folder = Path(os.environ["FORETRACE_RESULTS"])
    files = {name: suite_file(name) for name in names}
    suites = {name: load_suite(file) for name, file in files.items()}
    with ProgressBars(resumes=True) as bars:
        for suite in suites.values():
            workshop.make(suite, bars)
    more = () if continuations is None else ("--continuations", continuations)
    parts = {}
    for name, suite in suites.items():
        out, judges = folder / "peers" / name, folder / "judges"
        results = run_suite(str(files[name]), out, prompts, *more, judges=judges)
        kept = KeptTexts.collect(name, results, out, workshop.data / suite.prompts.file)
        parts[name] = SuitePart(results, kept, kept.write(folder / "peers"), score(kept, suite))
    made = [one for suite in suites.values() for one in list_made(attribute_of(suite))]
    sizes, needs = measure_serving(workshop, suites[names[0]])
    counts = {"prompts": prompts, "continuations": continuations, "texts": workshop.most_texts}
    options = [f"--{name} {count}" for name, count in counts.items() if count is not None]
    command = " ".join([COMMAND, *options])
    return write_page(pages, ENVIRONMENT + command, parts, made, sizes, needs)


def suite_file(name: str) -> Path:
    """Return the file of a suite."""
    return Path(__file__).with_name(f"{name}.yaml")


def measure_serving(workshop: Workshop, suite: Suite) -> tuple[Sizes, list[Serving]]:
    """Measure the sizes of a suite's attribute, and compute the needs of many such attributes."""
    lm, tokenizer = workshop.load_lm()
    name, hmm = attribute_of(suite), HMM.from_pretrained(workshop.hmm)
    sizes = measure_sizes(lm, workshop.hmm, hmm, Attribute.load(part(name, ATTRIBUTE)), name)
    instruction = str(suite.methods["prompting"].instruction)
    return sizes, serving_needs(sizes, len(tokenizer(instruction).input_ids))


def attribute_of(suite: Suite) -> str:
    """Return the name of the attribute that a suite steers toward."""
    return next(iter(suite.attributes))


if __name__ == "__main__":
    main()
