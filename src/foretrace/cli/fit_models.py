"""The LM, tokenizer and HMM of `foretrace fit`, and what they measure of an attribute."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import typer

from foretrace.cli.goal_options import (
    UNIGRAM,
    load_hmm,
    load_or_measure_gguf_hmm,
    load_or_measure_hmm,
    probe_builder,
    probe_for,
)
from foretrace.cli.llama_generator import load_gguf_tokenizer
from foretrace.cli.loading import load_lm, load_tokenizer
from foretrace.cli.report import print_report
from foretrace.cli.terminal import ProgressBars
from foretrace.gguf import is_gguf

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretrace.attribute import Attribute
    from foretrace.attribute.token_ids import Texts
    from foretrace.engines.transformers.text_classifier import TextClassifier
    from foretrace.hmm import HMM

FIT_LENGTH = 64  # tokens of texts, to measure frequencies for price-aware rewards


class Teaching(NamedTuple):
    """What an LM adds to a fit.

    Attributes:
        judge: Judges steered texts.
        samples: Samples of the LM with their scores, to fit rewards to.
    """

    judge: "TextClassifier | None" = None
    samples: "tuple[Texts, list[float]] | None" = None


@dataclass(frozen=True)
class Models:
    """What an attribute is fitted with and measured with."""

    name: str
    """The LM, or its tokenizer, as the user names it."""
    tokenizer: "PreTrainedTokenizerBase"
    lm: "PreTrainedModel | None" = None
    hmm_name: str = UNIGRAM
    hmm: "HMM | None" = None

    @classmethod
    def load(cls, lm: str | None, tokenizer: str, hmm: str | None, device: str, dtype: str) -> Self:
        """Load the tokenizer and, if they are named, the LM and the HMM.

        Without an HMM, measure the frequencies of the LM's tokens. Of a GGUF file, only its
        tokenizer, head and frequencies are used.
        """
        if lm is not None and is_gguf(lm):
            gguf_tokenizer = load_gguf_tokenizer(lm)
            measured = load_or_measure_gguf_hmm(hmm, lm, gguf_tokenizer, "cpu", FIT_LENGTH)
            return cls(lm, gguf_tokenizer, None, hmm or UNIGRAM, measured)
        if lm is not None:
            model, loaded_tokenizer = load_lm(lm, dtype, device)
            measured = load_or_measure_hmm(hmm, model, loaded_tokenizer, FIT_LENGTH)
            return cls(lm, loaded_tokenizer, model, hmm or UNIGRAM, measured)
        loaded_tokenizer = load_tokenizer(tokenizer)
        loaded_hmm = None if hmm is None else load_hmm(hmm, loaded_tokenizer, "cpu")
        return cls(tokenizer, loaded_tokenizer, None, hmm or UNIGRAM, loaded_hmm)

    @property
    def short_name(self) -> str:
        """The name of the LM, without the path of a folder."""
        return Path(self.name).name if Path(self.name).is_dir() else self.name

    def token_embeddings(self) -> "Tensor | None":
        """Return the embeddings of the LM's tokens, if there is an LM."""
        from foretrace.context import Head, read_head, token_embeddings

        if self.lm is not None:
            return token_embeddings(Head.of_model(self.lm, self.tokenizer))
        return token_embeddings(read_head(self.name)) if is_gguf(self.name) else None

    def teach(
        self,
        texts: Sequence[str],
        scores: Sequence[float],
        prompts: Sequence[str],
        file: Path | None,
        seed: int,
    ) -> "Teaching":
        """Fit a judge to texts, and with a file for samples of the LM, a classifier to score them.

        The file keeps the samples.
        """
        from foretrace.engines.transformers.judged_runs import fit_judge
        from foretrace.engines.transformers.samples import Classifiers, TeachingSamples

        assert self.lm is not None
        assert self.hmm is not None
        with ProgressBars(resumes=True) as bars:
            if file is None:
                return Teaching(fit_judge(self.lm, self.tokenizer, texts, scores, bars.update))
            teacher, judge = Classifiers.fit(
                self.lm, self.tokenizer, texts, scores, on_progress=bars.update
            )
            if teacher is None:
                return Teaching(judge)
            samples = TeachingSamples.draw(
                self.lm,
                self.tokenizer,
                file,
                prompts=prompts,
                ends=self.hmm.config.eos_token_ids,
                seed=seed,
                on_progress=bars.update,
            )
        return Teaching(judge, samples.scored(teacher))

    def measure(
        self,
        attribute: "Attribute",
        judge: "TextClassifier | None",
        texts: Sequence[str],
        scores: Sequence[float],
        prompts: Sequence[str],
        prompts_name: str,
        seed: int,
        *,
        states: Path | None,
        keep: Sequence[int],
    ) -> "Attribute":
        """Find the strengths of levels, measure what they change, and print a verdict.

        With a folder for states, add a context reward first, if it helps.
        """
        from foretrace.engines.transformers.context import add_context
        from foretrace.engines.transformers.verdict import calibrate_and_report

        assert self.lm is not None
        assert self.hmm is not None
        lm, tokenizer, hmm = self.lm, self.tokenizer, self.hmm
        build_probe = probe_builder(lm, tokenizer)
        with ProgressBars(resumes=True) as bars:
            if states is not None:
                attribute = add_context(
                    lm,
                    tokenizer,
                    hmm,
                    attribute,
                    judge=judge,
                    texts=texts,
                    scores=scores,
                    folder=states,
                    prompts=prompts,
                    keep=keep,
                    build_probe=build_probe,
                    seed=seed,
                    on_progress=bars.update,
                )
        if states is not None:
            typer.echo(attribute.config.fit["context"]["summary"])
        source = {"model": self.name, "hmm": self.hmm_name, "prompts": prompts_name}
        with ProgressBars(resumes=False) as bars:
            measured = calibrate_and_report(
                lm,
                tokenizer,
                hmm,
                attribute,
                prompts=prompts,
                judge=judge,
                probe=probe_for([attribute], build_probe),
                seed=seed,
                source=source,
                on_progress=bars.update,
            )
        assert measured.report is not None
        print_report(measured.report)
        return measured
