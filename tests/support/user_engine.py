"""An engine that a user starts without a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_worker.engine.config import engine_environment
from tests.support.engines import engine_config
from tests.support.responses import PROMPTS, WITHOUT_EOS

IN_CORE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@contextmanager
def vllm_on_cpus(model: Path) -> Iterator[None]:
    """The environment of vLLM on CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment(engine_config(model), os.environ).items():
            patch.setenv(name, value)
        yield


class UserEngine:
    """An engine of vLLM's ``LLM``."""

    def __init__(self, model: Path, *, in_process: bool = False, **arguments: Any) -> None:
        """Start the engine.

        Args:
            model: directory of the model.
            in_process: whether the engine runs in this process, as that of a trainer with colocated engines does.
            **arguments: further arguments of ``LLM``.
        """
        from vllm import LLM

        settings = {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 1 << 27,
            "enforce_eager": True,
        }
        with pytest.MonkeyPatch.context() as patch:
            if in_process:
                patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
                settings["distributed_executor_backend"] = IN_CORE_PROCESS
                # OMP_NUM_THREADS has no effect on a process that has loaded torch. Two threads on a busy machine with
                # two cores wait for each other in each operator.
                torch.set_num_threads(1)
                # vLLM looks for kernels in all modules. It fails at an object of this one, which claims to have any
                # attribute (seen in 0.32), if another test has imported numba.
                patch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)
            self.llm = LLM(str(model), **settings | arguments)

    def generate(self, **sampling: Any) -> list[Any]:
        """Return the outputs of vLLM for PROMPTS, by default one greedy response of 60 tokens to each."""
        from vllm import SamplingParams

        defaults = {"temperature": 0, "max_tokens": 60, "allowed_token_ids": WITHOUT_EOS}
        prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        return list(self.llm.generate(prompts, SamplingParams(**defaults | sampling), use_tqdm=False))

    def sample(self, **sampling: Any) -> list[list[int]]:
        """Return the tokens of the first response to each prompt; see :meth:`generate`."""
        return [list(output.outputs[0].token_ids) for output in self.generate(**sampling)]

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the rank that drafts."""
        (stats,) = filter(None, self.llm.collective_rpc("das_stats"))
        return dict(stats)

    def accepted_of_history(self) -> int:
        """Return how many draft tokens from earlier rollouts were accepted."""
        return int(self.stats()["labeled_counters"]["source_accepted_tokens"]["history"])

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()
