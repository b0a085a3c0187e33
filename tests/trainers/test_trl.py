"""TRL's GRPOTrainer in two processes with a real job of two engines, run as ``examples/trl_grpo`` describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import redis
import yaml

from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_store.models.model_source import default_cache
from rollout_tools.tiny_model import ensure

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo"
STEPS = 40


@dataclass
class Training:
    log: list[dict[str, Any]]
    """The trainer's log, one entry per optimizer step."""
    rollouts: list[dict[str, Any]]
    """The rollouts that the processes trained on."""
    job_code: int
    """Exit status of ``rollout run``."""
    output: str
    """What the trainer's processes have printed."""


def train(directory: Path, redis_server: str, steps: int, *options: str, weights: Path | None = None) -> Training:
    """Run a job and a trainer.

    Args:
        directory: directory for what they write.
        redis_server: URL of Redis.
        steps: number of training steps.
        options: further options of the example.
        weights: directory for weights; None to send them from memory.
    """
    model = ensure(default_cache() / "das" / "tiny-qwen3")[0]
    manifest = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    if weights is not None:
        manifest["spec"]["weights"] = {"transfer": "none", "allowedRoots": [str(weights)]}
    (directory / "job.yaml").write_text(yaml.safe_dump(manifest))

    serve = [sys.executable, "-m", "rollout_tools.cli", "run", "-f", str(directory / "job.yaml"), "--no-compare"]
    serve += ["--redis", redis_server, "--state-dir", str(directory / "state")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLE / "train.py"), "--redis", redis_server, "--model", str(model), "--steps", str(steps)]
    command += ["--output", str(directory / "lines"), *options]
    command += ["--weights", str(weights)] if weights is not None else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    job_log, train_log = directory / "job.log", directory / "train.log"
    with job_log.open("w") as job_output, train_log.open("w") as train_output:
        job = subprocess.Popen(serve, stdout=job_output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = subprocess.run(command, stdout=train_output, stderr=subprocess.STDOUT, env=environment).returncode
            assert 0 == code, train_log.read_text()[-4000:] + job_log.read_text()[-4000:]
            job_code = job.wait(timeout=90)
        finally:
            job.terminate()
            job.wait(timeout=60)

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (directory / "lines" / name).read_text().splitlines()]

    log = [line for line in lines("log.jsonl") if "reward" in line]
    return Training(log, lines("rank-0.jsonl") + lines("rank-1.jsonl"), job_code, train_log.read_text())


@pytest.fixture(scope="module")
def training(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Train with weights that are sent from the trainer's memory."""
    return train(tmp_path_factory.mktemp("trl"), redis_server, STEPS)


@pytest.mark.timeout(900)
def test_the_policy_learns(training: Training) -> None:
    rewards = [line["reward"] for line in training.log]
    assert STEPS == len(rewards)
    # After 30 steps, it had risen by 0.17 to 0.57 in four trainings.
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.1


def test_both_engines_serve_both_processes(training: Training) -> None:
    for rank in (0, 1):
        assert len({line["engine"] for line in training.rollouts if line["rank"] == rank}) >= 2


def test_every_token_is_sampled_with_the_weights_of_its_step(training: Training) -> None:
    # Version 1 contains the weights that the trainer started with.
    assert all(line["versions"] == [line["step"] + 1] for line in training.rollouts)
    assert set(range(STEPS)) == {line["step"] for line in training.rollouts}


def test_groups_are_complete_across_processes(training: Training) -> None:
    for step in range(STEPS):
        group_sizes: dict[str, int] = {}
        for line in training.rollouts:
            if line["step"] == step:
                group_sizes[line["problem"]] = group_sizes.get(line["problem"], 0) + 1
        # Two rows of the dataset may contain the same problem.
        assert {0} == {size % 8 for size in group_sizes.values()}


def test_trl_corrects_for_the_numerics_of_the_engines(training: Training) -> None:
    for line in training.log:
        assert 0.9 < line["sampling/importance_sampling_ratio/mean"] <= 1.1


def test_the_figures_of_both_processes_are_logged_beside_the_reward(training: Training) -> None:
    for step, line in enumerate(training.log):
        rollouts = [rollout for rollout in training.rollouts if rollout["step"] == step]
        assert len(rollouts) == line["rollout/num_rollouts"]
        assert sum(rollout["tokens"] for rollout in rollouts) == line["rollout/num_tokens"]
        assert (
            max(rollout["tokens"] for rollout in rollouts)
            == line["rollout/length_max"]
            == line["completions/max_length"]
        )
        assert (step + 1, 0) == (line["rollout/weight_version"], line["rollout/staleness_max"])
        assert 0 <= line["rollout/tail_s"] < line["rollout/makespan_s"] < line["step_time"]
    assert training.log[-1]["rollout/accepted_per_step"] > 0.0


def test_closing_the_job_ends_it(training: Training) -> None:
    assert 0 == training.job_code


@pytest.mark.timeout(900)
def test_weights_go_through_files_if_the_job_takes_none_from_memory(redis_server: str, tmp_path: Path) -> None:
    training = train(tmp_path, redis_server, 2, weights=tmp_path / "weights")
    assert {1, 2} == {version for line in training.rollouts for version in line["versions"]}
    assert ["version-000001", "version-000002"] == sorted(path.name for path in (tmp_path / "weights").iterdir())
    reason = f"published through files in {tmp_path / 'weights'}: spec.weights.transfer of the job is none"
    assert 1 == training.output.count(reason)


@pytest.mark.timeout(900)
def test_engines_sleep_between_generations(redis_server: str, tmp_path: Path) -> None:
    seen: list[bytes | None] = []
    has_ended = threading.Event()

    def watch() -> None:
        client = redis.Redis.from_url(redis_server)
        while not has_ended.wait(0.05):
            uid = client.get(job_uid_key("default/trl-grpo"))
            pause = client.hget(MessageKeys(uid.decode()).job, "pause") if uid else None
            if not seen or pause != seen[-1]:
                seen.append(pause)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            training = train(tmp_path, redis_server, 2, "--sleep")
        finally:
            has_ended.set()
        watching.result()
    assert {1, 2} == {version for line in training.rollouts for version in line["versions"]}
    assert 2 == seen.count(b"sleep")
