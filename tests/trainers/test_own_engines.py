"""Trainers that run vLLM themselves draft from earlier rollouts, unmodified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_store.history.records import START, HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_worker.drop_in.settings import VARIABLE
from tests.support.responses import MAX_LOGPROB_ERROR

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, PER_STEP = 3, 16
"""Steps of a training, each an epoch, and the rollouts of a step."""


@dataclass
class Training:
    """What a training has sampled."""

    log: list[dict[str, Any]]
    """TRL's log, one entry per step."""
    sampled: list[list[int]]
    """Tokens of the responses."""
    stats: dict[str, Any]
    """The drafter's statistics; empty without one."""

    def accepted(self) -> int:
        """Return how many draft tokens from earlier rollouts were accepted, none of which may have failed."""
        assert 0 == self.stats["drafting_failures"], self.stats["last_drafting_failure"]
        return int(self.stats["labeled_counters"]["source_accepted_tokens"]["history"])


def train(output: Path, variables: dict[str, str], **settings: Any) -> Training:
    """Run TRL's GRPOTrainer over the same four prompts in each step.

    Args:
        output: directory that is created.
        variables: environment variables.
        **settings: of ``GRPOConfig``.
    """
    output.mkdir()
    command = [sys.executable, "-m", "tests.support.trl_on_cpu", "--output", str(output)]
    command += ["--settings", json.dumps({"max_steps": STEPS, **settings})]
    with (output / "log").open("w") as log:
        code = subprocess.run(command, env={**os.environ, **variables}, stdout=log, stderr=log).returncode
    assert 0 == code, (output / "log").read_text()[-4000:]
    training = Training(**json.loads((output / "training.json").read_text()))
    assert STEPS * PER_STEP == len(training.sampled)
    return training


def rollouts_in(url: str, keys: HistoryKeys) -> list[HistoryRecord]:
    """Return all rollouts of a history."""
    store = HistoryStore(redis.Redis.from_url(url), keys, window=16)
    positions = dict.fromkeys((problem.problem_id for problem in store.catalog.problems()), START)
    return [record for found in store.read(positions, count=1_000).values() for record in found.records]


def test_the_responses_of_trl_stay_the_same(tmp_path: Path) -> None:
    greedy = {"top_k": 1, "learning_rate": 0.0}
    plain = train(tmp_path / "plain", {}, **greedy)
    drafted = train(tmp_path / "drafted", {VARIABLE: "memory"}, **greedy)
    assert drafted.accepted() > 100
    assert plain.sampled == drafted.sampled


def test_trl_trains_with_drafts_from_its_earlier_epochs(tmp_path: Path, redis_url: str) -> None:
    url = redis_url.removesuffix("/0")
    training = train(tmp_path / "trl", {VARIABLE: f"{url}/math"}, learning_rate=3e-4)
    assert training.accepted() > 100
    for line in training.log:
        # The engine samples with the weights of each step, and its log-probabilities are those of the trainer.
        assert line["sampling/sampling_logp_difference/max"] < MAX_LOGPROB_ERROR
        assert line["grad_norm"] > 0
    rollouts = rollouts_in(url, HistoryKeys("default", "math"))
    assert dict.fromkeys(range(1, STEPS + 1), PER_STEP) == Counter(one.weight_version for one in rollouts)
    assert Counter(map(tuple, training.sampled)) == Counter(tuple(one.tokens.tolist()) for one in rollouts)
