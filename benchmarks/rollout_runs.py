"""Produces the same recorded rollouts on engines of several modes; used by :mod:`benchmarks.rollout`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.manifest.spec import PolicyName, Sampling
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import FinishReason, RolloutRequest
from rollout_store.history.records import HistoryRecord
from rollout_store.history.store import HistoryStore
from rollout_worker import drafting_args
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.draft_settings import DraftingConfig, HistoryLocation
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult
from rollout_worker.policy.named_policies import uses_lengths

VOCABULARY = 32_768
END = VOCABULARY
"""A token id outside the vocabulary of traces; forced rollouts end with it."""
_CACHE = Path.home() / ".cache" / "das-rollout" / "benchmarks"
KEYS = HistoryKeys("default", "rollout-benchmark")
MAX_DRAFT, SUFFIX_DRAFT, NGRAM_DRAFT = 16, 32, 5
"""Maximum tokens of a draft: a job's default, vLLM's suffix decoding, and vLLM's n-grams."""
GROUP_SIZE = 8
"""Rollouts of one problem that run together, if the batch has room for them."""
KV_CACHE_BYTES = (6 if torch.cuda.is_available() else 2) << 30
_GPU_MEMORY_UTILIZATION = 0.25
"""The share of a GPU that must be free when an engine starts, because the engines of all modes share it."""
_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_JOB = "benchmark"
_HISTORY_TIMEOUT_S = 60.0
_FORCED_ENGINE = "benchmarks.forced_sampling.ForcedEngine"
_FORCED_DRAFTING_ENGINE = "benchmarks.forced_sampling.ForcedDraftingEngine"
_VLLM_SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "none-v1-sync": {"async_scheduling": False},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": NGRAM_DRAFT, "prompt_lookup_max": 5}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": SUFFIX_DRAFT}},
}
DROP_IN = "drop-in"
"""The mode of an engine that is started as a user starts their own, with its history in memory."""
MODES = (*_VLLM_SETTINGS, "das", DROP_IN)
_V1_MODES = ("none-v1-sync", "suffix")
"""Modes of vLLM's first model runner, since the second one (V2) does not have them. On CPUs, so is ``ngram``."""
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""The type of an engine's weights; see ``EngineSpec``."""
LENGTH_POLICIES = tuple(policy for policy in get_args(PolicyName) if uses_lengths(policy))
"""Further modes: ``das`` with each draft policy that depends on lengths."""
UNGOVERNED = "das-ungoverned"
"""A further mode for tests: the policy ``fixed`` without a governor."""
_POLICIES: dict[str, PolicyName] = {"das": "marginal", UNGOVERNED: "fixed", **{one: one for one in LENGTH_POLICIES}}


