"""The ways to draft and to schedule that are compared, and the values among which each is tuned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rollout_bench.drafters import (
    IndexDrafter,
    NgramDrafter,
    SuffixGpuDrafter,
    TimeOnHost,
    TreeDrafter,
    TwoDrafters,
)
from benchmarks.rollout_bench.engine import Drafter, HostTime
from benchmarks.rollout_bench.job import DrafterInputs, Method
from benchmarks.rollout_bench.policies import PolicySettings
from benchmarks.rollout_bench.vllm_suffix import VllmSuffixDrafter
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS, SOURCES

_RESULTS = Path(__file__).parents[1] / "results"


def _measurements(result: str, **setting: str) -> list[dict[str, Any]]:
    rows = json.loads((_RESULTS / result).read_text())["measurements"]
    return [row for row in rows if setting.items() <= row.items()]


def _exposed_time(mode: str) -> TimeOnHost:
    rows = _measurements("exposed-time.json", mode=mode)
    return TimeOnHost([row["batch"] for row in rows], [1e-6 * row["mean_us"] for row in rows])


LAUNCHED_FIRST = _exposed_time("das")
"""For how long the GPUs wait before a step that is launched before its drafts are made."""
PREPARED_AFTERWARDS = _exposed_time("das, drafts before the launch")
"""For how long they wait before a step that is prepared after its drafts are made."""
_TREES = _measurements("hot-path-rg.json", drafter="vLLM's suffix proposer (arctic-inference)")
TREE_TIME = TimeOnHost([row["batch"] for row in _TREES], [1e-6 * row["p50_us"]["median"] for row in _TREES])
"""The time of vLLM's suffix proposer with arctic-inference's trees."""


def host_s(requests: int, reads_prompts: bool) -> float:
    """Return the :data:`HostTime` of this project, charged to every drafter on the host that was not measured.

    Steps that read prompts are prepared after their drafts are made.
    """
    return (PREPARED_AFTERWARDS if reads_prompts else LAUNCHED_FIRST)(requests)


def prepared_afterwards_s(requests: int, _: bool) -> float:
    """Return the :data:`HostTime` of this project if it prepares every step after its drafts are made."""
    return PREPARED_AFTERWARDS(requests)


def synchronous_s(requests: int, _: bool) -> float:
    """Return the :data:`HostTime` of suffix trees in V1, without V1's scheduling and processing of outputs."""
    return TREE_TIME(requests) + PREPARED_AFTERWARDS(requests)


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Rival:
    """A method with the values among which it is tuned."""

    make: Callable[..., Method]
    """Creates the method; called with one of :attr:`grid` and an order."""
    grid: Sequence[Values]
    origin: str
    """Where the method comes from, and whether its own code runs here."""
    tunes_order: bool = True
    """Whether the order of rollouts is tuned as well; otherwise it is that of the method."""

    @property
    def first_order(self) -> Values:
        """The order of rollouts for tuning, as an argument of :attr:`make`; empty if the method prescribes it."""
        return {"longest_first": True} if self.tunes_order else {}


def _index(
    policy: str,
    *,
    max_draft: int = 16,
    min_survival: float = 0.0,
    max_running: int = 0,
    governed: bool = False,
    sources: Sequence[str] = SOURCES,
) -> Callable[[DrafterInputs], Drafter]:
    def make(inputs: DrafterInputs) -> Drafter:
        index = inputs.shared_index
        if index is None:
            index = SuffixIndex(pool_tokens=POOL_TOKENS if "cross_problem" in sources else 0)
        return IndexDrafter(
            inputs.text,
            index,
            PolicySettings(policy, max_draft, min_survival, max_running),
            inputs.clock,
            inputs.lengths,
            sources=sources,
            max_tokens=inputs.max_tokens,
            expert_share=inputs.accelerator.expert_share,
            governed=governed,
        )

    return make


def _ngram(*, max_draft: int, min_ngram: int, longest_first: bool) -> Method:
    return Method(
        lambda inputs: NgramDrafter(inputs.text, min_ngram=min_ngram, max_ngram=max(4, min_ngram)),
        max_draft=max_draft,
        longest_first=longest_first,
    )


