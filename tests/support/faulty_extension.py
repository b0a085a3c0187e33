"""Worker extensions that let tests change a running engine."""

from __future__ import annotations

import sys
from typing import Any

from rollout_worker.engine.worker_extension import DraftingExtension


class FaultyExtension(DraftingExtension):
    """The extension of an engine whose drafting can be made to fail."""

    def test_let_drafting_fail(self, times: int) -> None:
        """Let the next *times* drafts fail."""
        assert self._das_loop is not None
        self._let_fail(self._das_loop._batch, "step", times)

    def test_let_new_requests_fail(self, times: int) -> None:
        """Let the interface to vLLM fail when it passes on the next *times* requests."""
        self._let_fail(self._das_loop, "add", times)

    def test_switch_interval(self) -> float:
        """Return how long a thread of the process that runs the steps keeps the interpreter to itself, in seconds."""
        return sys.getswitchinterval()

    def _let_fail(self, owner: Any, name: str, times: int) -> None:
        remaining = [times]
        original = getattr(owner, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if remaining[0]:
                remaining[0] -= 1
                raise RuntimeError("the index is damaged")
            return original(*args, **kwargs)

        setattr(owner, name, fail)


class PlacesExtension(DraftingExtension):
    """The extension of an engine that counts drafts for requests whose tokens are at another place."""

    def test_check_places(self) -> None:
        """Check from now on that each request's place has its prompt."""
        loop = self._das_loop
        assert loop is not None
        add, draft, token_ids = loop.add, loop.draft, loop._arrays.token_ids
        prompts: dict[str, list[int]] = {}
        self._wrong_places = self._checked_places = 0

        def checked_add(request_id: str, settings: Any, prompt: Any, end_tokens: list[int]) -> None:
            prompts[request_id] = list(prompt)
            add(request_id, settings, prompt, end_tokens)

        def checked_draft(request_ids: list[str], num_tokens: Any, places: Any, *others: Any) -> None:
            for request_id, place in zip(request_ids, places.tolist(), strict=True):
                if loop.knows(request_id) and request_id in prompts:
                    prompt = prompts[request_id]
                    self._checked_places += 1
                    self._wrong_places += token_ids[place, : len(prompt)].tolist() != prompt
            draft(request_ids, num_tokens, places, *others)

        vars(loop).update(add=checked_add, draft=checked_draft)

    def test_places(self) -> tuple[int, int]:
        """Return how many places were wrong, and how many were checked."""
        return self._wrong_places, self._checked_places


class ExactVerificationExtension(DraftingExtension):
    """The extension of an engine in which V2 lays out batches as it does for CUDA graphs of uneven drafts."""

    def test_verify_exactly(self) -> None:
        """Let the runner use the manager that it would use with CUDA graphs."""
        from rollout_worker.engine.speculator import ExactVerification

        assert self.model_runner.adaptive_verification is None
        self.model_runner.adaptive_verification = ExactVerification(self.model_runner.input_buffers.query_start_loc)


class WarmUpExtension(DraftingExtension):
    """Runs the steps with drafts that vLLM runs on GPUs, before drafting starts, to compile its kernels."""

    def das_start_drafting(self, drafting: dict[str, Any]) -> bool:
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        # Triton's interpreter does not support the kernel that applies a grammar.
        warmup_kernels(self.model_runner, self.execute_model, lambda _: self.sample_tokens(None))
        return super().das_start_drafting(drafting)
