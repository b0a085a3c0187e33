"""A shim that makes vLLM sample recorded tokens, so that all modes produce the same rollouts.

Just before sampling, the logit of the recorded token is set above all others at every position. The forward pass, the
sampler and the rejection sampler still do all their work, and a draft token is accepted if it equals the recorded
token. Acceptance measured in this way is called *replayed acceptance*: it does not show what the model would have
sampled after a token of its own that differs from the recording.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from rollout_api.protocol.messages import problem_id_of
from rollout_worker.engine.vllm_patches import patch_draft_sampling
from rollout_worker.engine.worker_extension import DraftingExtension, EngineExtension

_FORCED_LOGIT = 3e4
_NOT_FORCED = -1


class _ForcedSampling:
    """A mixin for vLLM worker extensions; its methods are called with ``collective_rpc``."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _bench_recorded: dict[str, np.ndarray]
    _bench_acceptance: dict[str, list[int]]
    _bench_records_acceptance = False
    _bench_shim_seconds = 0.0
    _bench_proposing_seconds = 0.0
    _bench_steps = 0

    def bench_install(self) -> None:
        """Install the shim and the timers in the model runner; call once."""
        self._bench_recorded, self._bench_acceptance = {}, {}
        if self.vllm_config.use_v2_model_runner:
            self._install_v2()
        else:
            patch_draft_sampling(self.device.type)
            self._install_v1()

    def _install_v1(self) -> None:
        runner = self.model_runner
        sample, propose = runner._sample, runner.propose_draft_token_ids

        def forced_sample(logits: torch.Tensor, metadata: Any) -> Any:
            started = time.perf_counter()
            self._force_v1(logits, metadata)
            self._bench_shim_seconds += time.perf_counter() - started
            self._bench_steps += 1
            sampled = sample(logits, metadata)
            if self._bench_records_acceptance:
                counts = [sum(token >= 0 for token in tokens) for tokens in sampled.sampled_token_ids.tolist()]
                self._record_acceptance(runner.input_batch.req_ids, counts)
            return sampled

        def timed_propose(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return propose(*args, **kwargs)
            finally:
                self._bench_proposing_seconds += time.perf_counter() - started

        runner._sample, runner.propose_draft_token_ids = forced_sample, timed_propose

    def _install_v2(self) -> None:
        runner = self.model_runner
        sample, model = runner.sample, runner.model
        compute_logits = model.compute_logits
        self._bench_table = torch.full((runner.max_num_reqs, runner.max_model_len), _NOT_FORCED, device=self.device)
        self._bench_in_row: dict[int, str] = {}
        batches: list[Any] = []

        def forced_logits(hidden_states: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = compute_logits(hidden_states)
            started = time.perf_counter()
            self._force_v2(logits, batches[-1])
            self._bench_shim_seconds += time.perf_counter() - started
            return logits

        def forced_sample(hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
            batches.append(input_batch)
            model.compute_logits = forced_logits
            try:
                sampled = sample(hidden_states, input_batch, grammar_output)
            finally:
                model.compute_logits = compute_logits
                batches.pop()
            self._bench_steps += 1
            if self._bench_records_acceptance:
                self._record_acceptance(input_batch.req_ids, sampled[1].tolist())
            return sampled

        runner.sample = forced_sample

    def _record_acceptance(self, request_ids: list[str], sampled: list[int]) -> None:
        for request_id, count in zip(request_ids, sampled, strict=False):
            self._bench_acceptance.setdefault(_rollout_of(request_id), []).append(count - 1)

    def bench_set_rollouts(self, recorded: dict[str, list[int]]) -> None:
        """Replace the recorded rollouts: by rollout id, the tokens to sample."""
        self._bench_recorded = {key: np.array(tokens, dtype=np.int64) for key, tokens in recorded.items()}

    def bench_set_history(self, history: list[tuple[list[int], list[list[int]]]]) -> None:
        """Draft from exactly this history: (prompt, responses) for each problem.

        The index of an engine that reads the same history from Redis is only emptied, which keeps rollouts of earlier
        measurements out of its cross-problem pool.
        """
        index = getattr(self, "_das_index", None)
        for problem in index.problems() if index is not None else ():
            index.drop_problem(problem)
        if index is not None and getattr(self, "_das_sync", None) is None:
            for prompt, responses in history:
                rollouts = [
                    (f"history-{number}", 1, np.array(response, np.uint32)) for number, response in enumerate(responses)
                ]
                index.add(problem_id_of(prompt), rollouts)
        cache = getattr(getattr(self.model_runner, "drafter", None), "suffix_cache", None)
        if cache is None:
            return
        for request_id in list(cache.active_requests):
            cache.stop_request(request_id)
        for request_id in list(cache.cached_requests):
            cache.evict_cached_response(request_id)
        for problem, (prompt, responses) in enumerate(history):
            for number, response in enumerate(responses):
                request_id = f"history-{problem}-{number}"
                cache.start_request(request_id, np.array(prompt, dtype=np.int32))
                cache.add_active_response(request_id, response)
                cache.stop_request(request_id)

    def bench_record_acceptance(self) -> None:
        """Record from now on how many draft tokens each step accepts."""
        self._bench_records_acceptance = True

    def bench_acceptance(self) -> dict[str, list[int]]:
        """Return, by rollout id, the accepted draft tokens of each step, including the step that read the prompt."""
        return self._bench_acceptance

    def bench_times(self) -> dict[str, float]:
        """Return the steps since the start, and the seconds spent in the shim and in making drafts."""
        loop = getattr(self, "_das_loop", None)
        uses_v2 = self.vllm_config.use_v2_model_runner
        return {
            "steps": self._bench_steps,
            "shim_seconds": self._bench_shim_seconds,
            "drafting_seconds": loop.seconds if uses_v2 and loop is not None else self._bench_proposing_seconds,
        }

    def _force_v1(self, logits: torch.Tensor, metadata: Any) -> None:
        runner = self.model_runner
        batch = runner.input_batch
        starts = runner.query_start_loc.np[: batch.num_reqs + 1]
        logit_indices = starts[1:] - 1 if metadata is None else metadata.logits_indices.cpu().numpy()
        rows = np.searchsorted(starts, logit_indices, side="right") - 1
        # A row of logits belongs to a token of the sequence; what is sampled from it is the token after that.
        device_indices = torch.from_numpy(logit_indices.astype(np.int64)).to(runner.positions.device)
        places = runner.positions[device_indices].cpu().numpy() + 1
        places -= batch.num_prompt_tokens[rows]
        forced_rows, forced_tokens = [], []
        for row in range(batch.num_reqs):
            recorded = self._bench_recorded.get(_rollout_of(batch.req_ids[row]))
            if recorded is None:
                continue
            of_row = np.flatnonzero(rows == row)
            of_row = of_row[(places[of_row] >= 0) & (places[of_row] < len(recorded))]
            forced_rows.append(of_row)
            forced_tokens.append(recorded[places[of_row]])
        if forced_rows:
            row_indices = torch.from_numpy(np.concatenate(forced_rows)).to(logits.device)
            token_indices = torch.from_numpy(np.concatenate(forced_tokens)).to(logits.device)
            logits[row_indices, token_indices] = _FORCED_LOGIT

    def _force_v2(self, logits: torch.Tensor, batch: Any) -> None:
        """Force the recorded tokens without waiting for the device; *logits* has the shape (positions, vocabulary)."""
        for row, request_id in zip(batch.idx_mapping_np.tolist(), batch.req_ids, strict=True):
            if self._bench_in_row.get(row) != request_id:
                self._bench_in_row[row] = request_id
                recorded = self._bench_recorded.get(_rollout_of(request_id), np.zeros(0, np.int64))
                prompt = int(self.model_runner.req_states.prompt_len.np[row])
                self._bench_table[row] = _NOT_FORCED
                self._bench_table[row, prompt : prompt + len(recorded)] = torch.from_numpy(recorded).to(self.device)
        # A row of logits belongs to a token of the sequence; what is sampled from it is the token after that.
        places = batch.positions[batch.logits_indices] + 1
        tokens = self._bench_table[batch.expanded_idx_mapping, places.clamp(max=self._bench_table.shape[1] - 1)]
        is_forced = (tokens != _NOT_FORCED).unsqueeze(1)
        columns = tokens.clamp(min=0).unsqueeze(1)
        logits.scatter_(1, columns, torch.where(is_forced, _FORCED_LOGIT, logits.gather(1, columns)))


def _rollout_of(request_id: str) -> str:
    return request_id.rpartition("#")[0]


class ForcedEngine(_ForcedSampling, EngineExtension):
    """The worker extension of engines without drafts or with vLLM's own."""


class ForcedDraftingEngine(_ForcedSampling, DraftingExtension):
    """The worker extension of engines that draft from the history."""
