# ruff: noqa: F401
"""Imports that take seconds, for the process that `forked` forks others from.

Nothing here may compute: a process that has started OpenMP threads cannot be forked safely. Where
an extra is not installed, the imports end at its first package, which costs time and nothing else.
"""

import pytest
import scipy.sparse
import sklearn.linear_model
import torch

import foretrace.cli
import foretrace.distill.run
import page_runner

# isort: split
import transformers.generation.utils
import transformers.models.llama.modeling_llama
import transformers.pipelines

import foretrace.engines.transformers

# isort: split
import faiss
import matplotlib.pyplot
import yaml

import foretrace.evaluate.run
