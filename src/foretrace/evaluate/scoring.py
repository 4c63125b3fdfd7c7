"""Who judges: judges trained or loaded, their agreement with others, and scores of texts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foretrace import _io
from foretrace.attribute import tokenize
from foretrace.errors import InvalidFileError
from foretrace.evaluate.judges import Judge, Score, judge_texts, load_judge
from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.evaluate.metrics import rank_correlation
from foretrace.evaluate.perspective import perspective_judge
from foretrace.evaluate.preparation import (
    Builder,
    Row,
    as_score,
    fill,
    identity,
    rows_identity,
)
from foretrace.evaluate.suite import JudgePlan, Table

BATCH, SLOW_BATCH = 512, 32  # of what is trained here, and of what others provide
HARMLESS = 0.05  # below that score of others, a text that is judged to have it is a false alarm
Observe = Callable[[int, int], None]


@dataclass
class Scorer:
    """Scores texts by one judge of a suite, and keeps the judgements."""

    name: str
    plan: JudgePlan
    data: Path
    folder: Path
    """Where judgements are kept."""
    judges: Path
    """Where judges are kept once they are trained."""
    encoder: str | None
    device: str
    tokenizer: Any
    builder: Builder
    _trained: LinearJudge | None = None
    _made: dict[str, Judge] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Say who judges, and how well they agree with whom they stand in for."""
        if self.plan.attribute is not None:
            return {"judge": f"the attribute {self.plan.attribute} itself"}
        if self.plan.train is None:
            who = {"judge": str(self.plan.source)}
        else:
            config = self._linear().config
            who = {
                "judge": f"linear, on TF-IDF{' and embeddings' if config.encoder else ''}",
                "trained on": config.source,
            }
        return who | self._agreement()

    def score(
        self, texts: Sequence[Sequence[str]], observe: Observe = lambda done, total: None
    ) -> list[list[Score]]:
        """Score every prompt's texts; a blank one has no score."""
        groups: dict[str, list[tuple[int, int]]] = {}
        for row, own in enumerate(texts):
            key = self._key(self.builder.prompts[row])
            groups.setdefault(key, []).extend(
                (row, place) for place, text in enumerate(own) if text.strip()
            )
        found: list[list[Score]] = [[None] * len(own) for own in texts]
        done, total = 0, sum(map(len, groups.values()))
        for places in groups.values():
            if not places:
                continue
            judge = self._judge(self.builder.prompts[places[0][0]])
            own = [texts[row][place] for row, place in places]
            scores = self._scores(own, judge, self.folder)
            for (row, place), score in zip(places, scores, strict=True):
                found[row][place] = score
            done += len(places)
            observe(done, total)
        return found

    def _scores(self, texts: list[str], judge: Judge, folder: Path) -> list[Score]:
        """Ask a judge what it has not been asked before, as far as that folder knows."""
        return judge_texts(
            texts,
            judge,
            cache=folder / "judgements" / f"{self.name}.jsonl",
            batch_size=BATCH if self.plan.source is None else SLOW_BATCH,
        ).scores

    def _key(self, row: Row) -> str:
        return fill(self.plan.attribute or self.plan.judged or "", row)

    def _judge(self, row: Row) -> Judge:
        """Give the judge of a prompt's own class or attribute, made once."""
        key = self._key(row)
        if key not in self._made:
            self._made[key] = self._make(row, key)
        return self._made[key]

    def _make(self, row: Row, key: str) -> Judge:
        plan = self.plan
        if plan.attribute is not None:
            attribute = self.builder.attribute(plan.attribute, row)
            return Judge(f"attribute {identity(attribute)}", self._by_attribute(attribute))
        if plan.source == "perspective":
            return perspective_judge(key or "TOXICITY")
        if plan.source is not None:
            return load_judge(
                plan.source, label=key or None, device=self.device, encoder=self.encoder
            )
        linear = self._linear()
        return Judge(f"{linear.identity} {key}", linear.scorer(key or None))

    def _by_attribute(self, attribute: Any) -> Callable[[list[str]], Sequence[Score]]:
        def score(texts: list[str]) -> list[Score]:
            windows = tokenize(texts, self.tokenizer, window=1 << 20)
            return [float(each) for each in attribute.probability(windows.token_ids)]

        return score

    def _linear(self) -> LinearJudge:
        """Load the linear judge, or train it once."""
        if self._trained is None:
            assert self.plan.train is not None  # of the kinds of judges, this one trains
            folder = self.judges / self.name
            note = folder / "plan.json"
            rows = self.plan.train.rows(self.data)
            plan = {
                "label": self.plan.label,
                "encoder": self.encoder,
                "rows": rows_identity(rows),
                **asdict(self.plan.train),
            }
            if not (note.is_file() and _io.read_json(note) == plan):
                note.unlink(missing_ok=True)
                train_judge(rows, self.plan.train, self.plan.label, self.encoder).save(folder)
                _io.write_json(note, plan)
            self._trained = LinearJudge.load(folder, encoder=self.encoder)
        return self._trained

    def _agreement(self) -> dict[str, Any]:
        """Compare with scores that others gave: rank correlation, AUC at 0.5, and false alarms."""
        from sklearn.metrics import roc_auc_score

        plan = self.plan.calibration
        if plan is None:
            return {}
        rows = plan.rows(self.data)
        # Kept with the judges, which suites share: it is the same for all of them.
        found = self._scores([row[plan.text] for row in rows], self._judge(rows[0]), self.judges)
        pairs = [
            (score, as_score(row[self.plan.calibration_score], self.plan.calibration_equals))
            for score, row in zip(found, rows, strict=True)
            if score is not None
        ]
        ours, theirs = np.array(pairs).T
        harmless = ours[theirs < HARMLESS]
        alarms = {"false alarms": float((harmless > 0.5).mean())} if len(harmless) else {}
        return {
            "calibrated on": plan.file,
            "texts": len(pairs),
            "spearman": rank_correlation(ours.tolist(), theirs.tolist()),
            "auc at 0.5": float(roc_auc_score(theirs > 0.5, ours)),
            **alarms,
        }


def train_judge(
    rows: Sequence[Row],
    table: Table,
    label: str,
    encoder: str | None,
    encoder_dtype: str = "float32",
) -> LinearJudge:
    """Train a linear judge on labelled texts."""
    if missing := sum(row.get(label) is None for row in rows):
        raise InvalidFileError(
            f"{table.file}: {missing} rows have no '{label}'. Name the column of labels."
        )
    return LinearJudge.train(
        [str(row[table.text]) for row in rows],
        [label_name(row[label]) for row in rows],
        encoder=encoder,
        encoder_dtype=encoder_dtype,
        source=Path(table.file).name if Path(table.file).is_absolute() else table.file,
    )


def label_name(value: Any) -> str:
    """Name a label: true and 1 are `1`, false and 0 are `0`."""
    if isinstance(value, bool | int | float):
        return f"{float(value):g}"
    return str(value)


def held_out_accuracy(judge: LinearJudge, rows: Sequence[Row], table: Table, label: str) -> float:
    """Give the share of texts whose likeliest class is their label."""
    likeliest = judge.probabilities([str(row[table.text]) for row in rows]).argmax(1)
    named = zip(likeliest, rows, strict=True)
    right = [judge.config.classes[k] == label_name(row.get(label)) for k, row in named]
    return float(sum(right) / max(1, len(right)))
