"""Distill an HMM from a language model, or train one on token sequences.

The package is callable: `foretrace.distill(model, config, out=folder)` runs
`foretrace.distill.run.distill`.
"""

import sys
from types import ModuleType
from typing import Any

from foretrace.distill.config import DistillConfig, LMConfig
from foretrace.distill.em.config import EMConfig, Progress
from foretrace.distill.em.train import train
from foretrace.distill.latent import LatentConfig
from foretrace.distill.sampling.corpus import Corpus, Manifest

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


# Importing any module of this package makes Python bind the attribute `distill` of `foretrace` to
# the package, after this file has run. A function of that name would be replaced, so the package
# itself is callable. Its class is the only place where a module can define `__call__`.
class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `foretrace.distill.run.distill`."""
        from foretrace.distill.run import distill

        return distill(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
