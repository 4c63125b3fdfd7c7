"""Read an LM's last hidden state from its logits."""

from foretrace.context.features import token_embeddings
from foretrace.context.head import Head
from foretrace.context.probe import Probe, Reading
from foretrace.context.sources import read_head
from foretrace.context.storage import ProbeConfig

__all__ = ["Head", "Probe", "ProbeConfig", "Reading", "read_head", "token_embeddings"]
