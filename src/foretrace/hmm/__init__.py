"""Hidden Markov models over token ids, independent of tokenizers and language models."""

from foretrace.hmm.emission import DenseEmission, Emission
from foretrace.hmm.inference import Filtered
from foretrace.hmm.model import HMM
from foretrace.hmm.sparse import SparseEmission
from foretrace.hmm.storage import HMMConfig
from foretrace.hmm.transition import DenseTransition, Transition

__all__ = [
    "HMM",
    "DenseEmission",
    "DenseTransition",
    "Emission",
    "Filtered",
    "HMMConfig",
    "SparseEmission",
    "Transition",
]
