"""Backward tables of an attribute under an HMM, and the EAP of next tokens."""

from foretrace.lookahead.lookahead import Lookahead

__all__ = ["Lookahead"]
