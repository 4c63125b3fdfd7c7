"""Measured sizes, and what each method needs to serve many attributes at once."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from foretrace.attribute import Attribute
from foretrace.hmm import HMM
from foretrace.lookahead import Lookahead
from peers.control_vectors import VECTOR
from peers.experts import ANTI_EXPERT, EXPERT
from peers.lm_steer import MAP
from peers.parts import part, read_record, size
from peers.sasa import CANDIDATES, SUBSPACE
from peers.token_bias import BIAS

ATTRIBUTES = 64
BEST_OF = 4
HORIZON = 64  # the default of a suite's methods


@dataclass(frozen=True)
class Sizes:
    """Bytes of what methods keep in memory."""

    lm: int
    cached_token: int
    """Of the LM's keys and values, for one token of one sequence."""
    hmm: int
    attribute: int
    """Of one attribute and its lookahead table."""
    vector: int
    lm_steer: int
    bias: int
    subspace: int
    expert: int
    anti_expert: int


def measure_sizes(
    lm: PreTrainedModel, hmm_folder: Path, hmm: HMM, attribute: Attribute, name: str
) -> Sizes:
    """Measure the sizes of the LM, the HMM, and the parts of an attribute."""
    config = lm.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    values = 2 * config.num_hidden_layers * heads * head_size
    keys = (VECTOR, MAP, BIAS, SUBSPACE, EXPERT, ANTI_EXPERT)
    records = {key: read_record(part(name, key)) for key in keys}
    return Sizes(
        lm=sum(one.numel() * one.element_size() for one in lm.parameters()),
        cached_token=values * lm.dtype.itemsize,
        hmm=size(hmm_folder),
        attribute=Lookahead(hmm, attribute, HORIZON).nbytes,
        vector=records[VECTOR]["bytes"],
        lm_steer=records[MAP]["bytes"],
        bias=records[BIAS]["bytes"],
        subspace=records[SUBSPACE]["bytes"],
        expert=records[EXPERT]["bytes"],
        anti_expert=records[ANTI_EXPERT]["bytes"],
    )


@dataclass(frozen=True)
class Serving:
    """What a method needs beside the LM to serve requests with different attributes in a batch."""

    method: str
    memory: int
    """Bytes for all attributes, apart from the keys and values of sequences."""
    models: int
    """Models in memory, beside the LM, if adapters are merged into them."""
    passes: int
    """Tokens that an LM reads for each token of a request."""
    note: str


def serving_needs(sizes: Sizes, instruction_tokens: int, n: int = ATTRIBUTES) -> list[Serving]:
    """Compute the needs of every method from the sizes of one attribute."""
    cached = instruction_tokens * sizes.cached_token
    pair = sizes.expert + sizes.anti_expert
    return [
        Serving("foretrace", sizes.hmm + n * sizes.attribute, 0, 1, "the HMM and n tables"),
        Serving("prompting", n * cached, 0, 1, "keys and values of n instructions, if shared"),
        Serving("best of n", 0, 0, BEST_OF, f"{BEST_OF} sequences for each request"),
        Serving("self-debiasing", n * cached, 0, 2, "a second sequence for each request"),
        Serving("control vector", n * sizes.vector, 0, 1, "an engine that adds a vector per row"),
        Serving("LM-Steer", n * sizes.lm_steer, 0, 1, "an engine that has a map per row"),
        Serving("token bias", n * sizes.bias, 0, 1, "an engine that adds a bias per row"),
        Serving("SASA", n * sizes.subspace, 0, 2 + CANDIDATES, "a second cache of each sequence"),
        Serving("DExperts", n * pair, 2 * n, 3, "an engine that serves 2 n adapters in a batch"),
        Serving("fine-tuning", n * sizes.expert, n, 1, "an engine that serves n adapters"),
    ]
