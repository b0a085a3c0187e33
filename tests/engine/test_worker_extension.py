"""The methods that an engine calls in its worker processes."""

from __future__ import annotations

from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.engine.worker_extension import DraftingExtension
from rollout_worker.history.store import HistoryStore
from rollout_worker.history.sync import HistorySync
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits, Marginal
from rollout_worker.policy.step_cost import CPU


def test_announcing_a_new_generation_enables_drafting_again(history_store: HistoryStore) -> None:
    extension = DraftingExtension()
    extension._das_sync = HistorySync(history_store, SuffixIndex())
    extension._das_controller = DraftController(Marginal(DraftLimits(8, 100)), CPU)
    governor = extension._das_controller.governor
    extension.das_announce(["p"], 1, [])
    governor.drafting_disabled = True
    extension.das_announce(["q"], 1, [])
    assert governor.drafting_disabled
    extension.das_announce(["p", "q"], 2, [])
    assert not governor.drafting_disabled
