"""Steer a language model at decode time by the expected attribute probability of its texts."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrace.attribute import Attribute, AttributeStore, FitConfig, LogitAffine, parse
    from foretrace.distill.config import DistillConfig
    from foretrace.distill.run import distill
    from foretrace.engines import transformers
    from foretrace.engines.token_bytes import contains, marker
    from foretrace.engines.transformers import Steerer, generate
    from foretrace.errors import ForetraceError
    from foretrace.hmm import HMM, HMMConfig
    from foretrace.lookahead import Lookahead
    from foretrace.steering import CompiledGoal, Compiler, Goal
    from foretrace.vocabulary import fingerprint

__version__: str

__all__ = [
    "HMM",
    "Attribute",
    "AttributeStore",
    "CompiledGoal",
    "Compiler",
    "DistillConfig",
    "FitConfig",
    "ForetraceError",
    "Goal",
    "HMMConfig",
    "LogitAffine",
    "Lookahead",
    "Steerer",
    "__version__",
    "contains",
    "distill",
    "fingerprint",
    "generate",
    "marker",
    "parse",
    "transformers",
]

# Names are imported on first use, so that `import foretrace` costs milliseconds, not torch.
_HOMES = {
    "Attribute": "foretrace.attribute",
    "AttributeStore": "foretrace.attribute",
    "FitConfig": "foretrace.attribute",
    "LogitAffine": "foretrace.attribute",
    "parse": "foretrace.attribute",
    "HMM": "foretrace.hmm",
    "HMMConfig": "foretrace.hmm",
    "DistillConfig": "foretrace.distill.config",
    "ForetraceError": "foretrace.errors",
    "CompiledGoal": "foretrace.steering",
    "Compiler": "foretrace.steering",
    "Goal": "foretrace.steering",
    "Lookahead": "foretrace.lookahead",
    "Steerer": "foretrace.engines.transformers",
    "generate": "foretrace.engines.transformers",
    "marker": "foretrace.engines.token_bytes",
    "contains": "foretrace.engines.token_bytes",
    "transformers": "foretrace.engines",
    "fingerprint": "foretrace.vocabulary",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("foretrace")
    elif name == "distill":
        value = import_module("foretrace.distill")  # a package that can be called
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'foretrace' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
