"""Tells which weight version sampled which tokens of the responses that are being generated."""

from __future__ import annotations

from typing import Any


class WeightVersionTracker:
    """Determines the weight versions of the tokens of one ``AsyncLLM``.

    vLLM labels the tokens of each step, but returns the labels of finished responses only. The labels of running
    responses are read from its output processor.
    """

    def __init__(self, llm: Any, version: int) -> None:
        self.version = version
        """Version of the tokens that are sampled now."""
        self._llm = llm

    async def change(self, version: int) -> None:
        """Label all tokens from now on with *version*. Call it only while nothing is decoded."""
        await self._llm.update_weight_version(str(version))
        self.version = version

    def starts(self, call_id: str, completion: Any) -> list[tuple[int, int]]:
        """Return (version, index of its first token), in order, for a response.

        Args:
            call_id: id of the call.
            completion: vLLM's ``CompletionOutput`` of the response.
        """
        if completion.weight_versions is not None:
            return [(int(span.version), span.start) for span in completion.weight_versions]
        processor = self._llm.output_processor
        internal_ids = processor.external_req_ids.get(call_id)
        state = processor.request_states.get(internal_ids[0]) if internal_ids else None
        return [] if state is None else [(int(label), start) for label, start in state.weight_version_starts]
