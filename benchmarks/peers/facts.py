"""Facts of each method that need no measurement, and why some methods are absent."""

from typing import NamedTuple


class Facts(NamedTuple):
    """Facts of a method that do not depend on the measurement."""

    needs: str
    """What it needs of the LM and of the user."""
    decoding: str
    """What runs at every token."""
    two_attributes: str
    """Whether two attributes compose, and how."""


FACTS = {
    "foretrace": Facts(
        "the LM's logits; scored texts; to look ahead, an HMM of the LM",
        "1 pass of the LM, and products with the HMM's tables if there is one",
        "yes: one attribute by the algebra of expressions, with one table",
    ),
    "prompting": Facts(
        "an LM that follows instructions",
        "1 pass of the LM, with a longer prompt",
        "yes: both in words",
    ),
    "best of n": Facts(
        "a classifier of finished texts",
        "n passes of the LM",
        "yes: candidates are chosen by both; few candidates have both",
    ),
    "self-debiasing": Facts(
        "the LM's logits; an LM that follows the contrary instruction",
        "2 passes of the LM",
        "yes: one more pass for each attribute",
    ),
    "control vector": Facts(
        "the LM's layers; texts on both sides; a coefficient and layers to tune",
        "1 pass of the LM, and an addition in each layer",
        "vectors add up; nothing tells by how much they disturb each other",
    ),
    "LM-Steer": Facts(
        "the LM's last hidden states; texts on both sides; a coefficient to tune",
        "1 pass of the LM, and a product with a map of low rank before the head",
        "maps add up; nothing tells by how much they disturb each other",
    ),
    "token bias": Facts(
        "the LM's logits; texts on both sides, and the LM's last hidden states for the fit",
        "1 pass of the LM, and an addition to the logits",
        "biases add up",
    ),
    "SASA": Facts(
        "the LM's last hidden states; texts on both sides; a coefficient to tune",
        "1 pass of the LM, and a pass that reads the candidates for the next token",
        "margins add up, in the same pass",
    ),
    "DExperts": Facts(
        "the LM's logits; two fine-tuned LMs with the same vocabulary",
        "3 passes: the LM, the expert and the anti-expert",
        "differences add up; two more passes for each attribute",
    ),
    "fine-tuning": Facts(
        "the LM's weights; texts that have the attribute",
        "1 pass of the fine-tuned LM",
        "no: another fine-tuning for each combination",
    ),
}

LEFT_OUT = {
    "GeDi": "DExperts with one more trained model, and a worse trade-off in every published table",
    "FUDGE, RAD": "a pass of a trained network for every candidate of the next token",
    "PPLM, MuCoLa": "gradients through the LM at every token or text, which take minutes per text",
}
