"""From token sequences to an HMM."""

from foretrace.distill.corpus import Corpus, Manifest
from foretrace.distill.em import train
from foretrace.distill.settings import EMConfig, Progress

__all__ = ["Corpus", "EMConfig", "Manifest", "Progress", "train"]
