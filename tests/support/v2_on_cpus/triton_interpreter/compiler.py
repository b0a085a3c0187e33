"""The compiler of the backend; see :mod:`triton_interpreter`."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend

MESSAGE = "Triton cannot compile for CPUs; set TRITON_INTERPRET=1 to run its kernels in the interpreter"


class InterpreterBackend(BaseBackend):
    """Supports no target."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Return False."""
        return False

    def hash(self) -> str:
        """Return the identity of the backend."""
        return "triton-interpreter"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        """Raise, because nothing is compiled."""
        raise RuntimeError(MESSAGE)

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> NoReturn:
        """Raise, because nothing is compiled."""
        raise RuntimeError(MESSAGE)

    def load_dialects(self, context: Any) -> None:
        """Do nothing."""

    def get_module_map(self) -> dict[str, Any]:
        """Return no modules."""
        return {}
