"""From a language model, or from token sequences, to an HMM.

`foretrace.distill` is this package and also the function: `foretrace.distill(model, config, ...)`.
"""

import sys
from types import ModuleType
from typing import Any

from foretrace.distill.config import DistillConfig
from foretrace.distill.em.config import EMConfig, Progress
from foretrace.distill.em.train import train
from foretrace.distill.lm_config import LMConfig
from foretrace.distill.sampling.corpus import Corpus, Manifest
from foretrace.distill.start.latent import LatentConfig

__all__ = [
    "Corpus",
    "DistillConfig",
    "EMConfig",
    "LMConfig",
    "LatentConfig",
    "Manifest",
    "Progress",
    "train",
]


class _Callable(ModuleType):
    """A package that can be called: Python binds `foretrace.distill` to it, like it or not."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        from foretrace.distill.run import distill

        return distill(*given, **named)


sys.modules[__name__].__class__ = _Callable
