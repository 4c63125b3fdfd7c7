"""Goals, requests, and the steering of sequences while they are generated."""

from foretrace.steering.goal import Goal
from foretrace.steering.prefix_tracker import PrefixTracker
from foretrace.steering.request import Request
from foretrace.steering.slots import SlotSteering
from foretrace.steering.window import Marker

__all__ = ["Goal", "Marker", "PrefixTracker", "Request", "SlotSteering"]
