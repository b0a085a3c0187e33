"""Examines everything that a call of ``rollout doctor`` asks for."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollout_api.manifest.rollout_job import ManifestError, RolloutJob
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_tools.doctor.cluster import examine_cluster
from rollout_tools.doctor.findings import Finding, Section, error, ok, warning
from rollout_tools.doctor.gpus import GpuDriverError, GpuFacts, check_gpus, read_gpus
from rollout_tools.doctor.machine import MachineFacts, check_machine, check_vllm, read_machine, read_vllm
from rollout_tools.doctor.manifest import check_invalid_manifest, check_manifest, read_model
from rollout_tools.doctor.redis_server import check_redis, read_redis


@dataclass(frozen=True)
class Request:
    """What is to be examined."""

    manifest: RolloutJob | ManifestError | None
    """The manifest, or why it is invalid; None if none was named."""
    redis_url: str | None
    history_url: str | None
    uid: str | None
    """Uid of the job whose keys the Redis user must be able to use; None for those of any job."""
    model_cache: Path
    cluster: bool
    """Whether to examine a cluster."""
    namespace: str | None


def examine(request: Request) -> Iterator[Section]:
    """Yield the findings about each subject as soon as they are known."""
    job = request.manifest if isinstance(request.manifest, RolloutJob) else None
    machine = read_machine(request.model_cache)
    yield Section("machine", check_machine(machine))
    vllm = read_vllm()
    yield Section("vLLM", check_vllm(vllm))
    # The workers of a cluster run elsewhere.
    gpus, findings = _gpus(job if not request.cluster else None, vllm.torch_cuda)
    yield Section("GPUs", findings)
    if request.manifest is not None:
        yield Section("manifest", _manifest(request, machine, gpus))
    yield from _redis(request, job)
    if request.cluster:
        yield Section("cluster", examine_cluster(job, request.namespace, machine.versions["das-rollout"]))


def _gpus(job: RolloutJob | None, torch_cuda: str | None) -> tuple[GpuFacts | None, list[Finding]]:
    wanted = job.spec.workers.gpus_per_worker // job.spec.workers.pods_per_worker if job is not None else 0
    try:
        facts = read_gpus()
    except GpuDriverError as failure:
        advice = (
            "the driver does not work; see dmesg, reload it or restart the machine, and check the container's runtime"
        )
        return None, [error("GPUs", str(failure), advice) if wanted else warning("GPUs", str(failure), advice)]
    tensor_parallel = job.spec.engine.tensor_parallel_size if job is not None else 1
    return facts, check_gpus(facts, wanted=wanted, tensor_parallel=tensor_parallel, torch_cuda=torch_cuda)


def _manifest(request: Request, machine: MachineFacts, gpus: GpuFacts | None) -> list[Finding]:
    if request.manifest is None or isinstance(request.manifest, ManifestError):
        return check_invalid_manifest(request.manifest) if request.manifest is not None else []
    model = read_model(request.manifest, request.model_cache)
    if request.cluster:
        return check_manifest(request.manifest, model, gpu_memory=None, memory=None)
    return check_manifest(
        request.manifest,
        model,
        gpu_memory=min((gpu.memory for gpu in gpus.gpus), default=None) if gpus is not None else None,
        memory=min(machine.memory_available, machine.memory_limit or machine.memory_available),
    )


def _redis(request: Request, job: RolloutJob | None) -> Iterator[Section]:
    url = request.redis_url or (job.spec.redis.url if job is not None else None)
    history_url = request.history_url or (job.spec.history.redis.url if job is not None else None)
    probe = f"doctor-{uuid.uuid4().hex}"
    of_history = [HistoryKeys(job.metadata.namespace, job.history_name).log(probe)] if job is not None else []
    now = datetime.now(UTC)
    if url is None:
        yield Section("Redis", [_redis_of_pods() if request.cluster else _own_redis()])
    else:
        keys = [MessageKeys(request.uid or probe).prefix + probe, *(of_history if history_url is None else [])]
        yield Section(
            "Redis", check_redis(read_redis(url, keys=keys, may_be_cluster=False), holds_messages=True, now=now)
        )
    if history_url is not None:
        keys = of_history or [HistoryKeys("default", probe).log(probe)]
        facts = read_redis(history_url, keys=keys, may_be_cluster=True)
        yield Section("history's Redis", check_redis(facts, holds_messages=False, now=now))


def _redis_of_pods() -> Finding:
    return warning(
        "server",
        "not examined: no URL",
        "pods read the URL from a Secret; pass --redis or set ROLLOUT_REDIS_URL, in a pod or with a forwarded port",
    )


def _own_redis() -> Finding:
    program = shutil.which("redis-server")
    if program is None:
        return warning(
            "server",
            "no URL, and redis-server is not installed",
            "pass --redis or set ROLLOUT_REDIS_URL, or install redis-server so that rollout run can start one",
        )
    return ok("server", f"no URL; rollout run starts {program}")
