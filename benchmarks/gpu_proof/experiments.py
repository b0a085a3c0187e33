"""The experiments in the order in which they run, except for those that have a module of their own."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm
from safetensors.torch import load_file

from benchmarks import hot_path
from benchmarks.batch_drafters import LoopDrafter
from benchmarks.figures import Figure
from benchmarks.gpu_proof import exposed, steady
from benchmarks.gpu_proof.settings import Row, Settings, history_server, running
from benchmarks.rollout_runs import MAX_DRAFT, UNGOVERNED, engine_config
from benchmarks.traces import problems_of, read_trace
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import UpdateMode
from rollout_worker.engine.worker_extension import DraftingExtension
from tests.support.engines import EngineHarness
from tests.support.reference_model import (
    EOS,
    VOCABULARY,
    ReferenceDistribution,
    chi_square,
    chi_square_p_value,
    make_model,
    small_qwen3,
)
from tests.support.responses import MIN_P_VALUE, PROMPT, PROMPTS, WITHOUT_EOS, accepted_share, tokens_of

_EXTENSION = f"{DraftingExtension.__module__}.{DraftingExtension.__qualname__}"
_MAX_TOKENS = 512
GREEDY = Sampling(n=1, temperature=0, max_tokens=60, allowed_token_ids=WITHOUT_EOS)
MIN_EXPECTED_COUNT = 5
"""Tokens with a smaller expected count are pooled for the test whether two sets of responses differ."""


class FactsExtension(DraftingExtension):
    """The extension of an engine that tells what it uses."""

    def proof_facts(self) -> dict[str, Any]:
        """Return what vLLM has chosen."""
        runner, config = self.model_runner, self.vllm_config
        return {
            "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
            "asynchronous": bool(config.scheduler_config.async_scheduling),
            "attention": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
            "cuda_graphs": str(config.compilation_config.cudagraph_mode),
            "cuda_graph_sizes": list(config.compilation_config.cudagraph_capture_sizes or ()),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "kv_tokens": runner.kv_cache_config.num_blocks * config.cache_config.block_size,
            "defers_drafts": runner.adaptive_verification is not None,
            "gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }


def start(settings: Settings) -> Iterator[Row]:
    """Start an engine with drafts, and generate a response."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    yield {"gpu": gpu, "cores": len(os.sched_getaffinity(0)), **versions}
    with history_server() as (url, store, loop):
        config = engine_config("das", settings.model(), url, max_tokens=_MAX_TOKENS, batch=64, eager=settings.is_dry)
        name = f"{FactsExtension.__module__}.{FactsExtension.__qualname__}"
        started = time.perf_counter()
        with running(loop, store, config, worker_extension_cls=name) as harness:
            yield {"start_seconds": time.perf_counter() - started}
            [facts] = loop.run(harness.engine.collective_rpc("proof_facts"))
            yield facts
            [result] = harness.sample([PROMPT], Sampling(n=1, max_tokens=20))
            yield {"tokens": len(result.token_ids)}


