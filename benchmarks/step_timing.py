"""Simulates an engine under many workloads: how many steps are timed, and when the governor decides whether drafts pay.

    python -m benchmarks.step_timing --json FILE

The drafting loop, the suffix index, the cost fit and the governor are those of an engine; the clock is simulated. The
true cost of a step is that of a 7B model on the named card, with a variation of 3 %. The engine predicts it from the
data sheet (:mod:`rollout_worker.policy.hardware`). Where drafts do not pay, verifying any draft costs as much as a
step, and the rollouts resemble their history less.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure, report, to_columns
from rollout_store.arrays import Integers
from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.engine.config import cuda_graph_sizes
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.drafting_loop import DraftingLoop, EngineArrays
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits, Marginal
from rollout_worker.policy.governor import TRIAL_TOKENS
from rollout_worker.policy.hardware import ModelPart, predicted_step_cost
from rollout_worker.policy.step_cost import H100_7B, CudaGraphs, StepCost

QWEN_7B = ModelPart(weight_bytes=15_200_000_000, weights=7_600_000_000, kv_bytes_per_token=28 * 2 * 4 * 128 * 2)
CARDS = {
    "NVIDIA H100": H100_7B,
    "NVIDIA H200": StepCost(base_s=5.6e-3, per_token_s=26e-6, per_context_token_s=12e-9),
    "NVIDIA H20": StepCost(base_s=6.6e-3, per_token_s=174e-6, per_context_token_s=14e-9),
}
"""True costs by card. The H200 has the H100's cores and 1.43 times its bandwidth."""
BATCHES = (1, 8, 32, 128, 256, 512)
STEPS = 600
MAX_DECISION_STEP = 200
"""Target for the step after which it is decided whether drafts pay."""
MAX_DRAFT_TOKENS, MAX_BATCHED_TOKENS = 16, 8192
NOISE = 0.03
_STEPS_WITHOUT_DRAFTS = 32
"""Number of consecutive steps without drafts, except for trials, that count as a decision against drafts."""
_KNOWN_GAIN_ERROR = 0.03
"""Error of a gain that counts as a decision, too: whether drafts are verified then makes little difference."""
_DEFAULT_GRAPH_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""Sizes of the CUDA graphs that vLLM captures by default."""
_VOCABULARY, _TEXT_TOKENS, _HISTORY = 5000, 4000, 8


class Workload(NamedTuple):
    """The rollouts of an engine, which start as soon as there is a place for them."""

    name: str
    turn_tokens: int
    prompt_tokens: int = 50
    micro_batches: int = 1


WORKLOADS = (
    Workload("long rollouts", 3000),
    Workload("short turns", 64),
    Workload("two micro-batches", 3000, micro_batches=2),
    Workload("prompts of 8,192 tokens", 512, prompt_tokens=8192),
)


class Outcome(NamedTuple):
    """The outcome of a simulated engine."""

    seconds_per_token: float
    timed_steps: int
    decision_step: int | None
    draft_tokens_per_step: float


class Simulation:
    """An engine whose steps take a simulated time."""

    def __init__(
        self,
        workload: Workload,
        batch: int,
        card: str,
        *,
        pays: bool,
        drafts: bool,
        governed: bool,
        exposed_share: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Create an engine whose places all decode.

        Args:
            workload: its rollouts.
            batch: number of places.
            card: its card, one of :data:`CARDS`.
            pays: whether drafts pay.
            drafts: whether anything is drafted.
            governed: whether drafting is disabled where it does not pay.
            exposed_share: time for which the device waits for the host in a step that waits for the drafter, as a share
                of c_base.
            seed: seed of all random numbers.
        """
        self._rng, self._workload = np.random.default_rng(seed), workload
        # A token of a prompt takes as long as any other.
        self._cost = CARDS[card]._replace(per_prompt_token_s=CARDS[card].per_token_s)
        if not pays:
            self._cost = self._cost._replace(drafting_s=self._cost.base_s)
        graph_sizes = cuda_graph_sizes(batch, MAX_DRAFT_TOKENS) or _DEFAULT_GRAPH_SIZES
        self._graphs = CudaGraphs(graph_sizes)
        self._changed_share = 0.25 if pays else 0.6
        self._clock, self._tokens, self._draft_tokens = 0.0, 0, 0
        self._text = self._rng.integers(10, _VOCABULARY, _TEXT_TOKENS)
        index = SuffixIndex(pool_tokens=0)
        index.add("problem", [(f"earlier {number}", 1, self._variant()) for number in range(_HISTORY)])
        index.wait_idle()
        width = workload.prompt_tokens + workload.turn_tokens + MAX_DRAFT_TOKENS + 1
        self._arrays = EngineArrays.create(np.zeros((batch, width), np.int32), MAX_DRAFT_TOKENS)
        self._controller = DraftController(
            Marginal(DraftLimits(MAX_DRAFT_TOKENS, MAX_BATCHED_TOKENS - batch)),
            predicted_step_cost(card, QWEN_7B),
            graph_sizes=graph_sizes,
            governed=governed,
        )
        self._loop = DraftingLoop(index, self._controller, self._arrays, clock=lambda: self._clock) if drafts else None
        self._num_tokens, self._unread = np.zeros(batch, np.int32), np.zeros(batch, np.int64)
        self._turns = np.zeros((batch, workload.turn_tokens + MAX_DRAFT_TOKENS + 1), np.int64)
        self._lengths, self._positions = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self._request_ids = [""] * batch
        self._numbers = itertools.count()
        self._exposed_s = exposed_share * self._cost.base_s
        self._waits = False
        self._late: list[tuple[list[str], NDArray[np.int32], Integers, Integers, int, float]] = []
        """The arguments of calls of the drafting loop for steps that the next step has not waited for."""
        for place in range(batch):
            self._open(place, int(self._rng.integers(0, workload.turn_tokens)), unread=1)

    def _variant(self) -> np.ndarray:
        """Return the problem's text with some tokens changed."""
        changed = self._rng.random(_TEXT_TOKENS) < self._changed_share
        return np.where(changed, self._rng.integers(10, _VOCABULARY, _TEXT_TOKENS), self._text).astype(np.uint32)

    def _open(self, place: int, start: int = 0, *, unread: int) -> None:
        """Start a turn at a place, *start* tokens after its beginning; *unread* tokens of its prompt are not cached."""
        prompt = self._rng.integers(_VOCABULARY, 2 * _VOCABULARY, self._workload.prompt_tokens)
        turn = self._variant()[start : self._workload.turn_tokens]
        self._turns[place, : len(turn)], self._turns[place, len(turn) :] = turn, -2
        self._lengths[place], self._positions[place] = len(turn), 0
        self._unread[place], self._num_tokens[place] = unread, len(prompt)
        self._arrays.token_ids[place, : len(prompt)] = prompt
        self._arrays.lengths[place] = 0
        if self._loop is not None:
            self._loop.take_counts([self._request_ids[place]])
            request_id = self._request_ids[place] = f"request {next(self._numbers)}"
            settings = DraftSettings(request_id, "problem", max_tokens=self._workload.turn_tokens)
            self._loop.add(request_id, settings, prompt.astype(np.uint32), [])

    def run(self, steps: int) -> Outcome:
        """Run some steps."""
        places = np.array_split(np.arange(len(self._num_tokens)), self._workload.micro_batches)
        governor, fit = self._controller.governor, self._controller.fit
        decision, without = None, 0
        for step in range(steps):
            without = 0 if self._step(places[step % len(places)]) else without + 1
            is_rejected = without >= _STEPS_WITHOUT_DRAFTS and self._draft_tokens > 0
            is_known = governor.is_certain or governor.gain.error < _KNOWN_GAIN_ERROR
            if decision is None and (is_known or is_rejected):
                decision = step + 1
        return Outcome(self._clock / self._tokens, fit.num_steps, decision, self._draft_tokens / steps)

    def _step(self, places: Integers) -> bool:
        """Run a step of some places; return whether their next step verifies any drafts but a trial."""
        verified = np.where(self._unread[places] > 0, 0, self._arrays.lengths[places]).astype(np.int64)
        # Prompts are read with the tokens that decoding leaves of the step's limit, in the order of places.
        limit = MAX_BATCHED_TOKENS - int((verified + 1).sum())
        before = np.cumsum(self._unread[places]) - self._unread[places]
        read = np.clip(limit - before, 0, self._unread[places])
        decodes = read == self._unread[places]
        prompt_tokens = int((read - (decodes & (read > 0))).sum())
        self._unread[places] -= read
        active, tokens = places[decodes], int((verified + 1)[decodes].sum())
        seconds = self._cost.step_time(
            tokens,
            int(self._num_tokens[active].sum()),
            has_drafts=bool(verified.any()),
            prompt_tokens=prompt_tokens,
            graphs=self._graphs,
        )
        self._clock += seconds * math.exp(NOISE * self._rng.standard_normal()) + self._waits * self._exposed_s
        sampled = self._sample(active, verified[decodes])
        self._tokens, self._draft_tokens = self._tokens + sampled, self._draft_tokens + int(verified.sum())
        drafts = self._draft(places[decodes | (read > 0)], verified[decodes | (read > 0)], tokens + prompt_tokens)
        for place in active[self._positions[active] >= self._lengths[active]].tolist():
            self._open(place, unread=self._workload.prompt_tokens)
        return drafts

    def _sample(self, places: Integers, verified: Integers) -> int:
        """Verify drafts and write the sampled tokens; return their number."""
        columns = np.arange(MAX_DRAFT_TOKENS + 1)
        turns = np.take_along_axis(self._turns[places], self._positions[places][:, None] + columns, axis=1)
        hits = (turns[:, :-1] == self._arrays.drafts[places]) & (columns[:-1] < verified[:, None])
        accepted = np.logical_and.accumulate(hits, axis=1).sum(axis=1)
        sampled = np.minimum(accepted + 1, self._lengths[places] - self._positions[places])
        for column in range(int(sampled.max(initial=0))):
            rows = np.flatnonzero(sampled > column)
            self._arrays.token_ids[places[rows], self._num_tokens[places[rows]] + column] = turns[rows, column]
        self._num_tokens[places] += sampled.astype(np.int32)
        self._positions[places] += sampled
        return int(sampled.sum())

    def _draft(self, places: Integers, verified: Integers, processed_tokens: int) -> bool:
        self._arrays.lengths[places] = 0
        self._waits = False
        if self._loop is None:
            return False
        request_ids = [self._request_ids[place] for place in places.tolist()]
        if self._exposed_s and self._loop.rest():
            self._late.append((request_ids, self._num_tokens.copy(), places, verified, processed_tokens, self._clock))
            return False
        for ids, num_tokens, *others, ended_s in self._late:
            running = [request_id if request_id in self._request_ids else "" for request_id in ids]
            self._loop.draft(running, num_tokens, *others, ended_s=ended_s, is_late=True)
            self._loop.plan()
        self._late.clear()
        if self._loop.skip_step():
            return False
        self._waits = True
        ended_s = self._clock if self._exposed_s else None
        self._loop.draft(request_ids, self._num_tokens, places, verified, processed_tokens, ended_s=ended_s)
        trial_tokens = 0 if self._controller.governor.trial is None else TRIAL_TOKENS
        drafts = int(self._arrays.lengths[places].sum()) > trial_tokens
        self._loop.plan()
        if self._loop.failures:
            raise RuntimeError(f"drafting has failed: {self._loop.last_failure}")
        return drafts


