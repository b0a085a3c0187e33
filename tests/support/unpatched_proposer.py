"""The proposer without the patch of vLLM's CPU sampling, to show that the tests detect the defect."""

from rollout_worker.engine.proposer import HistoryProposer


class UnpatchedProposer(HistoryProposer):
    def load_model(self, *_: object, **__: object) -> None:
        """Do not patch anything."""
