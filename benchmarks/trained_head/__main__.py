"""Measures what a trained draft head adds to drafts from earlier rollouts; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.acceptance import accepted_at, frontier
from benchmarks.figures import Figure, report
from benchmarks.replay import Outcome, replay, with_end_of_turn
from benchmarks.rollout_bench.accelerators import ACCELERATORS
from benchmarks.rollout_bench.methods import SYNCHRONOUS_OVERHEAD_S
from benchmarks.rollout_bench.workload import half_of
from benchmarks.traces import Trajectory, by_problem, checkpoints, read_trace
from benchmarks.trained_head.arbiter import Arbiter
from benchmarks.trained_head.drafter import ArbitratedDrafter, without_end
from benchmarks.trained_head.head import STEPS, Chains, Head, Policy, Trainer, draft_all, pretraining_texts
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS, LearnedState
from rollout_worker.runtime.model_cache import default_cache
from rollout_worker.tiny_model import ensure

THRESHOLDS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
"""Survivals below which nothing is drafted; each is replayed."""
BUDGET = 16
DRAFTED = (1, 2, 4)
BATCHES = (8, 32, 128)
GPU = "7b-h100"
GPU_HEAD_SHARE = 0.046
"""Duration of one step of an EAGLE-3 head on a 7B model, relative to a forward pass of the model for few tokens. The
head reads a layer of 233M parameters and the rows of the output matrix for 32,000 tokens, 115M parameters, of 7.6B."""
TIMED_TOKENS = (8, 32, 128, 512)


class Drafters(NamedTuple):
    """The drafters among which the arbiter chooses."""

    history: bool
    """Whether the suffix index drafts."""
    head_steps: int
    """Number of tokens that the head drafts; 0 without it."""

    def __str__(self) -> str:
        names = ["history"] * self.history + [f"head of {self.head_steps}"] * (self.head_steps > 0)
        return " and ".join(names)


HISTORY = Drafters(history=True, head_steps=0)
COMPARED = (HISTORY, Drafters(False, STEPS), *(Drafters(True, steps) for steps in (1, 2, STEPS)))


class Setting(NamedTuple):
    """What is replayed at once."""

    drafters: Drafters
    threshold: float
    seen: bool
    """Whether the problems were sampled in earlier versions, and the head was trained on them."""


class Version(NamedTuple):
    """The rollouts of a checkpoint, with what the head drafts for them."""

    name: str
    rollouts: dict[str, list[Trajectory]]
    """By problem, without the token that ends a response."""
    chains: dict[str, list[Chains]]
    """In the same order; empty for the first version, which is history only."""


def is_seen(problem: str) -> bool:
    """Return whether a problem's rollouts become history and train the head."""
    return half_of(problem) == "tuning"


