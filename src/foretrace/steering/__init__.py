"""Goals, their compilation, and the steering of sequences while they are generated."""

from foretrace.steering.compiler import Compiler
from foretrace.steering.goal import CompiledGoal, Goal, Request
from foretrace.steering.markers import Marker
from foretrace.steering.steering import Steering

__all__ = ["CompiledGoal", "Compiler", "Goal", "Marker", "Request", "Steering"]
