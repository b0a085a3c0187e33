"""A validated job, as the functions that build its objects need it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import ValidationError

from rollout_api.manifest.field_types import SecretKey
from rollout_api.manifest.rollout_job import API_VERSION, KIND, ManifestError, RolloutJob, parse_job
from rollout_api.manifest.status import PodGroup, Revision
from rollout_operator import names
from rollout_operator.observed import Manifest, Observed
from rollout_operator.revisions import with_revision

DEFAULT_REDIS_SECRET = SecretKey(name="rollout-redis", key="url")


def parse_body(body: Manifest) -> RolloutJob:
    """Validate a RolloutJob as the API server returns it, without the status and most of the metadata.

    Raises:
        ManifestError: if the manifest is invalid.
    """
    metadata = body["metadata"]
    identity = {"name": metadata["name"], "namespace": metadata["namespace"]}
    return parse_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": identity, "spec": body.get("spec")})


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

    @classmethod
    def from_spec(cls, observed: Observed) -> Self:
        """Validate the observed job, and return a context for pods of its current spec.

        Raises:
            ManifestError: if the manifest is invalid.
        """
        metadata = observed.metadata
        pod_group = observed.status.get("podGroup")
        return cls(
            parse_body(observed.job),
            metadata["uid"],
            metadata.get("labels") or {},
            observed.default_image,
            pod_group=None if pod_group is None else PodGroup.model_validate(pod_group),
        )

    @classmethod
    def from_observed(cls, observed: Observed) -> Self:
        """Validate the observed job, and return a context for new pods.

        Raises:
            ManifestError: if the manifest is invalid.
        """
        return cls.from_spec(observed).pinned_as_in(observed.status)

    def pinned_as_in(self, status: Manifest) -> Self:
        """Return a context for pods of the revision in a job's status.

        If there is none, or if this version of the operator does not accept its settings any more, it is this context.
        """
        revision = status.get("revision")
        if revision is None:
            return self
        try:
            return self.pinned_to(Revision.model_validate(revision))
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

    def is_in_pod_group(self, slot: int) -> bool:
        """Return whether the worker of a slot belongs to the group that Kueue admits as a whole."""
        return self.pod_group is not None and slot < self.pod_group.total_count - 1

    @property
    def redis_secret(self) -> SecretKey | None:
        """The Secret with the URL of the job's Redis, or None if the manifest contains the URL."""
        redis = self.job.spec.redis
        if redis.managed:
            return SecretKey(name=names.redis_secret(self.name), key="url")
        if redis.url_from is not None:
            return redis.url_from.secret_key_ref
        return None if redis.url is not None else DEFAULT_REDIS_SECRET
