"""The time for which the device waits between two steps, measured with CUDA events.

It is the time from the end of a step's sampler until the device can begin with the next step's model, that is, until it
has executed everything that precedes the model's CUDA graph: the copies of the step's inputs and, if the step was
launched before its drafts were made, the wait for the drafts. A part of it is work of the device that plain vLLM has,
too. On CPUs, the host's clock takes the place of the events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.figures import Figure, quantile
from benchmarks.forced_sampling import ForcedDraftingEngine, ForcedEngine
from benchmarks.gpu_proof.settings import Row, Settings, history_server, running
from benchmarks.rollout_runs import MAX_DRAFT, UNGOVERNED, VOCABULARY, engine_config
from rollout_api.manifest.spec import Sampling
from tests.support.engines import EngineHarness
from tests.support.faulty_extension import ExactVerificationExtension

FIRST_STEPS = 8
"""Steps after the last prompt that are not measured."""
PROMPT_TOKENS = 32
_KV_CACHE_BYTES = 24 << 30
"""Size of the KV cache on GPUs; the largest batch with the longest drafts needs 18 GB of a 7B model's."""


class Drafts(NamedTuple):
    """A kind of drafts, and how they are made."""

    name: str
    lengths: tuple[int, ...] = (0,)
    """Maximum tokens of the drafts of the first requests, of the next ones, and so on."""
    rests: bool = False
    """Whether the drafter rests, so that nothing waits for the sampled tokens."""
    deferred: bool = True
    """Whether a step is launched before its drafts are made, if possible."""


PLAIN = Drafts("plain V2")
_LENGTHS = {"no drafts": (0,), "4 even": (4,), "uneven": tuple(range(9)), "16": (MAX_DRAFT,)}
KINDS = (
    Drafts("das at rest", rests=True),
    *(Drafts(f"das, {name}, after the launch", lengths) for name, lengths in _LENGTHS.items()),
    *(Drafts(f"das, {name}, before the launch", lengths, deferred=False) for name, lengths in _LENGTHS.items()),
)