def random_model(hidden: int = 1024, layers: int = 15, positions: int = 2048) -> Path:
    """Return the directory of a Qwen3 model with random weights and no end-of-sequence token.

    The model is created on the first call and cached.

    Args:
        hidden: hidden size; with the default values the model has 267M parameters.
        layers: number of layers.
        positions: maximum context length in tokens.
    """
    directory = _CACHE / f"qwen3-{hidden}-{layers}-{positions}-{END + 1}"
    if (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY + 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    return directory


def dummy_7b_model(positions: int = 16_384) -> Path:
    """Return the directory of a model with Qwen2.5-7B's shape but no weights, for vLLM's ``load_format: dummy``."""
    from transformers import Qwen2Config

    directory = _CACHE / f"qwen2-7b-{positions}"
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        rope_theta=1e6,
        eos_token_id=None,
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


MODELS: dict[str, Callable[..., Path]] = {"267m": random_model, "7b": dummy_7b_model}
"""The models by name; each function takes the number of ``positions``."""


@dataclass(frozen=True)
class Measurement:
    """The costs of one set of rollouts in one mode."""

    mode: str
    batch: int
    epoch: int
    round: int
    rollouts: int
    tokens: int
    seconds: float
    """The makespan of the set."""
    steps: int
    """Verification steps of an engine. This and all later times and ratios are means if a mode has several engines."""
    drafted: int
    accepted: int
    drafting_seconds: float
    """Time that the engine's process spent in the proposer."""
    shim_seconds: float
    """Time that the engine's process spent in the shim that forces recorded tokens."""
    base_tokens: float | None = None
    """``c_base / c_tok`` as the engine fitted it; None for engines that fit no cost model."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        """The key that identifies the measurement within a benchmark."""
        return self.mode, self.batch, self.epoch, self.round


class RecordedGroup(NamedTuple):
    """The recorded rollouts of one problem in one epoch."""

    prompt: list[int]
    rollouts: list[list[int]]
    history: list[list[int]]
    """The problem's rollouts of earlier epochs or checkpoints."""
    max_tokens: int
    """The limit that requests state. Recorded rollouts are shorter and end with a stop token."""


class RecordedRollout(NamedTuple):
    """One rollout that engines produce again."""

    problem: str
    group: RecordedGroup
    tokens: list[int]


class RecordedEpochs:
    """The recorded rollouts of a benchmark."""

    def __init__(self, epochs: list[dict[str, RecordedGroup]], stop_token_ids: Sequence[int] = ()) -> None:
        """Hold the groups of each epoch by problem, and the stop tokens of the rollouts besides the model's own."""
        self.epochs, self.stop_token_ids = epochs, list(stop_token_ids)

    @classmethod
    async def sample(
        cls, engine: Engine, prompts: Mapping[str, list[int]], *, epochs: int, samples: int, max_tokens: int
    ) -> RecordedEpochs:
        """Sample rollouts at temperature 1; the history of each epoch consists of the epochs before it."""
        recorded: list[dict[str, RecordedGroup]] = []
        history: dict[str, list[list[int]]] = {name: [] for name in prompts}
        for epoch in range(epochs):
            requests = [
                RolloutRequest(
                    job_uid=_JOB,
                    request_id=f"sampled-{epoch}-{name}",
                    problem_id=name,
                    prompt_token_ids=prompt,
                    sampling=Sampling(n=samples, temperature=1.0, max_tokens=max_tokens),
                )
                for name, prompt in prompts.items()
            ]
            responses = await asyncio.gather(
                *(engine.generate(request, sample) for request in requests for sample in range(samples))
            )
            rollouts = [response.token_ids for response in responses]
            recorded.append({})
            for number, (name, prompt) in enumerate(prompts.items()):
                group = rollouts[number * samples : (number + 1) * samples]
                recorded[-1][name] = RecordedGroup(prompt, group, list(history[name]), max_tokens)
                history[name] += group
        return cls(recorded)

    def select(self, epoch: int, batch: int, round_: int) -> list[RecordedRollout]:
        """Select the rollouts of one measurement: as many as the batch holds, but at least two.

        They come in groups of one problem. Each round selects other rollouts. Each measurement has problem names of
        its own, so that no measurement finds the history of a later one.
        """
        problems = list(self.epochs[epoch].items())
        size = min(GROUP_SIZE, batch)
        groups = max(2, batch) // size
        selected = []
        for number in range(groups):
            repetition, index = divmod(round_ * groups + number, len(problems))
            name, group = problems[index]
            rollouts = [group.rollouts[(repetition * size + sample) % len(group.rollouts)] for sample in range(size)]
            problem = f"{_set_name(batch, epoch, round_)}/{name}"
            selected += [RecordedRollout(problem, group, tokens) for tokens in rollouts]
        return selected

    def requests(self, epoch: int, batch: int, round_: int) -> list[RolloutRequest]:
        """Return the requests of one measurement, in the order of :meth:`select`; they do not reveal any length."""
        name = _set_name(batch, epoch, round_)
        return [
            RolloutRequest(
                job_uid=_JOB,
                request_id=f"{name}-{number}",
                problem_id=rollout.problem,
                prompt_token_ids=rollout.group.prompt,
                sampling=Sampling(
                    n=1,
                    temperature=1.0,
                    max_tokens=rollout.group.max_tokens,
                    stop_token_ids=self.stop_token_ids,
                ),
            )
            for number, rollout in enumerate(self.select(epoch, batch, round_))
        ]


def _set_name(batch: int, epoch: int, round_: int) -> str:
    return f"{batch}-{epoch}-{round_}"


class ModeRunner:
    """Produces sets of recorded rollouts on the engines of all modes."""

    def __init__(self, engines: Mapping[str, list[Engine]], recorded: RecordedEpochs, store: HistoryStore) -> None:
        """Use the engines of each mode; *store* is the history that the project's own engines draft from."""
        self._engines, self._recorded, self._store = engines, recorded, store
        self._stored: set[str] = set()

    async def run(self, mode: str, batch: int, epoch: int, round_: int) -> Measurement:
        """Produce the rollouts of one set in one mode and measure it. Groups are dealt out to the mode's engines.

        Raises:
            RuntimeError: if the history is not loaded in time, or if a rollout differs from the recording.
        """
        engines = self._engines[mode]
        rollouts = self._recorded.select(epoch, batch, round_)
        groups = {rollout.problem: rollout.group for rollout in rollouts}
        store_history(self._store, {name: group for name, group in groups.items() if name not in self._stored})
        self._stored.update(groups)
        pairs = list(zip(self._recorded.requests(epoch, batch, round_), rollouts, strict=True))
        shares: list[list[RolloutRequest]] = []
        for number, engine in enumerate(engines):
            own = {name: groups[name] for name in list(groups)[number :: len(engines)]}
            shares.append([request for request, rollout in pairs if rollout.problem in own])
            await set_rollouts(engine, {str(request.rollout_id(0)): rollout.tokens for request, rollout in pairs})
            await _call(engine, "bench_set_history", [(group.prompt, group.history) for group in own.values()])
            if not await engine.announce(list(own), 1, timeout_s=_HISTORY_TIMEOUT_S):
                raise RuntimeError(f"the history was not loaded in {_HISTORY_TIMEOUT_S:g} s: {await engine.stats()}")
        before = await _totals(engines)
        started = time.perf_counter()
        of_engines = await asyncio.gather(
            *(
                _generate(engine, requests, batch // len(engines))
                for engine, requests in zip(engines, shares, strict=True)
            )
        )
        seconds = time.perf_counter() - started
        total = {name: value - before[name] for name, value in (await _totals(engines)).items()}
        responses = {
            request.request_id: response
            for requests, of_engine in zip(shares, of_engines, strict=True)
            for request, response in zip(requests, of_engine, strict=True)
        }
        for request, rollout in pairs:
            if responses[request.request_id].token_ids != rollout.tokens:
                raise RuntimeError(f"{mode} produced other tokens than the recorded ones for {rollout.problem}")
        fitted = [
            stats["cost_base_seconds"] / stats["cost_token_seconds"]
            for engine in engines
            if (stats := await engine.stats())
        ]
        return Measurement(
            mode,
            batch,
            epoch,
            round_,
            rollouts=len(rollouts),
            tokens=sum(len(rollout.tokens) for rollout in rollouts),
            seconds=seconds,
            steps=round(total["steps"] / len(engines)),
            # V2 counts the places that it has planned for drafts, not the drafts of this project.
            drafted=sum(response.num_draft_tokens for response in responses.values()) or round(total["draft_tokens"]),
            accepted=round(total["accepted_tokens"]),
            drafting_seconds=total["drafting_seconds"] / len(engines),
            shim_seconds=total["shim_seconds"] / len(engines),
            base_tokens=float(np.mean(fitted)) if fitted else None,
        )

    async def record_acceptance(self, mode: str) -> None:
        """Record from now on how many draft tokens each step of a mode's first engine accepts."""
        await _call(self._engines[mode][0], "bench_record_acceptance")

    async def acceptance(self, mode: str) -> dict[str, list[int]]:
        """Return, by rollout id, the accepted draft tokens of each step."""
        accepted: dict[str, list[int]] = (await _call(self._engines[mode][0], "bench_acceptance"))[0]
        return accepted


def store_history(store: HistoryStore, groups: Mapping[str, RecordedGroup]) -> None:
    """Append the history of problems, by name, that do not have it yet."""
    for problem, group in groups.items():
        for number, tokens in enumerate(group.history):
            reason = FinishReason.STOP if len(tokens) < group.max_tokens else FinishReason.LENGTH
            record = HistoryRecord(f"{problem}-{number}", _JOB, 1, 1, np.array(tokens, np.uint32), reason)
            store.append(problem, record, newest=1)


async def set_rollouts(engine: Engine, recorded: dict[str, list[int]]) -> None:
    """Make an engine sample these tokens: by rollout id, the recorded rollout."""
    await _call(engine, "bench_set_rollouts", recorded)


async def _totals(engines: Sequence[Engine]) -> dict[str, float]:
    """Return the engines' counters and times, added up."""
    of_each = [asdict(engine.counters) | (await _call(engine, "bench_times"))[0] for engine in engines]
    return {name: sum(one[name] for one in of_each) for name in of_each[0]}


async def _call(engine: Engine, method: str, *args: Any) -> list[Any]:
    """Call a method of the shim in every process of an engine."""
    return await engine.collective_rpc(method, *args)


async def _generate(engine: Engine, requests: Sequence[RolloutRequest], batch: int) -> list[GenerationResult]:
    """Generate all rollouts, at most *batch* at a time."""
    permits = asyncio.Semaphore(batch)

    async def generate(request: RolloutRequest) -> GenerationResult:
        async with permits:
            return await engine.generate(request, 0)

    return await asyncio.gather(*(generate(request) for request in requests))


def engine_config(
    mode: str,
    model: Path,
    url: str,
    *,
    max_tokens: int,
    batch: int,
    eager: bool,
    dtype: Dtype = "auto",
    engines: int = 1,
) -> EngineConfig:
    """Return the configuration of a mode's engine.

    Args:
        mode: one of :data:`MODES` or :data:`LENGTH_POLICIES`, or :data:`UNGOVERNED`.
        model: the model's directory; without safetensors files, random weights are used.
        url: the Redis server of the history.
        max_tokens: maximum tokens of a prompt and its response together.
        batch: maximum number of concurrent rollouts of all engines of the mode together.
        eager: whether vLLM runs without compilation.
        dtype: type of the weights, as in ``EngineSpec``.
        engines: number of engines of the mode; *batch* is a multiple of it.
    """
    spec = EngineSpec(
        max_model_len=max_tokens + SUFFIX_DRAFT,
        max_num_seqs=batch // engines,
        kv_cache_memory=str(KV_CACHE_BYTES // engines),
        enforce_eager=eager,
        dtype=dtype,
    )
    overrides: dict[str, Any] = {
        "gpu_memory_utilization": _GPU_MEMORY_UTILIZATION,
        "worker_extension_cls": _FORCED_ENGINE,
        **_VLLM_SETTINGS.get(mode, {}),
    }
    if mode == "ngram" and torch.cuda.is_available():  # with the other name, vLLM schedules synchronously
        overrides["speculative_config"] = {**overrides["speculative_config"], "method": "ngram_gpu"}
    if not any(model.glob("*.safetensors")):
        overrides["load_format"] = "dummy"
    drafting = None
    if (policy := _POLICIES.get(mode)) is not None:
        history = HistoryLocation(url, KEYS.namespace, KEYS.name, window=16)
        drafting = DraftingConfig(policy, MAX_DRAFT, 2**31, history, engines, governed=mode != UNGOVERNED)
        overrides["worker_extension_cls"] = _FORCED_DRAFTING_ENGINE
    if mode == DROP_IN:
        overrides |= drafting_args() | {"worker_extension_cls": _FORCED_DRAFTING_ENGINE}
    return EngineConfig(
        model=model, spec=spec, cpu=not torch.cuda.is_available(), drafting=drafting, overrides=overrides
    )


@contextmanager
def model_runner(mode: str) -> Iterator[None]:
    """Let the engine of a mode use V1 if it must, and otherwise the model runner that the environment selects.

    On CPUs, V1 does not use Triton, so that its processes must not find the interpreter that V2 needs.
    """
    if mode not in _V1_MODES and (mode != "ngram" or torch.cuda.is_available()):
        yield
        return
    environment, path = dict(os.environ), list(sys.path)
    sys.path[:] = [folder for folder in path if not (Path(folder) / "triton").is_dir() or torch.cuda.is_available()]
    os.environ |= {_MODEL_RUNNER: "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)


@asynccontextmanager
async def start_engines(
    modes: Sequence[str],
    model: Path,
    url: str,
    *,
    max_tokens: int,
    batch: int,
    eager: bool = False,
    dtype: Dtype = "auto",
    engines: int = 1,
) -> AsyncIterator[dict[str, list[Engine]]]:
    """Start the engines of each mode, one after the other, and close them at the end.

    The arguments are those of :func:`engine_config`.
    """
    async with AsyncExitStack() as stack:
        started: dict[str, list[Engine]] = {mode: [] for mode in modes}
        for mode in (mode for mode in modes for _ in range(engines)):
            config = engine_config(
                mode, model, url, max_tokens=max_tokens, batch=batch, eager=eager, dtype=dtype, engines=engines
            )
            with model_runner(mode):
                engine = await Engine.start(config)
            started[mode].append(engine)
            stack.callback(engine.close)
            await _call(engine, "bench_install")
            print(f"{mode}: engine started", file=sys.stderr, flush=True)
        yield started
