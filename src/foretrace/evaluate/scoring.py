"""The judges of a suite: training, loading, agreement with reference scores, and scoring."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foretrace import _io
from foretrace.attribute import Attribute, tokenize
from foretrace.errors import InvalidFileError, InvalidInputError
from foretrace.evaluate.judges import Judge, Score, judge_texts, load_judge, perspective_judge
from foretrace.evaluate.linear_judge import LinearJudge
from foretrace.evaluate.metrics import rank_correlation
from foretrace.evaluate.preparation import Row, fill_template, rows_identity, to_score
from foretrace.evaluate.suite import JudgePlan, Table

BATCH, SOURCE_BATCH = 512, 32  # of judges that foretrace computes, and of a `source`
HARMLESS = 0.05  # a text with a lower reference score that is judged positive is a false alarm
OnProgress = Callable[[int, int], None]
AttributeOf = Callable[[str, Row], Attribute]
"""A function from an expression and the row of a prompt to an attribute."""


@dataclass
class Scorer:
    """Scores texts with one judge of a suite, and caches the scores."""

    name: str
    plan: JudgePlan
    data: Path
    folder: Path
    """The folder of the cached scores."""
    judges: Path
    """The folder of trained judges, and of their scores of calibration texts."""
    encoder: str | None
    """The sentence encoder of linear judges whose plan names none."""
    device: str
    prompts: Sequence[Row]
    tokenizer: Any = None
    """The LM's tokenizer, for a judge that is an attribute."""
    attribute: AttributeOf | None = None
    """Builds the attribute of a judge that is one."""
    _linear_judge: LinearJudge | None = None
    _judges_by_key: dict[str, Judge] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Describe the judge, and measure its agreement with reference scores."""
        if self.plan.attribute is not None:
            return {"judge": f"the attribute {self.plan.attribute} itself"}
        if self.plan.train is None:
            description = {"judge": str(self.plan.source)}
        else:
            config = self._load_or_train().config
            description = {
                "judge": f"linear, on TF-IDF{' and embeddings' if config.encoder else ''}",
                "trained on": config.source,
            }
        return description | self._agreement()

    def score(
        self, texts: Sequence[Sequence[str]], on_progress: OnProgress = lambda done, total: None
    ) -> list[list[Score]]:
        """Score the texts of every prompt; a blank text has no score."""
        groups: dict[str, list[tuple[int, int]]] = {}  # (prompt, text) indices of equal judges
        for prompt_index, prompt_texts in enumerate(texts):
            key = self._key(self.prompts[prompt_index])
            groups.setdefault(key, []).extend(
                (prompt_index, text_index)
                for text_index, text in enumerate(prompt_texts)
                if text.strip()
            )
        scores: list[list[Score]] = [[None] * len(prompt_texts) for prompt_texts in texts]
        done, total = 0, sum(map(len, groups.values()))
        for indices in groups.values():
            if not indices:
                continue
            judge = self._judge(self.prompts[indices[0][0]])
            group_texts = [texts[row][column] for row, column in indices]
            group_scores = self._judge_texts(group_texts, judge, self.folder)
            for (row, column), score in zip(indices, group_scores, strict=True):
                scores[row][column] = score
            done += len(indices)
            on_progress(done, total)
        return scores

    def _judge_texts(self, texts: list[str], judge: Judge, folder: Path) -> list[Score]:
        """Score texts, with the cache in a folder."""
        return judge_texts(
            texts,
            judge,
            cache=folder / "judgements" / f"{self.name}.jsonl",
            batch_size=BATCH if self.plan.source is None else SOURCE_BATCH,
        ).scores

    def _key(self, row: Row) -> str:
        """Return the class or attribute expression by which a prompt's texts are judged."""
        return fill_template(self.plan.attribute or self.plan.judged or "", row)

    def _judge(self, row: Row) -> Judge:
        """Return the judge for a prompt's class or attribute, built once."""
        key = self._key(row)
        if key not in self._judges_by_key:
            self._judges_by_key[key] = self._build_judge(row, key)
        return self._judges_by_key[key]

    def _build_judge(self, row: Row, key: str) -> Judge:
        plan = self.plan
        if plan.attribute is not None:
            assert self.attribute is not None
            attribute = self.attribute(plan.attribute, row)
            name = f"attribute {attribute.checksum}"
            return Judge(name, self._attribute_scorer(attribute))
        if plan.source == "perspective":
            return perspective_judge(key or "TOXICITY")
        if plan.source is not None:
            return load_judge(
                plan.source, label=key or None, device=self.device, encoder=self._encoder()
            )
        linear = self._load_or_train()
        return Judge(f"{linear.identity} {key}", linear.scorer(key or None))

    def _encoder(self) -> str | None:
        """Return the encoder of this judge: its plan's, or the evaluation's."""
        if self.plan.encoder is None:
            return self.encoder
        encoder = os.path.expandvars(self.plan.encoder)
        if encoder.startswith("$"):
            raise InvalidInputError(
                f"The judge '{self.name}' has the encoder {encoder}, but this environment "
                f"variable is not set. Set it to a sentence-transformers model: a folder or hub id."
            )
        return encoder

    def _attribute_scorer(self, attribute: Attribute) -> Callable[[list[str]], Sequence[Score]]:
        def score(texts: list[str]) -> list[Score]:
            windows = tokenize(texts, self.tokenizer, window=1 << 20)
            return [float(value) for value in attribute.probability(windows.token_ids)]

        return score

    def _load_or_train(self) -> LinearJudge:
        """Load the linear judge, or train and save it."""
        if self._linear_judge is None:
            assert self.plan.train is not None  # the only kind of judge that is trained
            folder = self.judges / self.name
            plan_file = folder / "plan.json"
            rows, encoder = self.plan.train.rows(self.data), self._encoder()
            plan = {
                "label": self.plan.label,
                "encoder": encoder,
                "rows": rows_identity(rows),
                **asdict(self.plan.train),
            }
            if not (plan_file.is_file() and _io.read_json(plan_file) == plan):
                plan_file.unlink(missing_ok=True)
                train_judge(rows, self.plan.train, self.plan.label, encoder).save(folder)
                _io.write_json(plan_file, plan)
            self._linear_judge = LinearJudge.load(folder, encoder=encoder)
        return self._linear_judge

    def _agreement(self) -> dict[str, Any]:
        """Compare with reference scores: rank correlation, AUC at 0.5, and false alarms."""
        from sklearn.metrics import roc_auc_score

        table = self.plan.calibration
        if table is None:
            return {}
        rows = table.rows(self.data)
        # Cached in the folder of the judges, which suites share: it is the same for all suites.
        scores = self._judge_texts(
            [row[table.text] for row in rows], self._judge(rows[0]), self.judges
        )
        pairs = [
            (score, to_score(row[self.plan.calibration_score], self.plan.calibration_equals))
            for score, row in zip(scores, rows, strict=True)
            if score is not None
        ]
        judged, reference = np.array(pairs).T
        harmless = judged[reference < HARMLESS]
        alarms = {"false alarms": float((harmless > 0.5).mean())} if len(harmless) else {}
        return {
            "calibrated on": table.file,
            "texts": len(pairs),
            "spearman": rank_correlation(judged.tolist(), reference.tolist()),
            "auc at 0.5": float(roc_auc_score(reference > 0.5, judged)),
            **alarms,
        }


