"""Lookahead: exact expectations over all futures, and the steering of texts by them."""

from foretrace.lookahead.goal import Goal
from foretrace.lookahead.lookahead import Lookahead
from foretrace.lookahead.steering import Request, Steering, since_last_end

__all__ = ["Goal", "Lookahead", "Request", "Steering", "since_last_end"]
