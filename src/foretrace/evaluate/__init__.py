"""What texts are worth: suites, judges, and the field's figures."""

from foretrace.evaluate.judges import Judge, Judgements, judge_texts, load_judge

__all__ = ["Judge", "Judgements", "judge_texts", "load_judge"]
