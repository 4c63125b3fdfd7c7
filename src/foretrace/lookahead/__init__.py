"""Lookahead: exact expectations over all futures, and the steering of texts by them."""

from foretrace.lookahead.goal import Goal
from foretrace.lookahead.lookahead import Lookahead
from foretrace.lookahead.matching import Matching
from foretrace.lookahead.row import Request, Row
from foretrace.lookahead.steering import Steering

__all__ = ["Goal", "Lookahead", "Matching", "Request", "Row", "Steering"]
