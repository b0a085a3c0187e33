"""Trainers that reach a real job by a URL: TRL's two trainers, verifiers, SkyRL's client, and the calls of slime.

The trainer of ``examples/trl_async_grpo`` is not modified. It assumes a GPU in some places, which
``tests/support/async_grpo_on_cpu`` fills in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import redis
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient

from rollout_api.ports import free_port
from rollout_api.protocol.keys import HistoryKeys, MessageKeys, job_uid_key
from rollout_store.models.model_source import default_cache, load_tokenizer
from rollout_tools.tiny_model import ensure
from tests.support.history_contents import read_rollouts, rollout_ids_in
from tests.support.reference_model import make_adapter
from tests.support.responses import MAX_LOGPROB_ERROR
from tests.support.tool_calling_model import CHAT_TEMPLATE, train_on
from tests.support.trl_on_cpu import PER_STEP
from tests.support.trl_on_cpu import train as train_in_server_mode
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
SKYRL = ROOT / ".venv" / "skyrl"
VERIFIERS = ROOT / ".venv" / "verifiers" / "bin" / "python"
ENVIRONMENTS = ROOT / "tests" / "support" / "environments"
EXAMPLE = ROOT / "examples" / "trl_async_grpo"
CLIENTS = ROOT / "tests" / "support" / "http_clients"
WITH_TESTS = {**os.environ, "PYTHONPATH": str(ROOT)}
"""Environment of programs that import the tests' modules."""
HISTORY = HistoryKeys("default", "trl-async-grpo")
STEPS, FULL_STEPS, SERVER_MODE_STEPS = 24, 4, 20
ADAPTERS_IN_USE = 3
"""A trainer with a max_staleness of 2 keeps the names of as many adapters."""


def largest_error(
    model: Any, prompt: list[int], response: list[int], logprobs: list[float], not_first: int | None = None
) -> float:
    """Return the largest difference of a response's log-probabilities from those under the model.

    Args:
        model: a model of transformers.
        prompt: token ids.
        response: token ids.
        logprobs: log-probability of each token of the response.
        not_first: token that the response must not begin with.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    if not_first is not None:
        logits[0, not_first] = -torch.inf
    expected = logits.log_softmax(-1)[range(len(response)), response]
    return float((expected - torch.tensor(logprobs)).abs().max())


def assert_samples_from(url: str, checkpoint: Path) -> None:
    """Check that a job's responses have the log-probabilities under a checkpoint."""
    prompt = load_tokenizer(checkpoint).encode("3+4=")
    body = {"model": "trl-async-grpo", "prompt": prompt, "max_tokens": 40, "logprobs": 1, "return_token_ids": True}
    choice = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    assert largest_error(model, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"]) < 1e-3


def publish_trained_model(url: str, directory: Path) -> tuple[Path, int]:
    """Let the job serve a trained policy; return its directory and its weight version."""
    checkpoint = shutil.copytree(ensure(default_cache() / "das" / "tiny-qwen3")[-1], directory)
    reply = httpx.post(f"{url}/update_weights", json={"weight_dir": str(checkpoint)}, timeout=600)
    return checkpoint, reply.raise_for_status().json()["weight_version"]


@pytest.fixture(scope="module")
def job(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL of a job's server, and the directory where it may load weights."""
    directory = tmp_path_factory.mktemp("async-grpo")
    manifest = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    manifest["spec"]["weights"] = {"allowedRoots": [str(directory)]}
    file, port = directory / "job.yaml", free_port()
    file.write_text(yaml.safe_dump(manifest))
    common = ["-f", str(file), "--redis", redis_server]
    template = directory / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    tools = ["--enable-auto-tool-choice", "--tool-call-parser=hermes", f"--chat-template={template}"]
    commands = {
        "run": ["run", *common, "--no-compare", "--state-dir", str(directory / "state")],
        "serve": ["serve", *common, "--port", str(port), *tools],
    }
    processes: list[subprocess.Popen[bytes]] = []
    logs = {name: directory / f"{name}.log" for name in commands}
    url = f"http://127.0.0.1:{port}"

    def is_healthy() -> bool:
        assert all(process.poll() is None for process in processes), [log.read_text()[-2000:] for log in logs.values()]
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        for name, command in commands.items():
            with logs[name].open("w") as log:
                arguments = [sys.executable, "-m", "rollout_tools.cli", *command]
                processes.append(subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT))
        wait_for(is_healthy, 600, "the server does not start")
        yield url, directory
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=60)


