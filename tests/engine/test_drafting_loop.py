"""A fault in drafting costs drafts, never the engine, and is reported."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import DRAFT_SOURCES, SAMPLED
from rollout_store.history.store import HistoryStore
from rollout_store.history.sync import HistorySync
from rollout_worker.drafting.batch import Batch
from rollout_worker.drafting.index import DraftCounts, SuffixIndex
from rollout_worker.engine.draft_settings import DraftingConfig, DraftSettings
from rollout_worker.engine.drafting_loop import DraftingLoop, EngineArrays
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.worker_extension import DraftingExtension
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits, Marginal
from rollout_worker.policy.governor import StepOutcome
from rollout_worker.policy.named_policies import make_policy
from rollout_worker.policy.step_cost import CPU
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import LoopThread
from tests.support.responses import WITHOUT_EOS, tokens_of

pytestmark = pytest.mark.v2

MAX_DRAFT_TOKENS = 4
OWN_TEXT = 1 + DRAFT_SOURCES.index("self")
PROMPT = [5, 6]
REPOSITORY = Path(__file__).parents[2]


class FailingBatch(Batch):
    """Fails in the steps whose numbers are in `failing`."""

    failing: set[int]
    num_steps = 0

    def step(self, *args: Any) -> tuple[int, int, float]:
        self.num_steps += 1
        if self.num_steps in self.failing:
            raise RuntimeError("the index is damaged")
        return super().step(*args)


class FailingIndex(SuffixIndex):
    """An index whose batches fail."""

    def __init__(self, failing: set[int], *, draft_ahead: bool) -> None:
        super().__init__(draft_ahead=draft_ahead)
        self._failing = failing

    def new_batch(self, *arrays: Any) -> Batch:
        batch = FailingBatch(self, *arrays)
        batch.failing = self._failing
        return batch


class RepeatingEngine:
    """An engine whose only response repeats the tokens 1 to 5 forever."""

    def __init__(self, failing: set[int], *, draft_ahead: bool = False) -> None:
        limits = DraftLimits(MAX_DRAFT_TOKENS, 1024)
        policy = make_policy("fixed", limits)
        self.controller = DraftController(policy, CPU, governed=False)
        self.tokens = np.zeros((1, 20_000), np.int32)
        self.arrays = EngineArrays.create(self.tokens, MAX_DRAFT_TOKENS)
        self.index = FailingIndex(failing, draft_ahead=draft_ahead)
        self.loop = DraftingLoop(self.index, self.controller, self.arrays)
        self.tokens[0, : len(PROMPT)] = PROMPT
        self.length = len(PROMPT)
        self.codes = bytearray()
        """The expected source of each response token; drafts are found in the response itself."""
        self.loop.add("request", DraftSettings("key", "problem", max_tokens=19_000), PROMPT, [])
        self._draft: list[int] = []

    def step(self) -> int | None:
        """Run one step; return the length of its draft, or None if it was skipped."""
        response = (self.length - len(PROMPT) + np.arange(MAX_DRAFT_TOKENS + 1)) % 5 + 1
        accepted = 0
        while accepted < len(self._draft) and self._draft[accepted] == response[accepted]:
            accepted += 1
        self.tokens[0, self.length : self.length + accepted + 1] = response[: accepted + 1]
        self.length += accepted + 1
        self.codes += bytes([OWN_TEXT] * accepted + [SAMPLED])
        verified, self._draft, failures = len(self._draft), [], self.loop.failures
        if self.loop.skip_step():
            return None
        num_tokens = np.array([self.length], np.int32)
        self.loop.draft(["request"], num_tokens, np.zeros(1, int), np.array([verified]))
        if self.loop.failures > failures:
            self.codes[len(self.codes) - accepted - 1 :] = bytes(accepted + 1)  # what was verified is unknown
        length = int(self.arrays.lengths[0])
        self._draft = self.arrays.drafts[0, :length].tolist()
        self.loop.plan()
        return length

    def take_counts(self, key: str = "key") -> DraftCounts:
        """Return the counts of the response, which must agree with its expected sources."""
        counts = self.loop.take_counts([key])[key]
        assert self.length - len(PROMPT) == counts.generated
        assert self.codes.rstrip(b"\0") == counts.token_sources
        assert (0, counts.drafted, 0, 0) == counts.drafted_by_source
        return counts


def test_a_failure_costs_the_drafts_of_one_step() -> None:
    engine = RepeatingEngine(failing={20})
    lengths = [engine.step() for _ in range(40)]
    assert 0 == lengths[19]
    assert [MAX_DRAFT_TOKENS] * 20 == lengths[20:]
    assert 1 == engine.loop.failures
    assert "RuntimeError: the index is damaged" == engine.loop.last_failure


def test_no_token_is_missing_in_the_counts_after_failures() -> None:
    engine = RepeatingEngine(failing={5, 9, 10})
    for _ in range(30):
        engine.step()
    counts = engine.take_counts()
    assert 0 < counts.accepted <= counts.drafted
    assert counts.accepted == len(counts.token_sources) - counts.token_sources.count(SAMPLED)
    assert {} == engine.loop.take_counts(["key"])
    assert 0 == engine.loop.num_tracked


def test_drafting_is_paused_after_repeated_failures_and_tried_again() -> None:
    engine = RepeatingEngine(failing={5, 6, 7})
    skipped = [engine.step() is None for _ in range(1100)]
    assert 3 == engine.loop.failures
    assert [False] * 7 + [True] * 1024 == skipped[: 7 + 1024]
    assert MAX_DRAFT_TOKENS == engine.step()


def test_drafting_ahead_knows_that_drafts_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RepeatingEngine(failing=set(), draft_ahead=True)
    for _ in range(12):
        engine.step()
    engine.controller.min_gain_s = math.inf
    monkeypatch.setattr(engine.controller, "select_trial", lambda *_: None)
    engine.loop.plan()
    for number in range(12):
        if number == 2:
            before = engine.index.look_ups()
        assert 0 == engine.step()
        engine.index.wait_idle()
    # What follows is the first token of a draft that was not verified.
    assert (10, 0, 0) == tuple(np.subtract(engine.index.look_ups(), before))


def test_a_step_without_new_tokens_is_no_success() -> None:
    engine = RepeatingEngine(failing={5, 7, 9})
    for _ in range(4):
        engine.step()
    for _ in range(3):
        engine.step()
        paused = engine.loop.skip_step()
        if not paused:
            # Only a request decodes that is not drafted for.
            engine.loop.draft(["other"], np.array([engine.length], np.int32), np.zeros(1, int), np.zeros(1, int))
            engine.loop.plan()
    assert 3 == engine.loop.failures
    assert paused


def test_tokens_of_skipped_steps_are_drafted_from() -> None:
    engine = RepeatingEngine(failing=set())
    for _ in range(3):
        engine.step()
    generated = (np.arange(200) + engine.length - len(PROMPT)) % 5 + 1
    engine.tokens[0, engine.length : engine.length + 200] = generated
    engine.length += 200
    engine._draft = []
    engine.codes += bytes(200)
    assert MAX_DRAFT_TOKENS == engine.step()
    engine.step()
    engine.take_counts()


def test_tokens_that_the_engine_discards_are_forgotten() -> None:
    engine = RepeatingEngine(failing=set())
    for _ in range(10):
        engine.step()
    engine.length, engine._draft = engine.length - 3, []
    del engine.codes[-3:]
    engine.loop.rewind("request", engine.length)
    for _ in range(10):
        engine.step()
    engine.take_counts()


def test_tokens_that_the_engine_discards_after_a_failure_are_forgotten() -> None:
    engine = RepeatingEngine(failing={10})
    for _ in range(10):
        engine.step()
    discarded = 2 * MAX_DRAFT_TOKENS
    engine.length -= discarded
    del engine.codes[-discarded:]
    engine.loop.rewind("request", engine.length)
    for _ in range(10):
        engine.step()
    engine.take_counts()


def test_drafts_of_a_step_before_a_preemption_are_counted() -> None:
    engine = RepeatingEngine(failing=set())
    for _ in range(10):
        engine.step()
    # The engine verifies the draft and preempts the request before the next draft.
    engine.loop.count_steps("request", [(engine.length + MAX_DRAFT_TOKENS + 1, MAX_DRAFT_TOKENS)])
    engine.length, engine._draft = engine.length + MAX_DRAFT_TOKENS + 1, []
    engine.tokens[0, len(PROMPT) : engine.length] = np.arange(engine.length - len(PROMPT)) % 5 + 1
    engine.codes += bytes([OWN_TEXT] * MAX_DRAFT_TOKENS + [SAMPLED])
    for _ in range(3):
        engine.step()
    counts = engine.take_counts()
    expected = RepeatingEngine(failing=set())
    for _ in range(14):
        expected.step()
    expected_counts = expected.loop.take_counts(["key"])["key"]
    assert 0 < counts.accepted
    assert expected_counts.accepted - MAX_DRAFT_TOKENS == counts.accepted  # one step after the preemption has no draft
    assert expected_counts.drafted - MAX_DRAFT_TOKENS == counts.drafted


def test_tokens_of_a_step_before_a_preemption_may_be_discarded() -> None:
    engine = RepeatingEngine(failing=set())
    for _ in range(10):
        engine.step()
    engine.loop.count_steps("request", [(engine.length + MAX_DRAFT_TOKENS + 1, MAX_DRAFT_TOKENS)])
    engine.loop.rewind("request", engine.length)
    engine._draft = []
    for _ in range(3):
        engine.step()
    engine.take_counts()


def test_a_request_that_cannot_be_followed_does_not_affect_others() -> None:
    engine = RepeatingEngine(failing=set())
    invalid = DraftSettings("invalid", "problem", max_tokens=100, sources=("unknown",))
    engine.loop.add("invalid", invalid, PROMPT, [])
    assert 1 == engine.loop.failures
    assert not engine.loop.knows("invalid")
    for _ in range(20):
        length = engine.step()
    assert MAX_DRAFT_TOKENS == length
    assert 1 == engine.loop.failures


def test_a_prefix_belongs_to_the_response() -> None:
    engine = RepeatingEngine(failing=set())
    engine.loop.take_counts(["key"])
    settings = DraftSettings("continued", "problem", max_tokens=19_000, prefix_tokens=20)
    prefix = (np.arange(20) % 5 + 1).tolist()
    engine.tokens[0, len(PROMPT) : len(PROMPT) + 20] = prefix
    engine.length += 20
    engine.codes += bytes(20)
    engine.loop.add("request", settings, [*PROMPT, *prefix], [])
    assert MAX_DRAFT_TOKENS == engine.step()
    engine.step()
    counts = engine.take_counts("continued")
    assert (21 + MAX_DRAFT_TOKENS + 1, MAX_DRAFT_TOKENS) == (counts.generated, counts.accepted)


class TimingController(DraftController):
    """Records the prompt tokens and the duration of each step."""

    def __init__(self) -> None:
        super().__init__(make_policy("fixed", DraftLimits(MAX_DRAFT_TOKENS, 1024)), CPU, governed=False)
        self.observed: list[tuple[int, float | None]] = []

    def observe_step(self, step: StepOutcome, seconds: float | None, drafting_s: float = 0.0) -> None:
        self.observed.append((step.prompt_tokens, seconds))
        super().observe_step(step, seconds, drafting_s)


class TimedEngine:
    """An engine whose requests sample one token per step, and each of whose steps takes a second."""

    def __init__(self, places: int = 4) -> None:
        self.controller = TimingController()
        self._arrays = EngineArrays.create(np.zeros((places, 1000), np.int32), MAX_DRAFT_TOKENS)
        self._num_tokens = np.zeros(places, np.int32)
        self._now = 0.0
        self._loop = DraftingLoop(SuffixIndex(), self.controller, self._arrays, clock=lambda: self._now)
        self._unread = dict.fromkeys(range(places), 0)

    def start(self, place: int, prompt_tokens: int = 10) -> None:
        """Start a request, in place of an earlier one."""
        self._loop.take_counts([str(place)])
        prompt = list(range(prompt_tokens))
        self._arrays.token_ids[place, :prompt_tokens] = prompt
        self._num_tokens[place], self._unread[place] = prompt_tokens, prompt_tokens - 1
        self._loop.add(str(place), DraftSettings(str(place), "problem", max_tokens=900), prompt, [])

    def wait(self, seconds: float) -> None:
        self._now += seconds

    def step(self, *places: int, reads: int = 1000) -> tuple[int, float | None]:
        """Run a step that reads at most *reads* prompt tokens; return what the controller observes."""
        self._now += 1.0
        processed = 0
        for place in places:
            read = min(self._unread[place], reads)
            reads, self._unread[place] = reads - read, self._unread[place] - read
            samples = self._unread[place] == 0
            processed += read + samples
            self._num_tokens[place] += samples
        if not self._loop.skip_step():
            request_ids = [str(place) if place in self._unread else "" for place in places]
            verified = np.zeros(len(places), np.int64)
            self._loop.draft(request_ids, self._num_tokens, np.array(places), verified, processed)
            self._loop.plan()
        return self.controller.observed[-1]


def test_steps_that_read_prompts_are_timed() -> None:
    engine = TimedEngine()
    engine.start(0)
    assert (9, None) == engine.step(0)
    assert (0, 1.0) == engine.step(0)
    engine.start(1, prompt_tokens=30)
    assert (10, 1.0) == engine.step(0, 1, reads=10)
    assert (19, 1.0) == engine.step(0, 1)
    assert (0, 1.0) == engine.step(0, 1)
    # A request takes the place of one that has ended.
    engine.start(0)
    assert (9, 1.0) == engine.step(0, 1)


def test_a_step_is_not_timed_if_the_engine_may_have_waited_for_its_requests() -> None:
    engine = TimedEngine()
    engine.start(0)
    engine.start(1)
    for _ in range(3):
        engine.step(0, 1)
    engine.wait(60.0)
    engine.start(0)
    engine.start(1)
    assert (18, None) == engine.step(0, 1)
    assert (0, 1.0) == engine.step(0, 1)


def test_steps_of_alternating_micro_batches_are_timed() -> None:
    engine = TimedEngine()
    for place in range(4):
        engine.start(place)
    engine.step(0, 1)
    engine.step(2, 3)
    for step in range(10):
        assert (0, 1.0) == engine.step(*((0, 1), (2, 3))[step % 2])


@pytest.mark.engine
@pytest.mark.slow
def test_a_running_engine_generates_the_same_tokens_while_drafting_fails(
    model: Path,
    loop: LoopThread,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extension = {"worker_extension_cls": "tests.support.faulty_extension.FaultyExtension"}
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")
    engine = loop.run(Engine.start(replace(engine_config(model, drafting_config), overrides=extension)))
    try:
        # A step must not wait for the thread that reads the history for as long as Python's default, 5 ms.
        assert pytest.approx([2e-4]) == loop.run(engine.collective_rpc("test_switch_interval"))
        harness = EngineHarness(engine, loop, history_store)
        sampling = Sampling(n=2, max_tokens=60, temperature=0, allowed_token_ids=WITHOUT_EOS)
        expected = tokens_of(harness.sample([PROMPT], sampling, "faulty"))
        loop.run(engine.collective_rpc("test_let_drafting_fail", 2))
        actual = harness.sample([PROMPT], sampling, "faulty")
        assert expected == tokens_of(actual)
        assert all(response.num_accepted_tokens > 0 for response in actual)
        stats = loop.run(engine.stats())
        assert 2 == stats["drafting_failures"]
        assert "RuntimeError: the index is damaged" == stats["last_drafting_failure"]
        loop.run(engine.collective_rpc("test_let_new_requests_fail", 1))
        assert expected == tokens_of(harness.sample([PROMPT], sampling, "faulty"))
        assert 3 == loop.run(engine.stats())["drafting_failures"]
    finally:
        engine.close()


def test_announcing_a_new_generation_shortens_the_pause_of_a_disabled_drafter(history_store: HistoryStore) -> None:
    extension = DraftingExtension()
    extension._das_sync = HistorySync(history_store, SuffixIndex())
    extension._das_controller = DraftController(Marginal(DraftLimits(8, 100)), CPU)
    governor = extension._das_controller.governor

    def count_disabled_steps(generation: int) -> int:
        while not governor.drafting_disabled:
            governor.observe_time(2.0, 0.1)
            governor.observe_time(1.0)
        extension.das_announce(["q"], generation, [])
        steps = 0
        while governor.drafting_disabled:
            governor.count_step()
            steps += 1
        return steps

    extension.das_announce(["p"], 1, [])
    assert [256, 512, 256] == [count_disabled_steps(generation) for generation in (1, 1, 2)]
