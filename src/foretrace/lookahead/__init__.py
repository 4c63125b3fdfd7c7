"""Lookahead: exact expectations over all futures."""

from foretrace.lookahead.lookahead import Lookahead

__all__ = ["Lookahead"]