class Row(NamedTuple):
    """The results of one workload on one card."""

    workload: str
    batch: int
    card: str
    drafts_pay: bool
    timed_steps: int
    """Number of timed steps."""
    decision_step: int | None
    """Step after which a gain or loss is certain or known to within 3 %, or drafts are no longer verified.

    None if there is none."""
    relative_time: float
    """Time per token, relative to the better of drafting always and never."""
    draft_tokens_per_step: float


def measure(workload: Workload, batch: int, card: str, *, pays: bool) -> Row:
    """Simulate one workload with drafting governed, always and never."""
    governed, always, never = (
        Simulation(workload, batch, card, pays=pays, drafts=drafts, governed=is_governed).run(STEPS)
        for drafts, is_governed in ((True, True), (True, False), (False, False))
    )
    return Row(
        workload.name,
        batch,
        card,
        pays,
        governed.timed_steps,
        governed.decision_step,
        governed.seconds_per_token / min(always.seconds_per_token, never.seconds_per_token),
        governed.draft_tokens_per_step,
    )


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """Summarize the table."""
    drafting = [row for row in rows if row.draft_tokens_per_step > 0]
    decided = [row for row in drafting if row.decision_step is not None and row.decision_step <= MAX_DECISION_STEP]
    times = [row.relative_time for row in drafting]
    timed = min(row.timed_steps for row in drafting) / STEPS
    share, name = len(decided) / len(drafting), "time relative to the better of always and never (simulated)"
    return [
        Figure(f"workloads decided within {MAX_DECISION_STEP} steps (simulated)", share, "", "", ">=", 1.0),
        Figure("smallest share of timed steps (simulated)", timed, "", "", ">=", None),
        Figure(f"mean {name}", float(np.mean(times)), "x", "", "<=", None),
        Figure(f"largest {name}", max(times), "x", "", "<=", None),
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--batch", default=",".join(map(str, BATCHES)), help="comma-separated batch sizes [%(default)s]"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    rows = []
    for workload, batch, card, pays in itertools.product(
        WORKLOADS, map(int, options.batch.split(",")), CARDS, (True, False)
    ):
        if batch < workload.micro_batches:
            continue
        rows.append(measure(workload, batch, card, pays=pays))
        row = rows[-1]
        print(
            f"{row.workload}, batch {row.batch}, {row.card}, drafts {'pay' if row.drafts_pay else 'do not pay'}: "
            f"{row.timed_steps} of {STEPS} steps timed, decision after {row.decision_step} steps, "
            f"{row.relative_time:.3f} of the time, {row.draft_tokens_per_step:.1f} draft tokens per step",
            file=sys.stderr,
            flush=True,
        )
    report(options.json, figures_of(rows), rows=to_columns([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