def train(url: str, output: Path, steps: int, *options: str, **variables: str) -> list[dict[str, Any]]:
    """Run the example's trainer; return its log, one entry per training step."""
    # Without an adapter, TRL asks for the model under this name, by which the job's manifest names it, too.
    model = ensure(default_cache() / "das" / "tiny-qwen3")[0].relative_to(default_cache())
    command = [sys.executable, str(EXAMPLE / "train.py"), "--url", url, "--model", str(model), "--cpu"]
    command += ["--output", str(output), "--steps", str(steps), *options]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'tests' / 'support' / 'async_grpo_on_cpu'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        **variables,
    }
    log = output.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=default_cache()
        ).returncode
    assert 0 == code, log.read_text()[-4000:]
    state = json.loads((output / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "reward" in entry]


@pytest.fixture(scope="module")
def training(job: tuple[str, Path]) -> list[dict[str, Any]]:
    """The log of a trainer of an adapter, one entry per training step."""
    url, directory = job
    return train(url, directory / "out", STEPS)


@pytest.mark.timeout(600)
def test_the_trainer_makes_all_steps_and_the_policy_learns(training: list[dict[str, Any]]) -> None:
    assert STEPS == len(training)
    rewards = [entry["reward"] for entry in training]
    assert fmean(rewards[-6:]) > fmean(rewards[:6])


def test_log_probabilities_are_those_of_the_adapter_that_has_sampled(training: list[dict[str, Any]]) -> None:
    # In the first step, the policy is the one that has sampled. Later, requests may be some steps old.
    assert 0 <= training[0]["kl"] < 1e-5
    assert pytest.approx(1.0, abs=1e-4) == training[0]["ratio"]
    assert max(entry["sample/staleness_max"] for entry in training) <= 2


def test_every_step_has_published_its_adapter(training: list[dict[str, Any]], job: tuple[str, Path]) -> None:
    url, _ = job
    assert not httpx.get(f"{url}/is_paused").json()["is_paused"]
    # One for the start, and one after each step.
    assert {"weight_version": str(STEPS + 1)} == httpx.get(f"{url}/weight_info").json()


def test_the_rollouts_are_recorded_in_the_history(training: list[dict[str, Any]], redis_server: str) -> None:
    client = redis.Redis.from_url(redis_server)
    uid: Any = client.get(job_uid_key("default/trl-async-grpo"))
    stored = [one for one in rollout_ids_in(client, HISTORY) if one.startswith(uid.decode())]
    trained = sum(entry["batch/samples_per_step"] for entry in training)
    assert len(stored) >= trained
    adapters = client.hkeys(MessageKeys(uid.decode()).adapters)
    assert ADAPTERS_IN_USE == len(adapters)


def test_slimes_calls_update_the_weights_and_sample_from_them(job: tuple[str, Path]) -> None:
    # slime.rollout.sglang_rollout and slime.backends.sglang_utils, commit 624b824
    url, directory = job
    checkpoints = ensure(default_cache() / "das" / "tiny-qwen3")
    copy = shutil.copytree(checkpoints[-1], directory / "checkpoint")
    version = int(httpx.get(f"{url}/get_weight_version").json()["weight_version"]) + 1
    for call in ("pause_generation", "flush_cache"):
        httpx.post(f"{url}/{call}", json={}).raise_for_status()
    update = {"model_path": str(copy), "weight_version": str(version)}
    assert httpx.post(f"{url}/update_weights_from_disk", json=update, timeout=120).json()["success"]
    httpx.post(f"{url}/continue_generation", json={}).raise_for_status()

    chat = [{"role": "user", "content": "3+4="}]
    prompt = load_tokenizer(copy).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 40, "skip_special_tokens": False}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    reply = httpx.post(f"{url}/generate", json=body, timeout=120).json()
    pairs = reply["meta_info"]["output_token_logprobs"]
    assert str(version) == reply["meta_info"]["weight_version"]
    assert reply["output_ids"] == [token for _, token, _ in pairs]

    model = AutoModelForCausalLM.from_pretrained(copy, dtype="float32")
    assert largest_error(model, prompt, reply["output_ids"], [logprob for logprob, _, _ in pairs]) < 1e-3


