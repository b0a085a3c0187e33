"""Measures weights that are published as differences to the previous version.

    python -m benchmarks.weight_deltas --json FILE

First, the demo's tiny model is trained with GRPO on recorded rollouts, and it is counted how many of its bfloat16
weights change with each version, and how many bytes the differences take. Then, a trainer publishes versions of a model
with 267M random parameters to an engine: as differences, as files, and by broadcast.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks.figures import Figure, report, spread
from benchmarks.random_model import random_model
from benchmarks.record_training import MODEL, ROOT, load_grpo
from benchmarks.redis_server import redis_server
from benchmarks.traces import decode
from benchmarks.transport import HISTORY, JOB, UID, run_coordinator
from rollout_api import DeltaWeights, FinishReason, Rollout, RolloutClient, TensorsInMemory, WeightSpan
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_api.weights.delta_codec import encode
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.engine_worker import EngineWorker
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.shared_checksums import SharedChecksums
from rollout_worker.job.weight_transport import BroadcastTransport, CombinedTransport, DirectoryTransport
from rollout_worker.runtime.model_cache import default_cache
from rollout_worker.tiny_model import ensure

Tensors = dict[str, torch.Tensor]

TRACE = ROOT / "benchmarks/data/tiny-grpo.jsonl.gz"
PRECISIONS = ("bfloat16", "float32")
"""Data types of the weights that the optimizer changes; the engines compute in bfloat16."""
LEARNING_RATES = (1e-6, 1e-5, 2e-4)
"""Two that are usual in RL, and the one with which the tiny model is trained from nearly nothing."""
GROUPS_PER_STEP = 2
CHANGED_SHARE = 0.01
"""Share of the elements of the large model that change with each version, by one unit in the last place."""
WAYS = ("differences", "files", "broadcast")


def bfloat16_bits(model: Any) -> dict[str, Any]:
    """Return the weights as the engines compute with them: one array of uint16 for each tensor."""
    return {
        name: parameter.detach().bfloat16().reshape(-1).view(torch.int16).numpy().view("<u2").copy()
        for name, parameter in model.named_parameters()
    }


class Recorded(NamedTuple):
    """A rollout of the trace."""

    prompt: list[int]
    rollout: Rollout
    reward: float


def read_groups(trace: Path) -> list[list[Recorded]]:
    """Return the groups of the trace whose rewards differ; the others have no gradient."""
    groups: dict[tuple[str, str], list[Recorded]] = {}
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            rollout = Rollout(
                rollout_id="recorded/0/0/0",
                problem_id=entry["problem_id"],
                token_ids=decode(entry["tokens"]).tolist(),
                logprobs=decode(entry["logprobs"], "<f2").tolist(),
                weight_spans=[WeightSpan(start=0, weight_version=0)],
                finish_reason=FinishReason.STOP,
            )
            recorded = Recorded(decode(entry["prompt_tokens"]).tolist(), rollout, float(entry["score"]))
            groups.setdefault((entry["epoch_or_checkpoint"], entry["problem_id"]), []).append(recorded)
    return [group for group in groups.values() if len({one.reward for one in group}) > 1]


def measure_changes(
    grpo: ModuleType, groups: list[list[Recorded]], precision: str, learning_rate: float, steps: int
) -> dict[str, Any]:
    """Train, and return the share of elements that change with each version, and of bytes that they take."""
    torch.manual_seed(0)
    policy = grpo.Policy(default_cache() / MODEL, Path("unused"), learning_rate)
    policy.model.to(getattr(torch, precision))  # the optimizer's state is created later, in the same precision
    changed, taken = [], []
    for step in range(grpo.WARMUP_STEPS + steps):
        before = bfloat16_bits(policy.model)
        batch = [groups[(step * GROUPS_PER_STEP + number) % len(groups)] for number in range(GROUPS_PER_STEP)]
        flat = [one for group in batch for one in group]
        advantages = [value for group in batch for value in grpo.advantages_of([one.reward for one in group])]
        policy.update([one.prompt for one in flat], [one.rollout for one in flat], advantages)
        if step < grpo.WARMUP_STEPS:
            continue
        after = bfloat16_bits(policy.model)
        encoded = [encode(before[name], after[name]) for name in before]
        elements = sum(len(bits) for bits in after.values())
        changed.append(sum(count for count, _ in encoded) / elements)
        taken.append(sum(len(data) for _, data in encoded) / (2 * elements))
    row = {"precision": precision, "learning_rate": learning_rate, "changed": spread(changed), "bytes": spread(taken)}
    print(row, flush=True)
    return row


class Trainer:
    """A trainer that has no optimizer: with each version, random elements change."""

    def __init__(self, client: RolloutClient, model: Path, directory: Path) -> None:
        from safetensors.torch import load_file

        self._client, self._model, self._directory = client, model, directory
        self._tensors: Tensors = load_file(model / "model.safetensors")
        self._random = torch.Generator().manual_seed(0)
        self._differences = DeltaWeights(self._tensors, directory / "differences")
        self._broadcast = TensorsInMemory(self._tensors, host="127.0.0.1")

    def step(self) -> None:
        """Change elements."""
        for tensor in self._tensors.values():
            flat = tensor.view(torch.int16).reshape(-1)
            count = max(1, int(CHANGED_SHARE * flat.numel()))
            flat[torch.randint(flat.numel(), (count,), generator=self._random)] += 1

    def publish(self, way: str, version: int) -> None:
        """Publish the current weights."""
        publish: dict[str, Callable[[], Any]] = {
            "differences": lambda: self._differences,
            "files": lambda: self._save(version),
            "broadcast": lambda: self._broadcast,
        }
        self._client.publish_weights(version, publish[way]()).raise_if_failed()

    def _save(self, version: int) -> Path:
        from safetensors.torch import save_file

        directory = self._directory / f"version-{version}"
        directory.mkdir()
        shutil.copy(self._model / "config.json", directory)
        save_file(self._tensors, directory / "model.safetensors")
        shutil.rmtree(self._directory / f"version-{version - 2}", ignore_errors=True)
        return directory


def run_trainer(url: str, model: Path, directory: Path, pipe: Connection) -> None:
    """Run the trainer: publish each (way, version) that is received, and send when that began and ended, until None."""
    with RolloutClient.connect(url, uid=UID) as client:
        trainer = Trainer(client, model, directory)
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            trainer.step()
            started = time.time()
            trainer.publish(*order)
            pipe.send((started, time.time()))


async def measure_publishing(url: str, directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Publish versions in each way, in two blocks each; return one row per version."""
    context = multiprocessing.get_context("spawn")
    model = random_model()
    to_coordinator, coordinator_end = context.Pipe()
    to_trainer, trainer_end = context.Pipe()
    coordinator = context.Process(target=run_coordinator, args=(url, coordinator_end), daemon=True)
    trainer = context.Process(target=run_trainer, args=(url, model, directory, trainer_end), daemon=True)
    engine = await Engine.start(EngineConfig(model=model, spec=JOB.spec.engine, cpu=True))
    job_store = JobStore.connect(url, MessageKeys(UID))
    files = DirectoryTransport(model, model, [str(directory)], checksum=SharedChecksums(job_store.weight_checksums))
    worker = EngineWorker(
        engine,
        job_store,
        HistoryStore(connect(url), HISTORY, window=4),
        name="engine-0",
        worker="",
        max_running=8,
        checkpoint_tokens=JOB.spec.engine.checkpoint_tokens,
        sampling=JOB.spec.sampling,
        transport=CombinedTransport(files, BroadcastTransport()),
        broadcast=True,
    )
    task = asyncio.ensure_future(worker.run())
    coordinator.start()
    trainer.start()
    await asyncio.to_thread(to_trainer.recv)

    async def served(version: int) -> float:
        while worker.report.version != version:
            await asyncio.sleep(0.001)
        return time.time()

    rows: list[dict[str, Any]] = []
    for way in (*WAYS, *reversed(WAYS)):
        for number in range(repeats + 1):
            version = len(rows) + 1
            to_trainer.send((way, version))
            serving = asyncio.ensure_future(served(version))
            started, ended = await asyncio.to_thread(to_trainer.recv)
            row = {
                "way": way if number or way != "differences" else "keyframe",
                "is_first": number == 0,
                "serving": await serving - started,
                "returned": ended - started,
                "pause": worker.report.counters["weights_gap_seconds"],
            }
            rows.append(row)
            print(row, flush=True)
    to_trainer.send(None)
    to_coordinator.send("end")
    await cancel_and_wait(task)
    engine.close()
    return rows


