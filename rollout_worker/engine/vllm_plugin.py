"""The vLLM plugin, which vLLM loads in each of its processes; see :mod:`rollout_worker.engine.vllm_patches_v2`."""

from __future__ import annotations


def register() -> None:
    """Let vLLM's V2 model runner use the drafter, and engines on CPUs receive weights over gloo.

    Engines that use neither are not affected. Further calls have no effect.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from rollout_api.weights.gloo import GLOO
    from rollout_worker.engine.vllm_patches_v2 import install

    install()
    if GLOO not in WeightTransferEngineFactory._registry:
        module = "rollout_worker.engine.gloo_weight_transfer"
        WeightTransferEngineFactory.register_engine(GLOO, module, "GlooWeightTransferEngine")
