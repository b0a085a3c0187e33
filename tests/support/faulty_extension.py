"""An engine whose drafter can be made to fail."""

from __future__ import annotations

from typing import Any

from rollout_worker.engine.worker_extension import DraftingExtension


class FaultyExtension(DraftingExtension):
    def test_let_drafting_fail(self, times: int) -> None:
        """Let the next *times* drafts fail."""
        assert self._das_loop is not None
        index: Any = self._das_index
        remaining = [times]
        original = index.step

        def fail(*args: Any, **kwargs: Any) -> Any:
            if remaining[0]:
                remaining[0] -= 1
                raise RuntimeError("the index is damaged")
            return original(*args, **kwargs)

        index.step = fail
