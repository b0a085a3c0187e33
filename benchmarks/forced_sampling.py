"""Makes vLLM say recorded rollouts: the same shim in every mode, so that acceptance and lengths are real.

Just before tokens are sampled, the logit of the recorded token is put above all others at each position. The forward
pass, the sampler and the rejection sampler run in full and do what they always do: a draft token is accepted if it is
the recorded one. What a real model would say behind a token of its own that differs is never asked for. Acceptance
measured so is called *replayed*.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from rollout_worker.engine.compat import mend_draft_sampling
from rollout_worker.engine.worker_extension import DraftingExtension, HostExtension

_ABOVE_ALL = 3e4


class _Forcing:
    """Mixed into a host extension; its methods are collective calls."""

    model_runner: Any
    _bench_recorded: dict[str, np.ndarray]
    _bench_noted: dict[str, list[int]]
    _bench_noting = False
    _bench_shim_seconds = 0.0
    _bench_drafting_seconds = 0.0
    _bench_steps = 0

    def bench_prepare(self) -> None:
        """Put the shim and the stop-watches in place; once."""
        mend_draft_sampling()
        self._bench_recorded, self._bench_noted = {}, {}
        runner = self.model_runner
        sample, propose = runner._sample, runner.propose_draft_token_ids

        def forced(logits: torch.Tensor, metadata: Any) -> Any:
            started = time.perf_counter()
            self._force(logits, metadata)
            self._bench_shim_seconds += time.perf_counter() - started
            self._bench_steps += 1
            sampled = sample(logits, metadata)
            for row, tokens in enumerate(sampled.sampled_token_ids.tolist() if self._bench_noting else ()):
                rollout = runner.input_batch.req_ids[row].rpartition("#")[0]
                self._bench_noted.setdefault(rollout, []).append(sum(token >= 0 for token in tokens) - 1)
            return sampled

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return propose(*args, **kwargs)
            finally:
                self._bench_drafting_seconds += time.perf_counter() - started

        runner._sample, runner.propose_draft_token_ids = forced, timed

    def bench_record(self, recorded: dict[str, list[int]]) -> None:
        """From now on these rollouts, by id, say these tokens; all before are forgotten."""
        self._bench_recorded = {key: np.array(tokens, dtype=np.int64) for key, tokens in recorded.items()}

    def bench_remember(self, history: list[tuple[list[int], list[list[int]]]]) -> None:
        """Give vLLM's own suffix decoding the same history as ours: prompts, each with its responses; nothing else.

        Ours forgets what it has: it reads its history from Redis, and takes drafts from other problems', too.
        """
        index = getattr(self, "_das_index", None)
        for problem in index.problems() if index is not None else ():
            index.drop_problem(problem)
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

    def bench_note(self) -> None:
        """From now on keep how many draft tokens each step had accepted."""
        self._bench_noting = True

    def bench_noted(self) -> dict[str, list[int]]:
        """By rollout: draft tokens accepted in each step, that which read the prompt included."""
        return self._bench_noted

    def bench_times(self) -> dict[str, float]:
        """Since the start: steps, and seconds spent in the shim and in proposing drafts."""
        return {
            "steps": self._bench_steps,
            "shim_seconds": self._bench_shim_seconds,
            "drafting_seconds": self._bench_drafting_seconds,
        }

    def _force(self, logits: torch.Tensor, metadata: Any) -> None:
        runner = self.model_runner
        batch = runner.input_batch
        starts = runner.query_start_loc.np[: batch.num_reqs + 1]
        at = starts[1:] - 1 if metadata is None else metadata.logits_indices.cpu().numpy()
        rows = np.searchsorted(starts, at, side="right") - 1
        # of the tokens that logits are of, the place in the sequence; what is sampled comes behind it
        places = runner.positions[torch.from_numpy(at.astype(np.int64)).to(runner.positions.device)].cpu().numpy() + 1
        places -= batch.num_prompt_tokens[rows]
        sampled, tokens = [], []
        for row in range(batch.num_reqs):
            recorded = self._bench_recorded.get(batch.req_ids[row].rpartition("#")[0])
            if recorded is None:
                continue
            mine = np.flatnonzero(rows == row)
            mine = mine[(places[mine] >= 0) & (places[mine] < len(recorded))]
            sampled.append(mine)
            tokens.append(recorded[places[mine]])
        if sampled:
            where = torch.from_numpy(np.concatenate(sampled)).to(logits.device)
            logits[where, torch.from_numpy(np.concatenate(tokens)).to(logits.device)] = _ABOVE_ALL


class ForcedEngine(_Forcing, HostExtension):
    """Of an engine whose drafts are not ours, or that drafts nothing."""


class ForcedDraftingEngine(_Forcing, DraftingExtension):
    """Of an engine that drafts from history."""
