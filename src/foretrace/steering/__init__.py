"""The steering of texts while they are written."""

from foretrace.steering.batch import Steering
from foretrace.steering.goal import Goal
from foretrace.steering.prefix_tracker import Matching
from foretrace.steering.request import Request
from foretrace.steering.state import Row

__all__ = ["Goal", "Matching", "Request", "Row", "Steering"]
