"""From token sequences to an HMM."""

from foretrace.distill.corpus import Corpus, Manifest
from foretrace.distill.em import EMConfig, Progress, train

__all__ = ["Corpus", "EMConfig", "Manifest", "Progress", "train"]