class StepEvents:
    """A mixin for the worker extensions of :mod:`benchmarks.forced_sampling`, with V2."""

    model_runner: Any
    device: torch.device
    _das_scheduling: Any = None
    _das_controller: Any

    def proof_install(self) -> None:
        """Force recorded tokens and record events from now on; call once."""
        self.bench_install()  # type: ignore[attr-defined]
        runner, scheduling = self.model_runner, self._das_scheduling
        if scheduling is not None:
            if self.device.type == "cpu":
                self.test_verify_exactly()  # type: ignore[attr-defined]
            self._proof_choose_budget = scheduling._choose_budget
            verification = runner.adaptive_verification
            if verification is not None:
                defer = verification.defer

                def remember(*args: Any) -> None:
                    self._proof_deferred = True
                    defer(*args)

                vars(verification).update(defer=remember)
        self._proof_steps: list[tuple[int, int, bool, bool, Any, Any, Any]] = []
        self._proof_deferred = False
        sampled = started = self._record()
        prepare_inputs, sample = runner.model_state.prepare_inputs, runner.sample

        def record_start(*args: Any) -> Any:
            nonlocal started
            inputs = prepare_inputs(*args)
            started = self._record()
            return inputs

        def record_end(hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
            nonlocal sampled
            output = sample(hidden_states, batch, grammar_output)
            before, sampled = sampled, self._record()
            step = (batch.num_reqs, batch.num_tokens, bool(batch.has_prefill), self._proof_deferred)
            self._proof_steps.append((*step, before, started, sampled))
            self._proof_deferred = False
            return output

        runner.model_state.prepare_inputs, runner.sample = record_start, record_end

    def _record(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def proof_draft(self, rests: bool, deferred: bool) -> None:
        """Let the drafter rest always or never, and make drafts after the launch of a step where possible, or never."""
        self._das_controller.skip_step = lambda: rests
        self._das_scheduling._choose_budget = self._proof_choose_budget if deferred else lambda *_, **__: None

    def proof_take_steps(self) -> tuple[list[tuple[int, int, bool, bool, float, float]], int]:
        """Return the steps since the last call, and how often the device has not waited for drafts since the start.

        For each step: the number of requests and of tokens, whether it read prompts, whether its drafts were made after
        its launch, the exposed time and the time until its sampler had ended, both in seconds.
        """
        if self.device.type != "cpu":
            torch.cuda.synchronize()
        steps, self._proof_steps = self._proof_steps, []
        verification = self.model_runner.adaptive_verification
        expired = 0 if self._das_scheduling is None or verification is None else verification.times_expired
        return [
            (*step, _seconds(sampled_before, started), _seconds(started, sampled))
            for *step, sampled_before, started, sampled in steps
        ], expired  # type: ignore[return-value]


def _seconds(first: Any, last: Any) -> float:
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3


class PlainEngine(StepEvents, ForcedEngine):
    """The worker extension of plain V2."""


class DraftingEngine(StepEvents, ForcedDraftingEngine, ExactVerificationExtension):
    """The worker extension of an engine that drafts; on CPUs, it lays out batches as with CUDA graphs."""


def measure(settings: Settings) -> Iterator[Row]:
    """Measure plain V2, and then all kinds of drafts of one engine that drafts."""
    batch = max(settings.exposed_batches)
    max_tokens = PROMPT_TOKENS + (FIRST_STEPS + settings.exposed_steps + 2) * (1 + MAX_DRAFT)
    with history_server() as (url, store, loop):
        for mode, extension, kinds in (("none", PlainEngine, (PLAIN,)), (UNGOVERNED, DraftingEngine, KINDS)):
            config = engine_config(
                mode, settings.model(), url, max_tokens=max_tokens, batch=batch, eager=settings.is_dry
            )
            overrides: dict[str, Any] = {} if settings.is_dry else {"kv_cache_memory_bytes": _KV_CACHE_BYTES}
            name = f"{extension.__module__}.{extension.__qualname__}"
            with running(loop, store, config, worker_extension_cls=name, **overrides) as harness:
                loop.run(harness.engine.collective_rpc("proof_install"))
                for size in settings.exposed_batches:
                    for kind in kinds:
                        yield _measure_kind(harness, kind, size, settings.exposed_steps)


def _measure_kind(harness: EngineHarness, kind: Drafts, size: int, steps: int) -> Row:
    """Run requests whose drafts are accepted, because their history holds their responses."""
    engine, loop = harness.engine, harness.loop
    problem, random = f"{size} {kind.name}", np.random.default_rng(size)
    budgets = [kind.lengths[number % len(kind.lengths)] for number in range(size)]
    responses = [
        random.integers(1, VOCABULARY, (FIRST_STEPS + steps + 2) * (1 + budget)).tolist() for budget in budgets
    ]
    if kind is not PLAIN:
        loop.run(engine.collective_rpc("bench_set_history", []))  # the history of other kinds
        harness.add_history(problem, [response for response, budget in zip(responses, budgets, strict=True) if budget])
        loop.run(engine.collective_rpc("proof_draft", kind.rests, kind.deferred))
    requests = [
        harness.request(
            random.integers(1, VOCABULARY, PROMPT_TOKENS).tolist(),
            Sampling(n=1, temperature=1.0, max_tokens=len(response)),
            problem,
            draft_budget=budget,
        )
        for response, budget in zip(responses, budgets, strict=True)
    ]
    recorded = {str(request.rollout_id(0)): tokens for request, tokens in zip(requests, responses, strict=True)}
    loop.run(engine.collective_rpc("bench_set_rollouts", recorded))
    [(_, expired_before)] = loop.run(engine.collective_rpc("proof_take_steps"))
    results = harness.generate(requests)
    [(taken, expired)] = loop.run(engine.collective_rpc("proof_take_steps"))
    measured = [step for step in taken if step[0] == size and not step[2]][FIRST_STEPS:][:steps]
    if not measured:
        raise RuntimeError(f"{kind.name}: no step of all {size} requests was measured, of {len(taken)}")
    exposed = [1e6 * step[4] for step in measured]
    stats = loop.run(engine.stats())
    return {
        "batch": size,
        "kind": kind.name,
        "steps": len(measured),
        "tokens_per_step": float(np.mean([step[1] for step in measured])),
        "deferred_steps": sum(step[3] for step in measured),
        "times_expired": expired - expired_before,
        "p50_us": quantile(exposed, 0.5),
        "p99_us": quantile(exposed, 0.99),
        "step_p50_us": quantile([1e6 * step[5] for step in measured], 0.5),
        "accepted_tokens": sum(result.num_accepted_tokens for result in results),
        "different_responses": sum(
            result.token_ids != tokens for result, tokens in zip(results, responses, strict=True)
        ),
        "drafting_failures": stats.get("drafting_failures", 0),
    }


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """Return the exposed time of each kind and batch size, and how often the device has not waited for drafts."""
    figures = []
    for row in rows:
        setting = f"batch {row['batch']}, {row['kind']}"
        figures += [
            Figure(f"exposed time, p50, {setting}", row["p50_us"], "µs", "", "<=", None),
            Figure(f"exposed time, p99, {setting}", row["p99_us"], "µs", "", "<=", None),
        ]
    if rows:
        expired = sum(row["times_expired"] for row in rows)
        figures.append(Figure("steps that have not got their drafts in time", expired, "", "", "<=", 0.0))
    return figures
