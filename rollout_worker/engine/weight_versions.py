"""Records which weight version sampled which tokens of the responses that are being generated."""

from __future__ import annotations

from typing import Any


class WeightVersionTracker:
    """Determines the weight versions of the tokens of one ``AsyncLLM``.

    vLLM (seen in 0.32) labels the tokens of each step, but returns the labels of finished responses only. The labels of
    running responses are read from its output processor. Where vLLM has no labels (0.26), this class records how many
    tokens each response had when the version changed. This is correct if :meth:`change` is called after all tokens
    that were sampled before have reached this process.
    """

    def __init__(self, llm: Any, version: int) -> None:
        self.version = version
        """Version of the tokens that are sampled now."""
        self.uses_labels = hasattr(llm, "update_weight_version")
        """Whether vLLM's own labels are used."""
        self._llm = llm
        self._recorded: dict[str, list[tuple[int, int]]] = {}

    async def change(self, version: int) -> None:
        """Label all tokens from now on with *version*. Call it only while nothing is decoded."""
        if self.uses_labels:
            await self._llm.update_weight_version(str(version))
        for call_id, starts in self._recorded.items():
            state = self._request_state(call_id)
            starts.append((version, state.detokenizer.num_output_tokens() if state is not None else 0))
        self.version = version

    def open(self, call_id: str) -> None:
        """Start to follow a response."""
        self._recorded[call_id] = [(self.version, 0)]

    def close(self, call_id: str) -> None:
        """Stop following a response."""
        self._recorded.pop(call_id, None)

    def starts(self, call_id: str, completion: Any) -> list[tuple[int, int]]:
        """Return (version, index of its first token), in order, for a response that is followed.

        Args:
            call_id: id of the call.
            completion: vLLM's ``CompletionOutput`` of the response.
        """
        if not self.uses_labels:
            return self._recorded[call_id]
        if completion.weight_versions is not None:
            return [(int(span.version), span.start) for span in completion.weight_versions]
        state = self._request_state(call_id)
        return [(int(label), start) for label, start in state.weight_version_starts] if state is not None else []

    def _request_state(self, call_id: str) -> Any:
        """Return the state of a running response in vLLM's output processor; None if there is none."""
        processor = self._llm.output_processor
        internal_ids = processor.external_req_ids.get(call_id)
        return processor.request_states.get(internal_ids[0]) if internal_ids else None