def _arctic(*, per_problem: bool, min_token_prob: float, max_draft: int = 32, longest_first: bool) -> Method:
    return Method(
        lambda inputs: TreeDrafter(inputs.text, per_problem=per_problem, min_token_prob=min_token_prob),
        max_draft=max_draft,
        host_s=synchronous_s,
        piecewise=True,
        longest_first=longest_first,
    )


def _vllm_suffix(*, max_draft: int, depth: int, longest_first: bool) -> Method:
    return Method(
        lambda inputs: VllmSuffixDrafter(
            inputs.text, lambda tokens: inputs.accelerator.forward_s(tokens, 0), depth=depth, max_draft=max_draft
        ),
        max_draft=max_draft,
        longest_first=longest_first,
    )


def _suffix_gpu(*, min_token_prob: float, longest_first: bool) -> Method:
    return Method(
        lambda inputs: SuffixGpuDrafter(inputs.text, min_token_prob=min_token_prob),
        max_draft=16,
        longest_first=longest_first,
    )


def _tlt(*, max_running: int, max_draft: int) -> Method:
    drafter = _index("fixed-below", max_draft=max_draft, max_running=max_running)
    return replace(_ours(max_draft=max_draft), make_drafter=drafter)


def _srt(*, min_token_prob: float, longest_first: bool) -> Method:
    return Method(
        lambda inputs: TreeDrafter(inputs.text, per_problem=True, min_token_prob=min_token_prob),
        max_draft=32,
        host_s=host_s,
        longest_first=longest_first,
        shares_history=True,
        runs_ahead=True,
    )


def _bubblespec(*, min_token_prob: float, longest_first: bool) -> Method:
    return Method(
        lambda inputs: TreeDrafter(inputs.text, per_problem=True, min_token_prob=min_token_prob, keeps_live_text=False),
        max_draft=32,
        host_s=host_s,
        longest_first=longest_first,
        shares_history=True,
        uses_rollouts=False,
        runs_ahead=True,
    )


def _specactor(*, min_token_prob: float, longest_first: bool) -> Method:
    return Method(
        lambda inputs: TwoDrafters(
            inputs.text,
            TreeDrafter(inputs.text, per_problem=True, min_token_prob=min_token_prob),
            NgramDrafter(inputs.text),
        ),
        max_draft=32,
        host_s=host_s,
        longest_first=longest_first,
        runs_copies=True,
    )


def _seer(*, chunk_tokens: int, max_draft: int) -> Method:
    return Method(
        _index(
            "marginal",
            max_draft=max_draft,
            sources=("history", "self", "siblings"),
        ),
        max_draft=max_draft,
        host_s=host_s,
        longest_first=True,
        has_shared_index=True,
        forgets_history=True,
        chunk_tokens=chunk_tokens,
    )


def _ours(
    *,
    policy: str = "marginal",
    max_draft: int = 16,
    min_survival: float = 0.0,
    runs_ahead: bool = False,
    governed: bool = True,
    has_shared_index: bool = False,
    host_s: HostTime = host_s,
) -> Method:
    return Method(
        _index(policy, max_draft=max_draft, min_survival=min_survival, governed=governed),
        max_draft=max_draft,
        host_s=host_s,
        longest_first=True,
        shares_history=True,
        has_shared_index=has_shared_index,
        runs_ahead=runs_ahead,
    )


def _clairvoyant() -> Method:
    return Method(
        _index("fixed", max_draft=64),
        max_draft=64,
        knows_acceptance=True,
        longest_first=True,
        shares_history=True,
    )


_PAPER = "reimplemented from the paper"
_ONLY_POLICY = "with this project's drafts, history, scheduling and governor"
_TOKEN_PROBABILITIES = [{"min_token_prob": value} for value in (0.1, 0.3, 0.5, 0.7)]
_SURVIVALS = (0.2, 0.35, 0.5, 0.65)
_OUR_GRID = [{"max_draft": value} for value in (8, 16, 32)]

