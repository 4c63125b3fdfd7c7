"""Measure attributes on real data: time to fit, ranking, and the cost of a store.

Set FORETRACE_DATA to a folder with `detox`, `roles`, `politics` and `sentiment` (JSON Lines,
compressed by xz), as the page of results describes them. --quick skips the mixture, the TF-IDF
baselines, the products of roles, and six of the eight ready-made attributes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from runpy import run_path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score

from foretrace import HMM, Attribute, AttributeStore, FitConfig, _tabular
from foretrace.attribute import Windows, tokenize
from foretrace.attribute.fitting.examples import token_counts
from foretrace.attribute.token_ids import Texts
from foretrace.vocabulary import fingerprint
from harness import Report, options
from smollm2 import find_smollm2

EXAMPLES = Path(__file__).parent.parent / "examples"
STORED = 1000
Rows = list[dict[str, Any]]


class Data:
    """The data files, and the tokenizer of SmolLM2."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self.folder = Path(os.environ["FORETRACE_DATA"])
        self.tokenizer = AutoTokenizer.from_pretrained(find_smollm2())
        self.vocab_size = len(self.tokenizer)
        self.fingerprint = fingerprint(self.tokenizer.get_vocab())

    def rows(self, name: str) -> Rows:
        """Read the rows of a file."""
        return _tabular.read_rows(self.folder / f"{name}.jsonl.xz")

    def windows(self, texts: list[str]) -> Windows:
        """Tokenize texts in windows, as for a fit."""
        return tokenize(texts, self.tokenizer)

    def fit(
        self,
        windows: Windows,
        scores: list[float],
        config: FitConfig,
        validation: tuple[Texts, list[float]] | None = None,
    ) -> Attribute:
        """Fit an attribute to windows of texts."""
        return Attribute.fit(
            windows.token_ids,
            [scores[text] for text in windows.texts],
            vocab_size=self.vocab_size,
            groups=windows.texts,
            config=config,
            validation=validation,
            tokenizer_fingerprint=self.fingerprint,
            tokenizer=self.tokenizer,
        )

    def probabilities(self, attribute: Attribute, windows: Windows) -> NDArray[np.float64]:
        """Return the mean probability of the windows of each text."""
        values = attribute.probability(windows.token_ids).numpy()
        return np.bincount(windows.texts, values) / np.bincount(windows.texts)


def main() -> None:
    """Run all measurements."""
    args = options(__doc__)
    report = Report("Attributes on real data, for SmolLM2's tokenizer")
    data = Data()
    nontoxic = _detoxification(data, report, quick=args.quick)
    _roles(data, report, quick=args.quick)
    _politics(data, report)
    _sentiment(data, report)
    _with_lm(data, report, quick=args.quick)
    _store(nontoxic, report)
    report.publish(args.json)


def _detoxification(data: Data, report: Report, *, quick: bool) -> Attribute:
    train, test = data.rows("detox/train"), data.rows("detox/validation")
    texts, scores = [row["text"] for row in train], [1 - row["toxicity"] for row in train]
    windows, held_out = data.windows(texts), data.windows([row["text"] for row in test])
    nontoxic = np.array([row["toxicity"] <= 0.5 for row in test])
    fitted, ranks = {}, {}
    configs = {
        "log-MSE": FitConfig(objective="log-mse"),
        "cross-entropy": FitConfig(objective="cross-entropy"),
        "evidence": FitConfig(objective="evidence"),
        "mixture of 4": FitConfig(terms=4),
    }
    validation = held_out.token_ids, [1 - test[text]["toxicity"] for text in held_out.texts]
    data.fit(windows, scores, configs["log-MSE"], validation)  # imports scikit-learn
    for name, config in list(configs.items())[: 3 if quick else 4]:
        start = perf_counter()
        fitted[name] = data.fit(windows, scores, config, validation)
        elapsed = perf_counter() - start
        limit = {"log-MSE": 1.0, "cross-entropy": 3.0, "evidence": 3.0}.get(name)
        report.add(f"nontoxic, {name}: time to fit", elapsed, "s", at_most=limit)
        ranks[name] = roc_auc_score(nontoxic, data.probabilities(fitted[name], held_out))
        least = {
            "cross-entropy": 0.92,
            "evidence": 0.915,
            "mixture of 4": ranks.get("cross-entropy"),
        }.get(name)
        report.add(f"nontoxic, {name}: AUC", ranks[name], "", at_least=least)
        record = fitted[name].config.fit
        report.add(f"nontoxic, {name}: tokens with weight", record["tokens_with_weight"], "")
        report.add(f"nontoxic, {name}: warnings", len(record["warnings"]), "")
    _logistic(data, report, windows, np.array(scores), held_out, nontoxic)
    if not quick:
        _ridge(report, train, test, nontoxic)
    return fitted["cross-entropy"]