def test_skyrls_client_samples_pauses_and_replaces_an_adapter(job: tuple[str, Path]) -> None:
    url, directory = job
    checkpoint, version = publish_trained_model(url, directory / "skyrl")
    adapter = make_adapter(directory / "skyrl-adapter", checkpoint, seed=1)
    command = [sys.executable, CLIENTS / "skyrl_client.py", SKYRL, url, "trl-async-grpo", adapter]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=WITH_TESTS)
    assert 0 == done.returncode, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])

    assert [1, 1] == report["world_size"]
    assert {"weight_version": str(version + 2)} == httpx.get(f"{url}/weight_info").json()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    end = load_tokenizer(checkpoint).eos_token_id
    for name in ("base", "adapter"):
        if name == "adapter":
            model = PeftModel.from_pretrained(model, adapter)
        found = report[name]
        assert {"stop", "length"} >= {*found["stop_reasons"]}
        samples = zip(report["prompts"], found["response_ids"], found["response_logprobs"], strict=True)
        # SkyRL sets min_tokens to 1.
        assert max(largest_error(model, *sample, not_first=end) for sample in samples) < 1e-3
    assert report["is_paused"]
    assert 2 == len(report["resumed"]["responses"])
    assert report["chat"]["choices"][0]["message"]["content"]
    assert "call start_weight_update first" in report["refusal"]


def test_skyrls_sender_sends_all_weights(job: tuple[str, Path]) -> None:
    url, _ = job
    before = int(httpx.get(f"{url}/weight_info").json()["weight_version"])
    checkpoint = ensure(default_cache() / "das" / "tiny-qwen3")[1]
    command = [sys.executable, CLIENTS / "skyrl_sender.py", SKYRL, url, checkpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=WITH_TESTS)
    assert 0 == done.returncode, done.stderr[-2000:]
    assert {"weight_version": str(before + 2)} == httpx.get(f"{url}/weight_info").json()
    assert_samples_from(url, checkpoint)


