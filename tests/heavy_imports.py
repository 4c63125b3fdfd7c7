"""Imports that take seconds, for the process that `forked` forks others from.

Nothing here may compute: a process that has started OpenMP threads cannot be forked safely.
"""

import warnings
from contextlib import suppress
from importlib import import_module

MODULES = (
    "faiss",
    "foretrace.cli",
    "foretrace.distill.run",
    "foretrace.engines.transformers",
    "foretrace.evaluate.run",
    "matplotlib.pyplot",
    "page_runner",
    "pytest",
    "scipy.sparse",
    "sklearn.linear_model",
    "torch",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.pipelines",
    "yaml",
)

with warnings.catch_warnings():
    warnings.simplefilter("error")
    for module in MODULES:
        with suppress(ImportError):  # tests that need a missing package are skipped
            import_module(module)