def start_figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the time to start."""
    return [
        Figure("time until an engine with drafts has started", row["start_seconds"], "s", "", "<=", None)
        for row in rows
        if "start_seconds" in row
    ]


def _small_engine(settings: Settings, model: Path, url: str) -> Any:
    """Return the configuration of an engine in bfloat16 that drafts as much as possible."""
    config = engine_config(
        UNGOVERNED,
        model,
        url,
        max_tokens=_MAX_TOKENS - 2 * MAX_DRAFT,
        batch=64,
        eager=settings.is_dry,
        dtype="bfloat16",
    )
    return replace(config, overrides=config.overrides | {"worker_extension_cls": _EXTENSION})


def _make_model(directory: Path) -> Path:
    return make_model(directory, create=lambda **shape: small_qwen3(**shape).bfloat16())


def exactness(settings: Settings) -> Iterator[Row]:
    """Compare responses with and without drafts in bfloat16 with a model whose distribution is known.

    A response's own log-probabilities are compared with those of the same text as a prompt, which the model reads at
    once: with drafts, they come from the verification of several tokens, and without, from one token each.
    """
    with tempfile.TemporaryDirectory() as directory, history_server() as (url, store, loop):
        model = _make_model(Path(directory))
        with running(loop, store, _small_engine(settings, model, url)) as harness:
            reference = ReferenceDistribution(model)
            for drafts in (False, True):
                yield _forced_logprobs(harness, reference, drafts)
            sampling = Sampling(n=settings.samples, temperature=1.0, max_tokens=5)
            history = harness.sample([PROMPT], sampling.model_copy(update={"n": 64}), "sampled", draft_budget=0)
            harness.add_history("sampled", tokens_of(history))
            samples = {}
            for drafts in (False, True):
                results = harness.sample([PROMPT], sampling, "sampled", draft_budget=None if drafts else 0)
                samples[drafts] = tokens_of(results)
                p_value, tested = chi_square(reference, PROMPT, samples[drafts], sampling)
                share = accepted_share(results)
                yield {"drafts": drafts, "p_value": p_value, "tested_tokens": tested, "accepted_share": share}
            p_value, tested = same_distribution(samples[False], samples[True])
            yield {"p_value_of_difference": p_value, "tested_tokens": tested}


def _forced_logprobs(harness: EngineHarness, reference: ReferenceDistribution, drafts: bool) -> Row:
    sampling = Sampling(n=1, temperature=1.0, max_tokens=60, logprobs=True)
    results = harness.sample(PROMPTS, sampling, "logprobs", draft_budget=None if drafts else 0)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, results, strict=True)]
    read = harness.sample(texts, Sampling(n=1, max_tokens=1, prompt_logprobs=True), "read", draft_budget=0)
    errors, rounding = list[float](), list[float]()
    for prompt, result, as_prompt in zip(PROMPTS, results, read, strict=True):
        forced = as_prompt.tokens.prompt_logprobs
        if forced is None or result.logprobs is None:
            raise RuntimeError("the engine has returned no log-probabilities")
        errors += np.abs(np.subtract(forced[len(prompt) - 1 :], result.logprobs)).tolist()
        rounding.append(reference.max_error(prompt, result.token_ids, result.logprobs, sampling))
    if not drafts:
        harness.add_history("logprobs", tokens_of(results))
    return {
        "drafts": drafts,
        "mean_logprob_error": float(np.mean(errors)),
        "largest_logprob_error": max(errors),
        "largest_error_to_float32": max(rounding),
        "tokens": len(errors),
        "accepted_share": accepted_share(results),
    }


def same_distribution(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Test whether two sets of responses to the same prompt have one distribution, given the tokens before each.

    Returns:
        The p-value of Pearson's test of homogeneity, and the number of tested tokens.
    """
    counts: list[dict[tuple[int, ...], Counter[int]]] = [{}, {}]
    for following, responses in zip(counts, (first, second), strict=True):
        for response in responses:
            for place in range(1, len(response)):
                following.setdefault(tuple(response[:place]), Counter())[response[place]] += 1
    statistic, freedom, tested = 0.0, 0, 0
    for context in counts[0].keys() & counts[1].keys():
        table = np.array([[each[context][token] for token in range(VOCABULARY)] for each in counts], dtype=float)
        is_common = _expected(table).min(axis=0) >= MIN_EXPECTED_COUNT
        table = np.column_stack([table[:, is_common], table[:, ~is_common].sum(axis=1)])
        table = table[:, _expected(table).min(axis=0) >= MIN_EXPECTED_COUNT]
        if table.shape[1] < 2:
            continue
        statistic += float(((table - _expected(table)) ** 2 / _expected(table)).sum())
        freedom += table.shape[1] - 1
        tested += int(table.sum())
    return chi_square_p_value(statistic, freedom), tested


def _expected(table: np.ndarray) -> np.ndarray:
    """Return the expected counts of a table of two samples, if both have one distribution."""
    return np.outer(table.sum(axis=1), table.sum(axis=0)) / max(table.sum(), 1)


def exactness_figures(rows: Sequence[Row]) -> list[Figure]:
    """Return errors of log-probabilities, and the p-values of the tests of the distribution."""
    figures = []
    for row in rows:
        if "p_value_of_difference" in row:
            value = row["p_value_of_difference"]
            figures.append(Figure("p-value, responses with and without drafts", value, "", "", ">=", MIN_P_VALUE))
            continue
        setting = "with drafts" if row["drafts"] else "without drafts"
        if "p_value" in row:
            figures.append(Figure(f"p-value, model's distribution, {setting}", row["p_value"], "", "", ">=", None))
        else:
            for name in ("mean", "largest"):
                value = row[f"{name}_logprob_error"]
                figures.append(Figure(f"{name} error of log-probabilities, {setting}", value, "", "", "<=", None))
    return figures