def figures_of(changes: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[Figure]:
    """Return the figures of all measurements."""
    figures = []
    for row in changes:
        what = f"{row['precision']} weights, learning rate {row['learning_rate']:g}"
        figures.append(Figure(f"changed elements, {what}", 100 * row["changed"]["median"], "%", "", "<=", None))
        target = 5.0 if row["learning_rate"] <= 1e-5 else None
        peer = "the bytes of all weights in bfloat16"
        figures.append(Figure(f"bytes, {what}", 100 * row["bytes"]["median"], "%", peer, "<=", target))

    def median(way: str, value: str) -> float:
        return statistics.median(
            row[value] for row in rows if row["way"] == way and (way == "keyframe" or not row["is_first"])
        )

    for way in ("differences", "keyframe", *WAYS[1:]):
        target = 1.0 if way == "differences" else None
        name = "a keyframe" if way == "keyframe" else way
        figures.append(Figure(f"from publishing to serving, {name}", median(way, "serving"), "s", "", "<=", target))
        figures.append(Figure(f"pause of decoding, {name}", median(way, "pause"), "s", "", "<=", None))
        figures.append(Figure(f"until publish_weights returns, {name}", median(way, "returned"), "s", "", "<=", None))
    return figures


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="versions of each training run [%(default)s]")
    parser.add_argument("--repeats", type=int, default=5, help="versions in each of a way's two blocks [%(default)s]")
    parser.add_argument("--note", default="", help="what should be known about the machine")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    ensure(default_cache() / "das" / "tiny-qwen3")
    grpo, groups = load_grpo(), read_groups(TRACE)
    changes = [
        measure_changes(grpo, groups, precision, rate, options.steps)
        for precision in PRECISIONS
        for rate in LEARNING_RATES
    ]
    with redis_server() as url, tempfile.TemporaryDirectory(prefix="weight-deltas-") as directory:
        rows = asyncio.run(measure_publishing(url, Path(directory), options.repeats))
    report(
        options.json,
        figures_of(changes, rows),
        note=options.note,
        changes=changes,
        publications=rows,
        workload={"parameters": 267_000_000, "changed_share": CHANGED_SHARE, "engine": "idle"},
    )


if __name__ == "__main__":
    main()
