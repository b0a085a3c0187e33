"""Checks that pods can be created from a valid manifest. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rollout_api.manifest.rollout_job import FieldError, ManifestError
from rollout_operator.job_context import JobContext
from rollout_operator.pods import head_pod, worker_pod
from rollout_operator.server_objects import server_objects
from rollout_operator.strategic_merge import PatchError


def check_pods_can_run(context: JobContext) -> None:
    """Reject manifests that are valid for ``rollout run`` but cannot run in pods.

    Raises:
        ManifestError: with one error per field.
    """
    spec, errors = context.job.spec, []
    for path, url in (("spec.redis.url", spec.redis.url), ("spec.history.redis.url", spec.history.redis.url)):
        if url is not None and url.startswith("unix:"):
            errors.append(FieldError(path, "pods cannot reach a Unix socket on another machine; use a redis:// URL"))
    builders: dict[str, Callable[[], object]] = {
        "head": lambda: head_pod(context),
        "workers": lambda: worker_pod(context, 0, replacement=False),
        "server": lambda: server_objects(context),
    }
    for section, build in builders.items():
        try:
            build()
        except PatchError as error:
            errors.append(FieldError(f"spec.{section}.podTemplate", str(error)))
    if errors:
        raise ManifestError(errors)
