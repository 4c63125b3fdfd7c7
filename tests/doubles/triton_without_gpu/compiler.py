"""A compiler that is never asked to compile."""

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):  # type: ignore[misc]
    """What Triton wants to know of a backend."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Only what the driver says."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Name it."""
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> Any:
        """There are none."""
        return options

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        """There are none."""

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, Any]:
        """There are none."""
        return {}
