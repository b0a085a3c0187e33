"""Worker extensions with which tests change a running engine."""

from __future__ import annotations

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

    def _let_fail(self, owner: Any, name: str, times: int) -> None:
        remaining = [times]
        original = getattr(owner, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if remaining[0]:
                remaining[0] -= 1
                raise RuntimeError("the index is damaged")
            return original(*args, **kwargs)

        setattr(owner, name, fail)


class ExactVerificationExtension(DraftingExtension):
    """The extension of an engine in which V2 lays out batches as it does for CUDA graphs of uneven drafts."""

    def test_verify_exactly(self) -> None:
        """Let the runner use the manager that it would use with CUDA graphs."""
        from rollout_worker.engine.speculator import ExactVerification

        assert self.model_runner.adaptive_verification is None
        self.model_runner.adaptive_verification = ExactVerification(self.model_runner.input_buffers.query_start_loc)
