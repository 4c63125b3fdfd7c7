"""Imports that most pages of the documentation need, for the process that pages are forked from.

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
    "scipy.sparse",
    "sklearn.linear_model",
    "torch",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "yaml",
)

warnings.simplefilter("error")
for module in MODULES:
    with suppress(ImportError):  # a page that needs a missing package is skipped
        import_module(module)