def train_judge(
    rows: Sequence[Row],
    table: Table,
    label: str,
    encoder: str | None,
    encoder_dtype: str = "float32",
) -> LinearJudge:
    """Train a linear judge on the labelled texts of a table."""
    if missing := sum(row.get(label) is None for row in rows):
        raise InvalidFileError(
            f"{table.file}: {missing} rows have no '{label}'. Name the column with the labels."
        )
    return LinearJudge.train(
        [str(row[table.text]) for row in rows],
        [label_name(row[label]) for row in rows],
        encoder=encoder,
        encoder_dtype=encoder_dtype,
        source=Path(table.file).name if Path(table.file).is_absolute() else table.file,
    )


def label_name(value: Any) -> str:
    """Return the name of a label: `1` for true and 1, `0` for false and 0."""
    if isinstance(value, bool | int | float):
        return f"{float(value):g}"
    return str(value)


def held_out_accuracy(judge: LinearJudge, rows: Sequence[Row], table: Table, label: str) -> float:
    """Compute the share of texts whose most probable class is their label."""
    predictions = judge.probabilities([str(row[table.text]) for row in rows]).argmax(1)
    correct = [
        judge.config.classes[prediction] == label_name(row.get(label))
        for prediction, row in zip(predictions, rows, strict=True)
    ]
    return float(sum(correct) / max(1, len(correct)))
