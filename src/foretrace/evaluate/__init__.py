"""Evaluation of steered generation: suites, judges, metrics and reports."""

from foretrace.evaluate.judges import Judge, Judgements, judge_texts, load_judge
from foretrace.evaluate.plugin import Plugin

__all__ = ["Judge", "Judgements", "Plugin", "judge_texts", "load_judge"]
