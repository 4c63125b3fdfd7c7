"""Evaluation of steered generation: suites, judges, metrics and reports."""

from foretrace.evaluate.judges import Judge, Judgements, judge_texts, load_judge

__all__ = ["Judge", "Judgements", "judge_texts", "load_judge"]