def _logistic(
    data: Data,
    report: Report,
    windows: Windows,
    scores: NDArray[np.float64],
    held_out: Windows,
    nontoxic: NDArray[np.bool_],
) -> None:
    """Measure logistic regression on the same counts, with a bias and weights of either sign."""
    counts, others = (
        token_counts(split.token_ids, data.vocab_size) for split in (windows, held_out)
    )  # every held-out text has one window
    model = LogisticRegression(solver="liblinear").fit(counts, scores[windows.texts] >= 0.5)
    rank = roc_auc_score(nontoxic, model.decision_function(others))
    report.add("nontoxic, logistic regression on the same counts: AUC", rank, "")


def _ridge(report: Report, train: Rows, test: Rows, nontoxic: NDArray[np.bool_]) -> None:
    """Measure ridge regression on character n-grams, which no HMM can sum over."""
    n_grams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True, min_df=3)
    vectors = n_grams.fit_transform([row["text"] for row in train])
    ridge = Ridge(alpha=1.0).fit(vectors, [row["toxicity"] for row in train])
    predicted = ridge.predict(n_grams.transform([row["text"] for row in test]))
    rank = roc_auc_score(nontoxic, -predicted)
    report.add("nontoxic, ridge on TF-IDF of character n-grams: AUC", rank, "")


def _roles(data: Data, report: Report, *, quick: bool) -> None:
    rows = data.rows("roles/rolebench")
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    windows = data.windows([row["answer"] for row in train])
    labels = [train[text]["role"] for text in windows.texts]
    answers = data.windows([row["answer"] for row in test])
    roles_of_answers = np.array([row["role"] for row in test])

    def accuracy(config: FitConfig) -> float:
        """Fit all roles; return the share of answers whose own role ranks first."""
        fitted = list(
            Attribute.fit_each(
                windows.token_ids,
                labels,
                vocab_size=data.vocab_size,
                config=config,
                validation=(answers.token_ids, [roles_of_answers[text] for text in answers.texts]),
            )
        )
        table = np.stack([data.probabilities(attribute, answers) for attribute in fitted])
        names = np.array([attribute.name for attribute in fitted])
        return float((names[table.argmax(0)] == roles_of_answers).mean())

    start = perf_counter()
    rate = accuracy(FitConfig())
    elapsed, roles = perf_counter() - start, len(set(labels))
    report.add(f"{roles} roles: time to fit all, and to rank", elapsed, "s", at_most=20)
    report.add("roles: right one first", rate, "of answers", at_least=0.82)
    report.add("roles: chance", 1 / roles, "of answers")
    if not quick:
        rate = accuracy(FitConfig(objective="cross-entropy"))
        report.add("roles: right one first, products by absence", rate, "of answers")
        nearest = _nearest_centroid(train, [row["answer"] for row in test])
        rate = float((nearest == roles_of_answers).mean())
        report.add("roles: nearest TF-IDF centroid", rate, "of answers")


def _nearest_centroid(train: Rows, answers: list[str]) -> NDArray[np.str_]:
    words = TfidfVectorizer(sublinear_tf=True)
    vectors = words.fit_transform([row["answer"] for row in train])
    roles = np.array([row["role"] for row in train])
    names = np.unique(roles)
    centroids = np.stack([np.asarray(vectors[roles == name].mean(0)).ravel() for name in names])
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    return np.asarray(names[(words.transform(answers) @ centroids.T).argmax(1)])


