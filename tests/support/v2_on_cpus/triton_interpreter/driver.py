"""The driver of the backend; see :mod:`triton_interpreter`."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.driver import DriverBase

from triton_interpreter.compiler import MESSAGE


class InterpreterDriver(DriverBase):
    """Is never active."""

    @classmethod
    def is_active(cls) -> bool:
        """Return False, so that Triton never chooses this driver."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        """Raise, because nothing is compiled."""
        raise RuntimeError(MESSAGE)

    def get_current_target(self) -> NoReturn:
        """Raise, because nothing is compiled."""
        raise RuntimeError(MESSAGE)

    def get_active_torch_device(self) -> Any:
        """Return the CPU."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> NoReturn:
        """Raise, because nothing is compiled."""
        raise RuntimeError(MESSAGE)
