"""The proposer without the fix of vLLM's CPU sampling, to show that the tests would notice."""

from rollout_worker.engine.proposer import HistoryProposer


class UnpatchedProposer(HistoryProposer):
    def load_model(self, *_: object, **__: object) -> None:
        self.sampling_mended = False
