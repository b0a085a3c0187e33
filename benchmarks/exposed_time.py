"""The time for which a GPU waits for the host between two steps, with a simulated device.

The engine, its scheduler and the V2 model runner are real, with a model of two small layers. The CPU computes what a
GPU would compute, but this time is not counted: the host's clock (:class:`Device`) stands still meanwhile, apart from
the assumed cost of each launch. The clock is the processor time of the thread that runs the steps, so that other
processes hardly matter. The device executes one step after the other, each for as long as a cost model says. If the
host waits for a step, its clock jumps to the end of that step. The exposed time of a step is the time from the end of
the step before until the device can go on with it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, quantile
from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect
from rollout_store.history.store import HistoryStore
from rollout_store.runtime.embedded_redis import EmbeddedRedis
from rollout_worker.engine.config import EngineConfig, cuda_graph_sizes, scheduled_tokens
from rollout_worker.engine.draft_settings import DraftingConfig, HistoryLocation
from rollout_worker.engine.worker_extension import DraftingExtension
from rollout_worker.policy.step_cost import H100_7B, CudaGraphs
from tests.support.engines import EngineHarness, start_with_extension
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.reference_model import EOS, LoopThread, make_model

KERNEL_LAUNCH_S = 10e-6
"""Assumed host time of the launch of a Triton kernel."""
STEP_LAUNCH_S = 20e-6
"""Assumed host time of the launch of a CUDA graph."""
SAMPLER_LAUNCH_S = 200e-6
"""Assumed host time of the launches of a sampler's kernels."""
WAKE_UP_S = 20e-6
"""Assumed seconds until the host goes on when an event that it waits for is reached."""
MAX_REQUESTS, MAX_DRAFT = 256, 16
MAX_LOGITS = 2048
"""Number of logits of a step that vLLM verifies at once, with a vocabulary of 128 thousand tokens."""
TARGETS_US = {16: 150.0, 256: 300.0}
"""Targets for the median with drafts, by batch size."""
FIRST_STEPS = 8
"""Steps after the last prompt that are not measured."""
PROMPT_TOKENS, MAX_TOKENS, HISTORY = 32, 200, 4
MAX_NGRAM_BATCH = 16
"""Largest batch with n-grams, whose kernel takes too long in the interpreter for more."""
MODES = ("none", "ngram", "das, drafts before the launch", "das")
_ROOT = Path(__file__).parents[1]
_V2_PATHS = [str(_ROOT), str(_ROOT / ".venv/triton"), str(_ROOT / "tests/support/v2_on_cpus")]
V2_ON_CPUS = {
    "PYTHONPATH": os.pathsep.join(_V2_PATHS),
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
"""Environment variables with which the V2 model runner runs in Triton's interpreter."""


class Device:
    """A device that executes steps, and the clock of the host beside it."""

    def __init__(self) -> None:
        self.free_at = 0.0
        """When the device has executed everything that was launched."""
        self.steps: list[tuple[int, int, float]] = []
        """Number of decoding requests and of tokens of each step, and the seconds for which the device waited for it.

        Steps that read prompts have 0 requests."""
        self._skipped = 0.0
        self._is_counting = True
        self._deferred_s: float | None = None

    def now(self) -> float:
        """Return the host's time in seconds."""
        return time.thread_time() + self._skipped

    @contextmanager
    def computing(self, launch_s: float) -> Iterator[None]:
        """Do not count the time that this takes, except for *launch_s*."""
        if not self._is_counting:
            yield
            return
        self._is_counting, began = False, time.thread_time()
        try:
            yield
        finally:
            self._is_counting = True
            self._skipped += launch_s - (time.thread_time() - began)

    def launch(self, requests: int, tokens: int, context_tokens: int) -> None:
        """Launch a step."""
        deferred_s, self._deferred_s = self._deferred_s, None
        if deferred_s is not None:
            self.wait_until(self.free_at)
            self._skipped += deferred_s
        now = self.now()
        self.steps.append((requests, tokens, max(0.0, now - self.free_at)))
        self.free_at = max(now, self.free_at) + H100_7B.step_time(tokens, context_tokens)

    @contextmanager
    def after_launch(self) -> Iterator[None]:
        """Count the time that this takes after the next launch, which waits for it, as if it happened then."""
        began = self.now()
        self._deferred_s = 0.0
        try:
            yield
        finally:
            self._deferred_s = self.now() - began
            self._skipped -= self._deferred_s

    def wait_until(self, end: float) -> None:
        """Let the host wait until the device has reached a time."""
        if self._deferred_s is not None:
            return  # It waits after the launch.
        if (remaining := end - self.now()) > 0:
            self._skipped += remaining + WAKE_UP_S


class Event:
    """A CUDA event behind everything that was launched before."""

    def __init__(self, device: Device) -> None:
        self._device, self._end = device, device.free_at

    def synchronize(self) -> None:
        """Wait until the device reaches the event."""
        self._device.wait_until(self._end)

    def elapsed_time(self, end: Event) -> float:
        """Return the time until another event, in milliseconds."""
        return 1e3 * (end._end - self._end)


class ExposedTimeExtension(DraftingExtension):
    """The extension of an engine whose device is simulated."""

    _device: Device

    def das_start_drafting(self, drafting: dict[str, Any]) -> bool:
        """Start to draft as an engine with eight cores does."""
        from rollout_store.runtime import control_groups

        control_groups.usable_cores = lambda: 8.0
        return super().das_start_drafting(drafting)

    def simulate_device(self, defers: bool) -> None:
        """Count the host's time alone from now on. *defers* is whether drafts are made after the launch of a step."""
        from cpu_kernels import KernelReplacement
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
        from vllm.v1.worker.gpu.async_utils import AsyncOutput

        device = self._device = Device()
        runner = self.model_runner
        for owner, name, launch_s in (
            (KernelReplacement, "__call__", KERNEL_LAUNCH_S),
            (GridExecutor, "__call__", KERNEL_LAUNCH_S),
            (runner, "sample", SAMPLER_LAUNCH_S),
        ):
            setattr(owner, name, _computing(device, getattr(owner, name), launch_s))
        load = InterpreterBuilder.create_masked_load

        def load_with_integers(builder: Any, pointers: Any, mask: Any, *args: Any) -> Any:
            # The interpreter does not take the masks of the n-grams' kernel, which are integers.
            mask.data = mask.data.astype(bool)
            return load(builder, pointers, mask, *args)

        InterpreterBuilder.create_masked_load = load_with_integers
        forward = runner.model.forward
        batches: list[Any] = []
        prepare_attn = runner.prepare_attn

        def remember_batch(input_batch: Any) -> Any:
            batches.append(input_batch)
            return prepare_attn(input_batch)

        def launch_step(*args: Any, **kwargs: Any) -> Any:
            batch = batches.pop()
            lengths = int(batch.seq_lens_cpu_upper_bound.sum())
            device.launch(0 if batch.has_prefill else batch.num_reqs, batch.num_tokens, lengths)
            with device.computing(STEP_LAUNCH_S):
                return forward(*args, **kwargs)

        runner.prepare_attn, runner.model.forward = remember_batch, launch_step
        create, get_output = AsyncOutput.__init__, AsyncOutput.get_output

        def create_output(output: Any, **arguments: Any) -> None:
            create(output, **arguments)
            output.end = Event(device)

        def wait_for_output(output: Any) -> Any:
            output.end.synchronize()
            return get_output(output)

        AsyncOutput.__init__, AsyncOutput.get_output = create_output, wait_for_output
        if self._das_loop is not None:
            if defers:
                self._defer_drafts()
            speculator = runner.speculator
            self._das_loop._clock = device.now
            launched = speculator.on_launched

            def wait_for_device(request_ids: list[str]) -> None:
                step = speculator.sampled[-1]
                speculator.sampled[-1] = step._replace(copied=Event(device))
                launched(request_ids)

            speculator.on_launched = wait_for_device

    def _defer_drafts(self) -> None:
        from rollout_worker.engine.exact_verification import ExactVerification

        device, runner = self._device, self.model_runner
        verification = ExactVerification(
            runner.req_states, runner.input_buffers.query_start_loc, MAX_LOGITS, drafts=True
        )
        finish = verification._finish

        def finish_later(*args: Any) -> None:
            with device.after_launch():
                finish(*args)

        vars(verification).update(_finish=finish_later)
        runner.adaptive_verification = verification
        self._das_scheduling._graphs = CudaGraphs(cuda_graph_sizes(MAX_REQUESTS, MAX_DRAFT))

    def take_steps(self) -> list[tuple[int, int, float]]:
        """Return :attr:`Device.steps` since the last call."""
        steps, self._device.steps = self._device.steps, []
        return steps


def _computing(device: Device, function: Callable[..., Any], launch_s: float) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        with device.computing(launch_s):
            return function(*args, **kwargs)

    return compute


def measure(modes: Sequence[str], sizes: Sequence[int]) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Return the figures of engines with V2, and the measurements that they are from."""
    # Engines run in processes of their own. Both they and this one need vLLM's plugins for V2 on CPUs.
    sys.path[:0] = _V2_PATHS
    os.environ |= V2_ON_CPUS
    measurements = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        model.mkdir()
        make_model(model)
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
        server, loop = EmbeddedRedis(directory, keep_open=lock), LoopThread()
        try:
            url = server.start()
            for mode in modes:
                measurements += _measure_mode(mode, sizes, model, url, loop)
        finally:
            loop.stop()
            server.stop()
            os.close(lock)
    figures = []
    for each in measurements:
        setting = f"batch {each['batch']}, {each['mode']}"
        target = TARGETS_US.get(each["batch"]) if each["mode"] == "das" else None
        figures += [
            Figure(f"exposed time, p50, {setting}", each["p50_us"], "µs", "", "<=", target),
            Figure(f"exposed time, p99, {setting}", each["p99_us"], "µs", "", "<=", None),
        ]
    return figures, measurements


def _measure_mode(mode: str, sizes: Sequence[int], model: Path, url: str, loop: LoopThread) -> Iterator[dict[str, Any]]:
    keys = HistoryKeys("default", "exposed-time")
    drafts = mode.startswith("das")
    location = HistoryLocation(url, keys.namespace, keys.name, window=16)
    drafting = DraftingConfig("marginal", MAX_DRAFT, 2**28, location, governed=False) if drafts else None
    spec = EngineSpec.model_validate({**SMALL_CPU_ENGINE, "maxNumSeqs": MAX_REQUESTS})
    overrides: dict[str, Any] = {"max_num_batched_tokens": scheduled_tokens(MAX_REQUESTS, MAX_DRAFT)}
    if mode == "ngram":  # with the name "ngram", vLLM schedules synchronously
        overrides["speculative_config"] = {
            "method": "ngram_gpu",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 5,
        }
    config = EngineConfig(model=model, spec=spec, cpu=True, drafting=drafting, overrides=overrides)
    engine = start_with_extension(loop, config, ExposedTimeExtension)
    try:
        harness = EngineHarness(engine, loop, HistoryStore(connect(url), keys, window=16))
        loop.run(engine.collective_rpc("simulate_device", mode == "das"))
        random = np.random.default_rng(0)
        for size in sizes:
            if mode == "ngram" and size > MAX_NGRAM_BATCH:
                continue
            sampling = Sampling(n=1, temperature=1.0, max_tokens=MAX_TOKENS, allowed_token_ids=list(range(EOS)))
            prompts = [random.integers(0, EOS, PROMPT_TOKENS).tolist() for _ in range(size)]
            if drafts:
                history = harness.sample(prompts[:1], sampling.model_copy(update={"n": HISTORY}), "p")
                harness.add_history("p", [result.token_ids for result in history])
            loop.run(engine.collective_rpc("take_steps"))
            harness.sample(prompts, sampling, "p")
            (steps,) = loop.run(engine.collective_rpc("take_steps"))
            full = [step for step in steps if step[0] == size][FIRST_STEPS:]
            exposed_us = [1e6 * seconds for _, _, seconds in full]
            measured = {
                "mode": mode,
                "batch": size,
                "steps": len(full),
                "tokens_per_step": float(np.mean([tokens for _, tokens, _ in full])),
                "mean_us": float(np.mean(exposed_us)),
                "p50_us": quantile(exposed_us, 0.5),
                "p99_us": quantile(exposed_us, 0.99),
            }
            print(measured, flush=True)
            yield measured
    finally:
        engine.close()