def _politics(data: Data, report: Report) -> None:
    train, test = data.rows("politics/train"), data.rows("politics/test")
    articles = data.rows("politics/bbc_transfer")
    texts = data.windows([f"{row['headline']}. {row['description']}" for row in train])
    scores = [float(row["category"] == "POLITICS") for row in train]
    later = data.windows([f"{row['headline']}. {row['description']}" for row in test])
    others = data.windows([row["text"] for row in articles])
    truth = [row["category"] == "POLITICS" for row in test]
    truth_of_articles = [row["topic"] == "politics" for row in articles]
    absence = [1 - score for score in scores]
    fitted = {
        "product by absence": ~data.fit(texts, absence, FitConfig(objective="cross-entropy")),
        "evidence": data.fit(texts, scores, FitConfig(objective="evidence")),
    }
    for name, political in fitted.items():
        rank = roc_auc_score(truth, data.probabilities(political, later))
        report.add(f"political, {name}, later headlines: AUC", rank, "")
        rank = roc_auc_score(truth_of_articles, data.probabilities(political, others))
        report.add(f"political, {name}, BBC articles: AUC", rank, "")


def _sentiment(data: Data, report: Report) -> None:
    train, test = data.rows("sentiment/sst2_train"), data.rows("sentiment/sst2_test")
    texts, others = (data.windows([row["text"] for row in rows]) for rows in (train, test))
    for name in ("cross-entropy", "evidence"):
        config = FitConfig(objective=name)
        positive = data.fit(texts, [float(row["positive"]) for row in train], config)
        truth = [bool(row["positive"]) for row in test]
        rank = roc_auc_score(truth, data.probabilities(positive, others))
        report.add(f"positive, {name}: AUC", rank, "")


def _with_lm(data: Data, report: Report, *, quick: bool) -> None:
    """Fit the ready-made attributes to words alone, with token frequencies, and with embeddings.

    The price at strength 1 is half the variance of the next token's reward under the HMM's token
    frequencies.
    """
    hmm = HMM.from_pretrained(EXAMPLES / "smollm2-135m")
    make = run_path(str(EXAMPLES / "attributes" / "make.py"))
    maker = make["Maker"](data.folder, str(find_smollm2()), hmm)
    frequencies = maker.lm_settings["frequencies"]
    kinds = {"words": {}, "priced": {"frequencies": frequencies}, "embeddings": maker.lm_settings}
    for name in ("positive", "political") if quick else make["SOURCES"]:
        aucs, prices = {}, {}
        for kind, given in kinds.items():
            attribute = maker.fit(name, make["SOURCES"][name], **given)
            (evidence,) = attribute.evidence
            p, rewards = frequencies[evidence.tokens.long()], evidence.rewards.double()
            prices[kind] = float(p @ rewards**2 - (p @ rewards) ** 2) / 2
            aucs[kind] = attribute.config.fit["auc"]
        warned = any("function words" in one for one in attribute.config.fit["warnings"])
        for kind in kinds:
            least = None if kind == "words" else aucs["words"] - 0.001
            report.add(f"{name}, {kind}: AUC", aucs[kind], "", at_least=least)
            ratio = prices[kind] / prices["words"]
            report.add(f"{name}, {kind}: price at strength 1, of words alone", ratio, "")
        report.add(f"{name}: warning of function words", warned, "", at_most=0)


def _store(attribute: Attribute, report: Report) -> None:
    """Store copies of one attribute under many names; measure loading and memory."""
    with tempfile.TemporaryDirectory() as folder:
        store = AttributeStore(folder)
        for number in range(STORED):
            attribute.save(store.path(f"user {number}"))
        times = []
        for number in range(100):
            start = perf_counter()
            _ = store[f"user {number * 7}"]
            times.append(perf_counter() - start)
        size = store.path("user 0").stat().st_size
        num_bytes = _bytes_to_hold_all(folder)
    report.add("store: load one by name, median", 1e3 * float(np.median(times)), "ms", at_most=5)
    report.add(f"store: {STORED} in memory", num_bytes / 1e6, "MB", at_most=200)
    report.add("store: file of one", size / 1e3, "kB")
    report.add("store: a million in memory, extrapolated", 1e6 * num_bytes / STORED / 1e9, "GB")
    report.add("store: a million on disk, extrapolated", 1e6 * size / 1e9, "GB")


HOLD_ALL = """
import os, sys
from foretrace import AttributeStore

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

store = AttributeStore(sys.argv[1])
held = [store[next(iter(store))]]  # imports do not count
before = resident()
held += [store[name] for name in store]
print(resident() - before)
"""


def _bytes_to_hold_all(folder: str) -> int:
    """Load a store in a new process (Linux), where no freed memory is reused."""
    command = [sys.executable, "-c", HOLD_ALL, folder]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