RIVALS: dict[str, Rival] = {
    "none": Rival(Method, [{}], "vLLM's V2 runner, asynchronous, in order of arrival", False),
    "none-longest-first": Rival(lambda: Method(longest_first=True), [{}], "as none, in this project's order", False),
    "ngram": Rival(
        _ngram,
        [{"max_draft": 3, "min_ngram": 2}, {"max_draft": 3, "min_ngram": 4}, {"max_draft": 8, "min_ngram": 4}],
        "vLLM's code",
    ),
    "arctic-inference": Rival(
        lambda **values: _arctic(per_problem=False, **values), _TOKEN_PROBABILITIES, "arctic-inference's code"
    ),
    "arctic-inference-per-problem": Rival(
        lambda **values: _arctic(per_problem=True, **values), _TOKEN_PROBABILITIES, "arctic-inference's code"
    ),
    "vllm-suffix": Rival(
        _vllm_suffix,
        [{"max_draft": draft, "depth": depth} for draft, depth in ((8, 24), (16, 24), (32, 24), (16, 64))],
        "reimplemented from a description of vLLM's code",
    ),
    "suffix-gpu": Rival(_suffix_gpu, _TOKEN_PROBABILITIES[1:], "suffix-gpu's code"),
    "das-classes": Rival(
        lambda **values: _ours(policy="das-classes", **values), [{}], f"{_PAPER}, {_ONLY_POLICY}", tunes_order=False
    ),
    "das-classes-threshold": Rival(
        lambda **values: _ours(policy="das-classes", **values),
        [{"min_survival": value} for value in (0.2, 0.5)],
        f"{_PAPER}, with a threshold, {_ONLY_POLICY}",
        tunes_order=False,
    ),
    "das-optimal": Rival(
        lambda **values: _ours(policy="das-optimal", **values), [{}], f"{_PAPER}, {_ONLY_POLICY}", tunes_order=False
    ),
    "das-optimal-threshold": Rival(
        lambda **values: _ours(policy="das-optimal", **values),
        [{"min_survival": value} for value in (0.2, 0.5)],
        f"{_PAPER}, with a threshold, {_ONLY_POLICY}",
        tunes_order=False,
    ),
    "tlt": Rival(
        _tlt,
        [
            {"max_running": running, "max_draft": draft}
            for running, draft in ((8, 8), (8, 16), (32, 4), (32, 8), (128, 4))
        ],
        f"{_PAPER}, {_ONLY_POLICY}",
        tunes_order=False,
    ),
    "srt": Rival(_srt, _TOKEN_PROBABILITIES, _PAPER),
    "bubblespec": Rival(_bubblespec, _TOKEN_PROBABILITIES, _PAPER),
    "specactor": Rival(
        _specactor, _TOKEN_PROBABILITIES, f"{_PAPER}: copies with another drafter, without its draft models"
    ),
    "seer": Rival(
        _seer,
        [{"chunk_tokens": chunk, "max_draft": draft} for chunk, draft in ((512, 8), (512, 16), (2048, 16))],
        _PAPER,
        tunes_order=False,
    ),
    "constant-threshold": Rival(
        lambda **values: _ours(policy="fixed", governed=False, **values),
        [{"min_survival": value} for value in _SURVIVALS],
        "this project without budgets",
        tunes_order=False,
    ),
    "with-lengths": Rival(
        lambda **values: _ours(policy="marginal-with-lengths", **values),
        [{}],
        "this project's marginal-with-lengths",
        tunes_order=False,
    ),
    "known-lengths": Rival(
        lambda **values: _ours(policy="known-lengths", **values),
        [{}],
        "the same with known lengths",
        tunes_order=False,
    ),
    "das-rollout": Rival(_ours, _OUR_GRID, "this project", tunes_order=False),
    "das-rollout-default": Rival(
        _ours, [{}], "this project with a job's default of 16 draft tokens", tunes_order=False
    ),
    "das-rollout-drafts-first": Rival(
        lambda **values: _ours(host_s=prepared_afterwards_s, **values),
        _OUR_GRID,
        "this project with every step prepared after its drafts are made",
        tunes_order=False,
    ),
    "das-rollout-run-ahead": Rival(
        lambda **values: _ours(runs_ahead=True, **values),
        _OUR_GRID,
        "this project with rollouts that idle engines sample ahead, which it does not have",
        tunes_order=False,
    ),
    "das-rollout-live-siblings": Rival(
        lambda **values: _ours(has_shared_index=True, **values),
        _OUR_GRID,
        "this project with drafts from siblings while they run on other engines, which it does not have",
        tunes_order=False,
    ),
    "clairvoyant": Rival(
        _clairvoyant, [{}], "a bound for this project's drafts: only tokens that are accepted are verified", False
    ),
}
"""The methods, by name."""