def weights(settings: Settings) -> Iterator[Row]:
    """Load an engine's own weights again under load, in each way, and compare its greedy tokens."""
    with tempfile.TemporaryDirectory() as directory, history_server() as (url, store, loop):
        model = _make_model(Path(directory))
        config = replace(_small_engine(settings, model, url), weight_transfer="gloo" if settings.is_dry else "ipc")
        fp8: dict[str, Any] = {} if settings.is_dry else {"quantization": "fp8"}

        async def from_disk(harness: EngineHarness, version: int) -> float:
            return await harness.engine.load_weights(model, version, UpdateMode.RECOMPUTE)

        async def from_memory(harness: EngineHarness, version: int) -> float:
            if settings.is_dry:
                from tests.engine.test_weight_transfer import transfer

                await transfer(harness.engine, model, version)
                return 0.0
            return await _pass_handles(harness, model, version)

        with running(loop, store, config) as harness:
            yield _reload(harness, "from disk", from_disk, 1)
            yield _reload(harness, "from memory", from_memory, 2)
        with running(loop, store, replace(config, weight_transfer=""), **fp8) as harness:
            yield {"quantization": fp8.get("quantization", "")} | _reload(harness, "FP8, from disk", from_disk, 1)


async def _pass_handles(harness: EngineHarness, model: Path, version: int) -> float:
    """Let the engine copy weights from this process's memory on the same GPU, as a trainer on this GPU does."""
    from torch.multiprocessing.reductions import reduce_tensor

    from rollout_api.client.weight_transfer import _without_objects

    tensors = {name: tensor.cuda() for name, tensor in load_file(model / "model.safetensors").items()}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    described = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    handles = [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors.values()]

    async def updates() -> AsyncIterator[dict[str, Any]]:
        yield _without_objects({**described, "ipc_handles": handles})

    await harness.engine.init_weight_transfer({"packed": False})
    return await harness.engine.load_transferred(updates(), version, UpdateMode.RECOMPUTE, described)


def _reload(harness: EngineHarness, way: str, load: Callable[[EngineHarness, int], Any], version: int) -> Row:
    """Load the weights while responses are generated.

    Greedy tokens are compared one response at a time, because rounding depends on the size of the batch.
    """

    def greedy() -> list[list[int]]:
        return [harness.sample([prompt], GREEDY, "greedy", draft_budget=0)[0].token_ids for prompt in PROMPTS[:8]]

    async def load_beside_responses() -> tuple[float, list[Any]]:
        sampling = Sampling(n=1, max_tokens=400, allowed_token_ids=list(range(EOS)), ignore_eos=True)
        running = asyncio.Event()
        calls = [
            asyncio.create_task(
                harness.engine.generate(harness.request(prompt, sampling), 0, on_tokens=lambda _: running.set())
            )
            for prompt in PROMPTS
        ]
        await running.wait()
        seconds = await load(harness, version)
        return seconds, await asyncio.gather(*calls)

    expected = greedy()
    seconds, results = harness.loop.run(load_beside_responses())
    spans = Counter(len(result.weight_spans) for result in results)
    pairs = zip(expected, greedy(), strict=True)
    return {
        "way": way,
        "seconds_without_decoding": seconds,
        "responses_of_two_versions": spans[2],
        "equal_share": float(np.mean([before == after for before, after in pairs])),
    }


def weights_figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the share of greedy responses that are the same after weights were loaded again."""
    return [
        Figure(f"equal greedy responses, weights {row['way']}", row["equal_share"], "", "", ">=", 1.0) for row in rows
    ]


def drafter(settings: Settings) -> Iterator[Row]:
    """Measure the drafter on this machine's CPU; see :mod:`benchmarks.hot_path`."""
    problems = problems_of(read_trace(settings.trace, None), None, None, hot_path.HISTORY)
    for size in settings.hot_path_batches:
        make = partial(LoopDrafter, threads=1)
        measured = hot_path.measure(make, problems, size, steps=settings.hot_path_steps, rounds=1)
        yield {**measured, "threads": 1}


class Experiment(NamedTuple):
    """An experiment of the proof."""

    run: Callable[[Settings], Iterator[Row]]
    figures_of: Callable[[Sequence[Row]], list[Figure]]
    minutes: float
    """How long it may take at most."""


EXPERIMENTS: Mapping[str, Experiment] = {
    "start": Experiment(start, start_figures, 3),
    "exposed": Experiment(exposed.measure, exposed.figures_of, 6),
    "steady": Experiment(steady.measure, steady.figures_of, 9),
    "exactness": Experiment(exactness, exactness_figures, 4),
    "weights": Experiment(weights, weights_figures, 3),
    "drafter": Experiment(drafter, hot_path.figures_of, 2),
}