@pytest.mark.timeout(600)
def test_all_turns_of_an_environment_of_verifiers_with_tools_are_known(job: tuple[str, Path]) -> None:
    if not VERIFIERS.exists():
        pytest.skip("verifiers is not installed; run scripts/get-verifiers")
    url, directory = job
    checkpoint = ensure(default_cache() / "das" / "tiny-qwen3")[-1]
    copy = shutil.copytree(checkpoint, directory / "tools")
    call = {"function": {"name": "sums_add", "arguments": {"a": 3, "b": 4}}}
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "3+4="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "7"},
    ]
    train_on(conversation, checkpoint, copy)
    httpx.post(f"{url}/update_weights", json={"weight_dir": str(copy)}, timeout=600).raise_for_status()
    environment = {
        "taskset": {"id": "tools-for-verifiers"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    variables = {
        **os.environ,
        "HOME": str(directory),
        # verifiers installs the packages of its programs with uv, in whose place a script says that they are there.
        "PATH": f"{ENVIRONMENTS}:{os.environ['PATH']}",
        "PYTHON": str(VERIFIERS),
        "PYTHONPATH": str(ENVIRONMENTS),
    }
    command = [VERIFIERS, CLIENTS / "verifiers_environment.py", url, "trl-async-grpo", json.dumps(environment)]
    with (directory / "verifiers.log").open("w") as log:
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=log, timeout=600)
    assert 0 == done.returncode, (directory / "verifiers.log").read_text()[-4000:]
    report = json.loads(done.stdout)
    rollouts, prefixes = report["rollouts"], report["prefixes"]
    for rollout in rollouts:
        assert [] == rollout["errors"]
        assert ["user", "assistant", "tool", "assistant"] == rollout["roles"]
        assert 1.0 == rollout["reward"]
    assert len(rollouts) == prefixes.count("unknown")  # the first turns
    assert len(rollouts) == prefixes.count("sampled") + prefixes.count("restored")


@pytest.mark.timeout(600)
def test_trl_trains_all_weights_and_sends_them(job: tuple[str, Path]) -> None:
    url, directory = job
    before = int(httpx.get(f"{url}/weight_info").json()["weight_version"])
    variables = {"SEND_WEIGHTS_ON_CPU": "1", "VLLM_HOST_IP": "127.0.0.1"}
    log = train(url, directory / "full", FULL_STEPS, "--full", **variables)
    assert FULL_STEPS == len(log)
    # The first step samples with the trainer's initial weights, whatever the job has served before.
    assert pytest.approx(1.0, abs=1e-4) == log[0]["ratio"]
    assert {"weight_version": str(before + 1 + FULL_STEPS)} == httpx.get(f"{url}/weight_info").json()
    assert not httpx.get(f"{url}/is_paused").json()["is_paused"]

    assert_samples_from(url, directory / "full")


@pytest.mark.timeout(600)
def test_trl_trains_in_server_mode(job: tuple[str, Path], redis_server: str) -> None:
    url, directory = job
    before = int(httpx.get(f"{url}/weight_info").json()["weight_version"])
    settings = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": free_port()}
    training = train_in_server_mode(
        directory / "server-mode",
        {"VLLM_HOST_IP": "127.0.0.1"},
        max_steps=SERVER_MODE_STEPS,
        learning_rate=3e-4,
        **settings,
    )
    # The engines sample with the weights of each step.
    assert max(line["sampling/sampling_logp_difference/max"] for line in training.log) < MAX_LOGPROB_ERROR
    rewards = [line["reward"] for line in training.log]
    assert fmean(rewards[-5:]) > fmean(rewards[:5])
    last = range(before + SERVER_MODE_STEPS - 4, before + SERVER_MODE_STEPS + 1)
    stored = [one for one in read_rollouts(redis.Redis.from_url(redis_server), HISTORY) if one.weight_version in last]
    assert dict.fromkeys(last, PER_STEP) == Counter(record.weight_version for record in stored)
    sampled = training.sampled[-len(last) * PER_STEP :]
    assert Counter(map(tuple, sampled)) == Counter(tuple(record.tokens.tolist()) for record in stored)


def test_trls_client_chats_and_scores(job: tuple[str, Path]) -> None:
    url, _ = job
    client = VLLMClient(url)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    chat = client.chat([[{"role": "user", "content": "3+4="}]], n=2, max_tokens=20, tools=[tool])
    [prompt] = chat["prompt_ids"]
    sequences = [[*prompt, *response] for response in chat["completion_ids"]]
    scores = client.get_sequence_logprobs(sequences, [len(prompt)] * 2, top_logprobs=5)
    for sampled, scored in zip(chat["logprobs"], scores["actual_logprobs"], strict=True):
        assert torch.allclose(torch.tensor(sampled), torch.tensor(scored), atol=MAX_LOGPROB_ERROR)