def train_and_draft(
    trajectories: Sequence[Trajectory], directory: Path, pretraining: Sequence[Trajectory], passes: int
) -> list[Version]:
    """Train the head on version after version, and draft for each with what was learned from the earlier ones."""
    versions: list[Version] = []
    head: Head | None = None
    for name in checkpoints(trajectories):
        began = time.monotonic()
        policy = Policy(directory / name)
        rollouts = by_problem([one for one in trajectories if one.checkpoint == name])
        chains: dict[str, list[Chains]] = {}
        if head is None:
            head = Head(policy)
            trainer = Trainer(head)
            loss = trainer.train(policy, pretraining, 1)
            print(f"pretraining: loss {loss:.3f}, {time.monotonic() - began:.0f} s", flush=True)
        else:
            in_order = [one for group in rollouts.values() for one in group]
            drafted = iter(draft_all(head, policy, in_order))
            chains = {problem: [next(drafted) for _ in group] for problem, group in rollouts.items()}
        seen = [one for problem, group in rollouts.items() if is_seen(problem) for one in group]
        loss = trainer.train(policy, seen, passes)
        replayed = {problem: [without_end(one) for one in group] for problem, group in rollouts.items()}
        versions.append(Version(name, replayed, chains))
        print(f"{name}: loss {loss:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return versions


_versions: list[Version] = []
"""Replaying processes inherit it from the main process."""


def replay_all(setting: Setting) -> list[Outcome]:
    """Replay every version but the first. What was learned about acceptance is kept from version to version."""
    arbiter, state, outcomes = Arbiter(), None, []
    for number, version in enumerate(_versions):
        if not number:
            continue
        index = _index_with_history(number, state) if setting.drafters.history else None
        outcome = Outcome()
        for problem, group in version.rollouts.items():
            if is_seen(problem) == setting.seen:
                chains = version.chains[problem] if setting.drafters.head_steps else []
                drafter = ArbitratedDrafter(index, arbiter, setting.threshold, chains, setting.drafters.head_steps)
                replay(drafter, problem, group, BUDGET, outcome)
        state = None if index is None else index.state_dict()
        outcomes.append(outcome)
    return outcomes


def _index_with_history(number: int, state: LearnedState | None) -> SuffixIndex:
    """Return an index with the rollouts that the versions before a number have sampled for the seen problems."""
    index = SuffixIndex(pool_tokens=POOL_TOKENS)
    for generation, version in enumerate(_versions[:number]):
        for problem, group in version.rollouts.items():
            if is_seen(problem):
                texts = [
                    (f"{version.name}/{one.sample}", generation, with_end_of_turn(one.segments[0].tokens))
                    for one in group
                ]
                index.add(problem, texts)
    index.wait_idle()
    if state is not None:
        index.load_state_dict(state)
    return index


class Times(NamedTuple):
    """Durations in seconds."""

    policy: Callable[[int], float]
    """Of a verification step, by its number of tokens."""
    head: Callable[[int], float]
    """Of one step of the head, by its number of rollouts."""


def gpu_times() -> Times:
    """Return the times that the simulations assume for a 7B model."""
    gpu = ACCELERATORS[GPU]
    return Times(lambda tokens: gpu.forward_s(tokens, 0), lambda tokens: GPU_HEAD_SHARE * gpu.forward_s(tokens, 0))


@torch.inference_mode()
def tiny_times(policy: Policy, head: Head, *, rounds: int = 30) -> tuple[Times, dict[str, list[float]]]:
    """Measure the tiny model and its head on one CPU thread, without the context; return times, and the measurements.

    Each row is one text of one token. A verification step also has the overhead of a real engine's step.
    """
    measured: dict[str, list[float]] = {"tokens": [], "policy": [], "head": []}
    for tokens in TIMED_TOKENS:
        text = torch.randint(3, 400, (tokens, 2))
        features = torch.randn(tokens, 1, 3 * policy.model.config.hidden_size)
        measured["tokens"].append(tokens)
        measured["policy"].append(_median_s(partial(policy.model, input_ids=text[:, :1], use_cache=False), rounds))
        measured["head"].append(_median_s(partial(head.draft, features, text[:, 1:]), rounds) / STEPS)
    policy_s, head_s = (_interpolated(measured["tokens"], measured[name]) for name in ("policy", "head"))
    return Times(lambda tokens: policy_s(tokens) + SYNCHRONOUS_OVERHEAD_S, head_s), measured


def _interpolated(tokens: Sequence[float], seconds: Sequence[float]) -> Callable[[int], float]:
    return lambda value: float(np.interp(value, tokens, seconds))


def _median_s(run: Callable[[], Any], rounds: int) -> float:
    durations = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        durations.append(time.perf_counter() - began)
    return float(np.median(durations))


def seconds_per_token(outcomes: Sequence[Outcome], times: Times, batch: int, head_steps: int) -> float:
    """Return the time per token of a batch, for the best of several thresholds or without drafts."""
    best = times.policy(batch) / batch
    for outcome in outcomes:
        step_s = times.policy(round(batch * (1 + outcome.drafted_per_step))) + head_steps * times.head(batch)
        best = min(best, step_s / (batch * (1 + outcome.accepted_per_step)))
    return best


def summed(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the totals of several versions."""
    return Outcome(*(sum(getattr(one, name) for one in outcomes) for name in ("steps", "drafted", "accepted")))


def figures_of(results: Mapping[Setting, Sequence[Outcome]], times: Mapping[str, Times]) -> list[Figure]:
    """Return the figures; each compares with the history alone, at the best thresholds of both."""
    figures = []
    for seen, words in ((True, "problems with history"), (False, "problems without history")):
        totals = {
            drafters: [summed(results[Setting(drafters, threshold, seen)]) for threshold in THRESHOLDS]
            for drafters in COMPARED
        }
        base = frontier(totals[HISTORY])
        for drafters in COMPARED[1:]:
            hull = frontier(totals[drafters])
            for drafted in DRAFTED:
                gain = accepted_at(hull, drafted) / accepted_at(base, drafted)
                name = f"accepted per step at {drafted} drafted, {drafters}, {words}"
                figures.append(Figure(name, gain, "x", "history", ">=", None))
            for model, durations in times.items():
                for batch in BATCHES:
                    value = seconds_per_token(
                        totals[drafters], durations, batch, drafters.head_steps
                    ) / seconds_per_token(totals[HISTORY], durations, batch, 0)
                    target = 1.0 if drafters.history else None
                    name = f"time per token (estimated), {model}, batch {batch}, {drafters}, {words}"
                    figures.append(Figure(name, value, "x", "history", "<=", target))
    return figures


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trained_head", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="trace of benchmarks.record_training")
    parser.add_argument("--checkpoints", type=Path, default=Path(".rollout/record_training"), help="[%(default)s]")
    parser.add_argument("--passes", type=int, default=4, help="of training on each version's rollouts [%(default)s]")
    parser.add_argument("--pretraining", type=int, default=8192, help="texts that the head is pretrained on [8192]")
    parser.add_argument("--processes", type=int, default=2, help="replays at the same time [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        trajectories = read_trace(options.trace, None)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if several := next((one for one in trajectories if len(one.segments) > 1), None):
        parser.error(
            f"--trace: rollout {several.sample} of {several.problem} has several turns; the head drafts for one"
        )
    names = checkpoints(trajectories)
    if missing := [name for name in names if not (options.checkpoints / name).is_dir()]:
        parser.error(f"--checkpoints: {options.checkpoints} lacks {', '.join(missing)}; run benchmarks.record_training")
    [*_, base] = ensure(default_cache() / "das" / "tiny-qwen3")
    pretraining = pretraining_texts(base, options.pretraining)
    _versions.extend(train_and_draft(trajectories, options.checkpoints, pretraining, options.passes))
    policy = Policy(options.checkpoints / names[-1])
    tiny, measured = tiny_times(policy, Head(policy))
    settings = [Setting(one, threshold, seen) for one in COMPARED for threshold in THRESHOLDS for seen in (True, False)]
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        results = dict(zip(settings, pool.imap(replay_all, settings), strict=True))
    report(
        options.json,
        figures_of(results, {"tiny model": tiny, GPU: gpu_times()}),
        trace=options.trace.name,
        passes=options.passes,
        seconds=measured,
        rows=[
            row_of(setting, version.name, outcome)
            for setting, outcomes in results.items()
            for version, outcome in zip(_versions[1:], outcomes, strict=True)
        ],
    )


def row_of(setting: Setting, version: str, outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of one version under one setting."""
    return {
        "drafters": str(setting.drafters),
        "threshold": setting.threshold,
        "seen": setting.seen,
        "version": version,
        "steps": outcome.steps,
        "drafted_per_step": outcome.drafted_per_step,
        "accepted_per_step": outcome.accepted_per_step,
        "largest_decile_error": outcome.calibration().max_decile_error(200),
    }


if __name__ == "__main__":
    main()
