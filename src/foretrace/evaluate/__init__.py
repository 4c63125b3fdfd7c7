"""What texts are worth: judges that score them."""

from foretrace.evaluate.judges import Judge, Judgements, judge_texts, load_judge

__all__ = ["Judge", "Judgements", "judge_texts", "load_judge"]
