"""Measures the drafter's time in a decoding step: everything between sampled tokens and the drafts for the next step.

    python -m benchmarks.drafter --trace FILE --tokenizer FILE --json FILE

The engine's proposer runs on recorded rollouts in place of vLLM's model runner: it appends the sampled tokens, decides
the budgets with the policy ``marginal`` and the cost model ``h100-7b``, and drafts, on one thread. The rollouts of the
earlier checkpoint are the history. A draft token is accepted if it agrees with the recording. A rollout that has ended
is added to the history and replaced by the next one. Only the first turn of a trajectory is used.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.makespan import MAX_BATCHED_TOKENS, MAX_DRAFT
from benchmarks.problems import Problem, add_trace_arguments, selected_problems
from benchmarks.replay import END_OF_TURN, Draft, ReplayedRollout, count_accepted, with_end_of_turn
from benchmarks.traces import Tokens, Trajectory
from rollout_api.length_stats import LengthStats
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.drafter import Drafter
from rollout_worker.drafting.index import POOL_TOKENS
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.proposer import HistoryProposer
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits
from rollout_worker.policy.marginal import Marginal
from rollout_worker.policy.step_cost import H100_7B

HISTORY = 50
"""Maximum history rollouts per problem."""
GROUP = 8
"""Rollouts of one problem that start together."""
WARM_UP_STEPS = 200
"""First steps, which are not measured."""


def first_turn(trajectory: Trajectory) -> Tokens:
    """Return the first turn of the model, with the token that ends it."""
    return with_end_of_turn(next(segment.tokens for segment in trajectory.segments if segment.generated))


def in_groups(problems: Sequence[Problem]) -> Iterator[Trajectory]:
    """Yield the evaluated rollouts in groups of :data:`GROUP` rollouts of one problem, again and again."""
    groups = [
        problem.evaluated[start : start + GROUP]
        for start in range(0, max(len(problem.evaluated) for problem in problems), GROUP)
        for problem in problems
    ]
    for group in cycle(groups):
        yield from group


class Batch:
    """The running rollouts, in the shape of vLLM's model runner as far as the proposer reads it."""

    def __init__(self, problems: Sequence[Problem], size: int, index: SuffixIndex) -> None:
        self._index = index
        self._waiting = in_groups(problems)
        self._num_started = 0
        longest = max(
            len(trajectory.prompt) + trajectory.generated for problem in problems for trajectory in problem.evaluated
        )
        self.token_ids = np.zeros((size, longest + MAX_DRAFT + 2), np.int32)
        self.num_tokens = np.zeros(size, np.int32)
        self.rollouts: list[ReplayedRollout] = []
        self.runner = SimpleNamespace(
            requests={}, input_batch=SimpleNamespace(req_ids=[""] * size, spec_token_ids=[[] for _ in range(size)])
        )
        for place in range(size):
            self.rollouts.append(self._start(place))

    def _start(self, place: int) -> ReplayedRollout:
        trajectory = next(self._waiting)
        self._num_started += 1
        request_id, tokens = str(self._num_started), first_turn(trajectory)
        settings = DraftSettings(request_id, trajectory.problem, max_tokens=len(tokens) + MAX_DRAFT)
        params = SimpleNamespace(extra_args=settings.as_extra_args(), stop_token_ids=[END_OF_TURN], eos_token_id=None)
        self.runner.requests[request_id] = SimpleNamespace(prompt_token_ids=trajectory.prompt, sampling_params=params)
        self.runner.input_batch.req_ids[place] = request_id
        self.runner.input_batch.spec_token_ids[place] = []
        self.token_ids[place, : len(trajectory.prompt)] = trajectory.prompt
        self.num_tokens[place] = len(trajectory.prompt)
        return ReplayedRollout(trajectory, tokens=tokens)

    def _end(self, place: int) -> None:
        request_id, rollout = self.runner.input_batch.req_ids[place], self.rollouts[place]
        del self.runner.requests[request_id]
        self._index.add(rollout.trajectory.problem, [(request_id, 1, rollout.tokens, np.empty(0, np.uint32))])

    def verify(self, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Verify drafts, which may be empty; return the tokens that this step samples for each rollout."""
        sampled = []
        for place, draft in enumerate(drafts):
            if self.rollouts[place].position >= len(self.rollouts[place].tokens):
                self._end(place)
                self.rollouts[place], draft = self._start(place), ()
            rollout = self.rollouts[place]
            accepted = count_accepted(Draft(draft, ()), rollout)
            tokens = rollout.tokens[rollout.position : rollout.position + accepted + 1].tolist()
            start = int(self.num_tokens[place])
            self.token_ids[place, start : start + len(tokens)] = tokens
            self.num_tokens[place] += len(tokens)
            rollout.position += len(tokens)
            self.runner.input_batch.spec_token_ids[place] = list(draft)
            sampled.append(tokens)
        return sampled


def filled_index(problems: Sequence[Problem]) -> SuffixIndex:
    """Return an index with the history and with a pool for drafts from other problems."""
    index = SuffixIndex(threads=1, pool_tokens=POOL_TOKENS)
    for problem in problems:
        history = [
            (f"{problem.name}/{number}", 0, first_turn(trajectory), np.empty(0, np.uint32))
            for number, trajectory in enumerate(problem.history)
        ]
        index.add(problem.name, history)
    index.wait_idle()
    return index


def measure(problems: Sequence[Problem], size: int, steps: int) -> dict[str, Any]:
    """Return the time and the outcome of *steps* decoding steps of a batch of *size* rollouts."""
    lengths = {
        problem.name: LengthStats.from_lengths([(0, len(first_turn(rollout)), False) for rollout in problem.history])
        for problem in problems
    }
    policy = Marginal(DraftLimits(MAX_DRAFT, MAX_BATCHED_TOKENS), lengths.__getitem__)
    proposer = HistoryProposer(SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=MAX_DRAFT)))
    index = filled_index(problems)
    batch = Batch(problems, size, index)
    # The duration of a step is not the cost model's, so it must neither change the budgets nor disable drafting.
    proposer.start(batch.runner, Drafter(index), DraftController(policy, H100_7B, governed=False))
    drafts: list[list[int]] = [[] for _ in range(size)]
    seconds: list[float] = []
    drafted = sampled_tokens = 0
    for step in range(WARM_UP_STEPS + steps):
        sampled = batch.verify(drafts)
        proposer.interrupt_timing()
        started = time.perf_counter()
        drafts = proposer.propose(sampled, batch.num_tokens, batch.token_ids)
        if step >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - started)
            drafted += sum(map(len, drafts))
            sampled_tokens += sum(map(len, sampled))
    return {
        "batch": size,
        "milliseconds": spread([1000 * each for each in seconds]),
        "p99_milliseconds": 1000 * quantile(seconds, 0.99),
        "drafted_per_step": drafted / steps / size,
        "tokens_per_step": sampled_tokens / steps / size,
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_trace_arguments(parser)
    parser.add_argument("--batch", default="32,64,128,256", help="comma-separated batch sizes [%(default)s]")
    parser.add_argument("--steps", type=int, default=1000, help="measured steps for each batch size [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    problems = selected_problems(parser, options, history=HISTORY)
    measurements = []
    for size in map(int, options.batch.split(",")):
        measurements.append(measure(problems, size, options.steps))
        print(measurements[-1], flush=True)
    report(
        options.json,
        [
            Figure(
                f"drafter's time in a step, batch {each['batch']}",
                each["milliseconds"]["median"] / (1000 * H100_7B.base_s),
                "of c_base of h100-7b",
                "",
                "<=",
                None,
            )
            for each in measurements
        ],
        trace=options.trace.name,
        measurements=measurements,
    )


if __name__ == "__main__":
    main()
