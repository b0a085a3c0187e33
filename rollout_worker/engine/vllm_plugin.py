"""The vLLM plugin, which vLLM loads in each of its processes; see :mod:`rollout_worker.engine.vllm_patches_v2`."""

from __future__ import annotations


def register() -> None:
    """Let vLLM's V2 model runner use the drafter; engines without it are not affected."""
    from rollout_worker.engine.vllm_patches_v2 import install

    install()
