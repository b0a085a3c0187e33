"""A validated job, as the functions that build its objects need it, and the settings of its pods.

These settings, the revision, stay the same while the spec changes. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from rollout_api.manifest.field_types import SecretKey
from rollout_api.manifest.pod_spec import RUNTIME_SECTIONS, SCALING_FIELDS
from rollout_api.manifest.rollout_job import API_VERSION, KIND, ManifestError, RolloutJob, parse_job
from rollout_api.manifest.spec import Redis
from rollout_api.manifest.status import PodGroup, Revision
from rollout_operator.objects import names
from rollout_operator.objects.observed import Manifest, Observed
from rollout_operator.objects.runtimes import RuntimeKey, RuntimeNotFoundError, job_with_runtime, name_runtime_in

DEFAULT_REDIS_SECRET = SecretKey(name="rollout-redis", key="url")
_REPLACED = ("runtimeRef", *map(to_camel, RUNTIME_SECTIONS))
_SCALING = frozenset(map(to_camel, SCALING_FIELDS))


def parse_body(body: Manifest) -> RolloutJob:
    """Validate a RolloutJob as the API server returns it, without the status and most of the metadata.

    Raises:
        ManifestError: if the manifest is invalid.
    """
    metadata = body["metadata"]
    identity = {"name": metadata["name"], "namespace": metadata["namespace"]}
    return parse_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": identity, "spec": body.get("spec")})


def has_managed_user(redis: Redis, *, by_default: bool) -> bool:
    """Return whether rollout-redis-users creates a Redis user for a job.

    *by_default* says whether it does so for a job whose manifest names no Redis server.
    """
    return redis.managed or (by_default and redis.url is None and redis.url_from is None)


@dataclass(frozen=True)
class JobContext:
    """A job's manifest with what else determines its objects."""

    job: RolloutJob
    uid: str
    labels: dict[str, str]
    """Labels of the RolloutJob itself."""
    default_image: str
    """Image of the job's pods if the manifest names none."""
    revision: Revision | None = None
    """The settings of new pods, which ``job`` has; None before the first pod is created."""
    pod_group: PodGroup | None = None
    """The pods that Kueue admits as a whole; None if the job is in no queue, or was running when it was put in one."""
    cluster_gang_api: str | None = None
    """API version of the cluster's PodGroups, if it has any."""
    status_token_hash: str = ""
    """Hash of the token that the head requires for /status and /metrics; empty if it requires none."""
    has_redis_user_by_default: bool = False
    """Whether the job has its own Redis user if its manifest names no Redis server."""
    annotations: dict[str, str] = field(default_factory=dict)
    """Annotations of the RolloutJob itself."""
    has_runtime: bool = False
    """Whether the job names a runtime. ``job`` has the settings of both then."""
    runtime_error: ManifestError | None = None
    """Why the settings of the runtime cannot be used. ``job`` has those of the pinned revision instead."""

    @classmethod
    def from_spec(cls, observed: Observed) -> Self:
        """Validate the observed job, and return a context for pods of its current spec.

        Raises:
            ManifestError: if the manifest is invalid.
        """
        job, error = _job_and_error(observed)
        return replace(cls._of(observed, job), runtime_error=error)

    @classmethod
    def _of(cls, observed: Observed, job: RolloutJob) -> Self:
        metadata = observed.metadata
        pod_group = observed.status.get("podGroup")
        return cls(
            job,
            metadata["uid"],
            metadata.get("labels") or {},
            observed.default_image,
            pod_group=None if pod_group is None else PodGroup.model_validate(pod_group, extra="ignore"),
            cluster_gang_api=observed.cluster.gang_api,
            status_token_hash=observed.cluster.status_token_hash,
            has_redis_user_by_default=observed.cluster.creates_redis_users,
            annotations=metadata.get("annotations") or {},
            has_runtime=RuntimeKey.of_job(observed.job) is not None,
        )

    @classmethod
    def from_observed(cls, observed: Observed) -> Self:
        """Validate the observed job, and return a context for new pods.

        Raises:
            ManifestError: if the manifest is invalid.
        """
        return cls.from_spec(observed).pinned_as_in(observed.status)

    @classmethod
    def for_cleanup(cls, observed: Observed) -> Self:
        """Validate the observed job, and return a context for its cleanup pod.

        This pod can do without the settings of a runtime that cannot be used any more.

        Raises:
            ManifestError: if the manifest is invalid.
        """
        try:
            return cls.from_observed(observed)
        except ManifestError:
            if RuntimeKey.of_job(observed.job) is None:
                raise
            return cls._of(observed, parse_body(observed.job))

    def pinned_as_in(self, status: Manifest) -> Self:
        """Return a context for pods of the revision in a job's status.

        If there is none, or if this version of the operator does not accept its settings any more, it is this context.
        """
        revision = status.get("revision")
        if revision is None:
            return self
        try:
            return self.pinned_to(Revision.model_validate(revision, extra="ignore"))
        except (ManifestError, ValidationError):
            return self

    def pinned_to(self, revision: Revision) -> Self:
        """Return a context for pods of a revision."""
        return replace(self, job=with_revision(self.job, revision), default_image=revision.image, revision=revision)

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.metadata.name

    @property
    def owner_reference(self) -> dict[str, Any]:
        """The owner reference of the job's objects."""
        return names.owner_reference({"name": self.name, "uid": self.uid}, API_VERSION, KIND)

    @property
    def queue(self) -> str | None:
        """The Kueue queue of the job's pods, or None if they are in none."""
        return self.labels.get(names.QUEUE_LABEL) if self.pod_group is None else self.pod_group.queue

    @property
    def gang_api(self) -> str | None:
        """API version of the PodGroups of the job's workers; None if they have none."""
        return self.cluster_gang_api if self.pods_per_worker > 1 and self.queue is None else None

    def gang(self, slot: int) -> str:
        """Return the name of the PodGroup of the worker in a slot.

        Kubernetes' own PodGroups have a priority that cannot be changed, so the name contains it.
        """
        name, priority = names.worker(self.name, slot), self.job.spec.priority_class_name
        return name if priority is None or self.gang_api != names.NATIVE_GANG_API else f"{name}-{priority}"

    def is_in_pod_group(self, slot: int) -> bool:
        """Return whether the worker of a slot belongs to the group that Kueue admits as a whole."""
        return slot < self.num_grouped_workers

    @property
    def num_grouped_workers(self) -> int:
        """Number of workers in the group that Kueue admits as a whole."""
        return 0 if self.pod_group is None else (self.pod_group.total_count - 1) // self.pods_per_worker

    @property
    def pods_per_worker(self) -> int:
        """Number of pods of each worker."""
        return self.job.spec.workers.pods_per_worker

    @property
    def redis_secret(self) -> SecretKey | None:
        """The Secret with the URL of the job's Redis, or None if the manifest contains the URL."""
        redis = self.job.spec.redis
        if has_managed_user(redis, by_default=self.has_redis_user_by_default):
            return SecretKey(name=names.redis_secret(self.name), key="url")
        if redis.url_from is not None:
            return redis.url_from.secret_key_ref
        return None if redis.url is not None else DEFAULT_REDIS_SECRET


