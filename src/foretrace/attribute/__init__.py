"""Attributes: token-weight classifiers that are fitted in a second and combined exactly."""

from foretrace.attribute.attribute import Attribute, TokenEffect
from foretrace.attribute.config import AttributeConfig
from foretrace.attribute.context import ContextReward
from foretrace.attribute.expression import Expression, as_expression, parse
from foretrace.attribute.fitting.candidate import FitConfig
from foretrace.attribute.fitting.examples import Windows, tokenize
from foretrace.attribute.fitting.words import group_terms, word_tokens
from foretrace.attribute.report import AttributeReport
from foretrace.attribute.store import AttributeStore
from foretrace.attribute.transform import LogitAffine

__all__ = [
    "Attribute",
    "AttributeConfig",
    "AttributeReport",
    "AttributeStore",
    "ContextReward",
    "Expression",
    "FitConfig",
    "LogitAffine",
    "TokenEffect",
    "Windows",
    "as_expression",
    "group_terms",
    "parse",
    "tokenize",
    "word_tokens",
]
