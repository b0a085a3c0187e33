"""Connects the drafting loop to vLLM's ``custom_class`` proposer, the interface of the V1 model runner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_worker.engine.draft_settings import settings_of_request
from rollout_worker.engine.sampling_params import end_token_ids
from rollout_worker.engine.vllm_patches import patch_draft_sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.engine.drafting_loop import DraftingLoop, EngineArrays


class HistoryProposer:
    """Proposes drafts for every request that has :class:`DraftSettings`.

    vLLM creates a proposer in each worker process. It proposes nothing until :meth:`start`, which is only called on the
    rank whose drafts are used.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.sampling_patched = False
        """Whether vLLM's sampling of draft positions was defective and is patched."""
        self._device_type = str(vllm_config.device_config.device_type)
        self._runner: Any = None
        self._loop: DraftingLoop | None = None
        self._arrays: EngineArrays | None = None

    def load_model(self, *_: Any, **__: Any) -> None:
        """Patch vLLM's sampling. vLLM calls this in the worker process after its kernels were loaded."""
        self.sampling_patched = patch_draft_sampling(self._device_type)

    def start(self, runner: Any, loop: DraftingLoop, arrays: EngineArrays) -> None:
        """Start to propose drafts for the batch of *runner*, which *loop* writes to *arrays*."""
        self._runner, self._loop, self._arrays = runner, loop, arrays

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return drafts for the batch of this step.

        Args:
            sampled_token_ids: the tokens that were just sampled for each request in the batch: accepted draft tokens
                and one more; empty while its prompt is still being read.
            num_tokens_no_spec: number of tokens of each request, including the sampled ones, shape (max_num_reqs,).
            token_ids_cpu: ignored, because the loop knows the runner's array.
            slot_mappings: ignored.

        Returns:
            At most ``num_speculative_tokens`` tokens for each request.
        """
        loop, arrays, count = self._loop, self._arrays, len(sampled_token_ids)
        if loop is None or arrays is None or loop.skip_step():
            return [[] for _ in sampled_token_ids]
        batch = self._runner.input_batch
        new = [
            request_id
            for request_id, sampled in zip(batch.req_ids, sampled_token_ids, strict=False)
            if sampled and not loop.knows(request_id)
        ]
        loop.guard(lambda: self._add(loop, new))
        # A request that was preempted has lost its draft, so that this step has verified nothing of it.
        verified = np.fromiter(map(len, batch.spec_token_ids[:count]), np.int64, count)
        processed_tokens = int(self._runner.query_start_loc.np[count])
        loop.draft(batch.req_ids[:count], num_tokens_no_spec, np.arange(count), verified, processed_tokens)
        loop.plan()
        if loop.num_requests > count:
            # A preempted request is still among vLLM's requests and stays tracked.
            loop.keep_only(self._runner.requests.keys())
        lengths = arrays.lengths[:count].tolist()
        return [draft[:length] for draft, length in zip(arrays.drafts[:count].tolist(), lengths, strict=True)]

    def _add(self, loop: DraftingLoop, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._runner.requests[request_id]
            settings = settings_of_request(request)
            if settings is not None:
                loop.add(request_id, settings, request.prompt_token_ids, end_token_ids(request.sampling_params))
