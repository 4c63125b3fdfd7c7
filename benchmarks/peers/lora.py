"""Fine-tuning of a language model on texts by LoRA: resumable, with checkpoints."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretrace.evaluate.continuations import encode_with_bos
from peers.checkpoint import Checkpoint
from peers.parts import inputs_identity, is_made, write_record

Observe = Callable[[int, int], None]
IGNORED = -100  # the label of padding


@dataclass(frozen=True)
class LoraSettings:
    """The settings of a fine-tuning."""

    rank: int = 16
    learning_rate: float = 2e-4
    rows: int = 16
    longest: int = 64
    """Tokens of a text at most."""
    checkpoint_steps: int = 20
    seed: int = 0


DEFAULTS = LoraSettings()


class FineTuning:
    """A run of one epoch, which continues from its checkpoint.

    Args:
        lm: The language model. Its layers are replaced by ones with adapters.
        folder: Where the adapter is written when the run is complete.
        settings: The settings.
        inputs: A checksum of the texts and the settings. Other checkpoints are not continued.
    """

    def __init__(
        self, lm: PreTrainedModel, folder: Path, settings: LoraSettings, inputs: str
    ) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(settings.seed)  # of the adapters' first weights
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=2 * settings.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        self.model: Any = get_peft_model(lm, config)
        self.folder, self.settings = folder, settings
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=settings.learning_rate)
        self.checkpoint = Checkpoint(folder, inputs, self.trained, self.optimizer)
        self.step, self.seconds = self.checkpoint.restore()

    def run(self, batches: Sequence[Sequence[Sequence[int]]], observe: Observe) -> None:
        """Train on the batches that are left, and write the adapter."""
        self.model.train()
        while self.step < len(batches):
            start = perf_counter()
            self._train_on(batches[self.step], 1 - self.step / len(batches))
            self.step += 1
            self.seconds += perf_counter() - start
            if self.step % self.settings.checkpoint_steps == 0:
                self.checkpoint.save(self.step, self.seconds)
            observe(self.step, len(batches))
        scratch = self.folder.with_name(f"{self.folder.name}.partial")
        self.model.save_pretrained(scratch, save_embedding_layers=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        scratch.rename(self.folder)

    def _train_on(self, batch: Sequence[Sequence[int]], left: float) -> None:
        """Take a step; the learning rate falls linearly to 0 at the end of the epoch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * left
        ids, mask = pad_right(batch)
        labels = ids.masked_fill(mask == 0, IGNORED)
        loss = self.model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def train_adapter(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    folder: Path,
    bos_token_id: int | None,
    observe: Observe = lambda done, total: None,
    settings: LoraSettings = DEFAULTS,
) -> None:
    """Fine-tune an LM on texts; nothing if the adapter is there.

    The end of text is not trained, so that experts end texts about as often as the LM.

    Args:
        lm: The language model. It cannot be used for anything else afterwards.
        tokenizer: Its tokenizer.
        texts: The texts.
        folder: The folder of the adapter.
        bos_token_id: The token before every text, as in the evaluation.
        observe: A function that is called after each step with the steps done and all steps.
        settings: The settings.
    """
    inputs = inputs_identity(texts, settings)
    if is_made(folder, inputs):
        return
    encoded = [ids[: settings.longest] for ids in encode_with_bos(tokenizer, texts, bos_token_id)]
    run = FineTuning(lm, folder, settings, inputs)
    run.run(make_batches([ids for ids in encoded if len(ids) > 1], settings), observe)
    write_record(folder, inputs, run.seconds, len(texts))
    run.checkpoint.remove()


def make_batches(
    texts: Sequence[Sequence[int]], settings: LoraSettings
) -> list[list[Sequence[int]]]:
    """Make batches of texts of similar lengths, in a random order."""
    ordered = sorted(texts, key=len)
    batches = [
        list(ordered[start : start + settings.rows])
        for start in range(0, len(ordered), settings.rows)
    ]
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(batches), generator=generator)
    return [batches[index] for index in order.tolist()]


def pad_right(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pad rows on the right; return their ids and their mask, (n, longest) each."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask
