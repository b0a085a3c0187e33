"""The versions of vLLM that engines run with."""

from __future__ import annotations

from rollout_store.job.engines import EngineError

SUPPORTED = ("0.32", "0.33")
REMEDY = "install das-rollout[worker,gpu], or das-rollout[worker,cpu] for engines on CPUs"
"""How to install the version that the tests run with."""


def unsupported_text(version: str) -> str:
    """Return why engines do not run with a version of vLLM, and what to install; empty if they do."""
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return ""
    return f"vLLM {version} is not supported, but {' and '.join(SUPPORTED)} are; install one of these, or {REMEDY}"


def check_vllm() -> None:
    """Check the version of the installed vLLM.

    Raises:
        EngineError: if it is not supported.
    """
    from vllm import __version__

    if text := unsupported_text(__version__):
        raise EngineError(text)