def _job_and_error(observed: Observed) -> tuple[RolloutJob, ManifestError | None]:
    """Return the observed job with the settings of its runtime, if it names one.

    If these or its own settings cannot be used any more while the job is running, it has those of its pinned revision
    instead, and the reason is returned, too.
    """
    key = RuntimeKey.of_job(observed.job)
    try:
        if key is None:
            return parse_body(observed.job), None
        if observed.runtime is None:
            raise RuntimeNotFoundError(key)
        try:
            return parse_body(job_with_runtime(observed.job, observed.runtime)), None
        except ManifestError as error:
            raise name_runtime_in(error, observed.job, observed.runtime, key) from None
    except ManifestError as error:
        revision = observed.status.get("revision")
        if revision is None:
            raise
        return parse_body(manifest_with_settings(observed.job, revision["settings"])), error


def revision_of(job: RolloutJob, default_image: str, *, has_runtime: bool) -> Revision:
    """Return the revision of pods that are created from the current spec of a job.

    *has_runtime* says whether a runtime may change the model cache, which is fixed otherwise.
    """
    spec = job.spec
    settings = spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        exclude_defaults=True,
        include={
            **dict.fromkeys(RUNTIME_SECTIONS, True),
            "workers": set(type(spec.workers).model_fields) - SCALING_FIELDS,
        },
    )
    if has_runtime:
        cache = spec.model.cache.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        settings["model"] = {"cache": cache}
    image = spec.image.name or default_image
    text = json.dumps([image, settings], sort_keys=True)
    return Revision(hash=hashlib.sha256(text.encode()).hexdigest()[:10], image=image, settings=settings)


def with_revision(job: RolloutJob, revision: Revision) -> RolloutJob:
    """Return a job whose pods are those of an earlier revision."""
    manifest = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    return parse_job(manifest_with_settings(manifest, revision.settings))


def manifest_with_settings(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a job with the settings of a revision instead of its own, and without a runtime."""
    spec = {name: section for name, section in manifest["spec"].items() if name not in _REPLACED}
    own_workers = manifest["spec"].get("workers", {})
    scaling = {name: value for name, value in own_workers.items() if name in _SCALING}
    model = {**spec.get("model", {}), **settings.get("model", {})}
    workers = {**settings.get("workers", {}), **scaling}
    return {**manifest, "spec": {**spec, **settings, "model": model, "workers": workers}}


def changed_settings(old: Revision, new: Revision) -> list[str]:
    """Return the paths of the settings that differ between two revisions, below ``spec``."""
    paths = []
    for section in sorted({*old.settings, *new.settings}):
        one, other = old.settings.get(section), new.settings.get(section)
        if not isinstance(one, dict | None) or not isinstance(other, dict | None):
            paths += [section] if one != other else []
            continue
        fields = sorted({*(one or {}), *(other or {})})
        paths += [f"{section}.{name}" for name in fields if (one or {}).get(name) != (other or {}).get(name)]
    if not paths and old.image != new.image:
        paths.append("the operator's default image")
    return paths
