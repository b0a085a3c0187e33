"""Runs kubectl with the user's cluster and namespace, and finds RolloutJobs and their pods with it."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rollout_api.manifest.rollout_job import GROUP, PLURAL

_PROGRAM = "kubectl"
RESOURCE = f"{PLURAL}.{GROUP}"


_LIBRARY_LOG = re.compile(r"[EWI]\d{4} ")
"""Beginning of a log line of kubectl's libraries, which precede its own message."""


class PluginError(Exception):
    """The command cannot be carried out. The text says why, and what to do."""


class NotFoundError(PluginError):
    """An object does not exist."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with the options that the user has given to the plugin."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of kubectl with *arguments*."""
        options = {"--namespace": self.namespace, "--context": self.context, "--kubeconfig": self.kubeconfig}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        return [_PROGRAM, *given, *arguments]

    def output(self, *arguments: str) -> str:
        """Run kubectl and return what it prints.

        Raises:
            NotFoundError: if the object does not exist.
            PluginError: if kubectl is missing or fails.
        """
        return self.read(*arguments).decode(errors="replace")

    def read(self, *arguments: str) -> bytes:
        """Return the same as :meth:`output` without decoding it; the errors are the same."""
        done = self.run(*arguments, capture_output=True)
        if done.returncode:
            raise explain_error(done.stderr.decode(errors="replace").strip())
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return an object, or a list of objects, of the cluster.

        Raises:
            NotFoundError, PluginError: as :meth:`output`.
        """
        found: dict[str, Any] = json.loads(self.output("get", *arguments, "-o", "json"))
        return found

    def show(self, *arguments: str) -> int:
        """Run kubectl on the user's terminal, and return its exit code; 130 after Ctrl-C.

        Raises:
            PluginError: if kubectl is missing.
        """
        sys.stdout.flush()
        try:
            return self.run(*arguments).returncode
        except KeyboardInterrupt:
            return 130

    def save(self, file: IO[bytes], *arguments: str) -> int:
        """Run kubectl, write its output to a file, and return its exit code.

        Raises:
            PluginError: if kubectl is missing.
        """
        return self.run(*arguments, stdout=file).returncode

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start kubectl, whose output the caller reads.

        Raises:
            PluginError: if kubectl is missing.
        """
        self._check_installed()
        return subprocess.Popen(self.command(*arguments), stdout=subprocess.PIPE, text=True)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run kubectl with these options of :func:`subprocess.run`.

        Raises:
            PluginError: if kubectl is missing.
        """
        self._check_installed()
        return subprocess.run(self.command(*arguments), check=False, **options)

    def _check_installed(self) -> None:
        if shutil.which(_PROGRAM) is None:
            raise PluginError(
                "kubectl is not on the PATH; install it (https://kubernetes.io/docs/tasks/tools) and try again"
            )


def explain_error(message: str) -> PluginError:
    """Return the error for what kubectl has printed to standard error."""
    message = "\n".join(line for line in message.splitlines() if not _LIBRARY_LOG.match(line))
    message = message.removeprefix("error: ")
    if "doesn't have a resource type" in message or "could not find the requested resource" in message:
        return PluginError(
            f"the cluster does not know RolloutJobs ({message}); is das-rollout's chart installed with its CRD "
            "(crds.install), and is this the right --context?"
        )
    if re.search(r"\(NotFound\)", message):
        return NotFoundError(message)
    if "(Forbidden)" in message:
        return PluginError(f"{message}; ask an administrator of the cluster for this permission")
    return PluginError(message or "kubectl failed without a message")


_WAITING_CONDITIONS = ("Accepted", "QuotaReserved", "WorkersReady", "EngineReady")
"""Conditions in the order of a job's start; the first one that is not True says what the job waits for."""


def get_job(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Return a RolloutJob.

    Raises:
        PluginError: if it does not exist, with the names of those that do, or if kubectl fails.
    """
    try:
        return kubectl.get(RESOURCE, name)
    except NotFoundError:
        known = [job["metadata"]["name"] for job in kubectl.get(RESOURCE)["items"]]
        where = f"namespace {kubectl.namespace}" if kubectl.namespace else "the current namespace"
        raise PluginError(missing_job(name, where, known)) from None


def missing_job(name: str, where: str, known: Iterable[str]) -> str:
    """Return the message about a job that does not exist in *where*, which has the jobs *known*."""
    names = sorted(known)
    if similar := difflib.get_close_matches(name, names, n=1):
        hint = f"did you mean {similar[0]}?"
    elif names:
        hint = f"the jobs there are {', '.join(names)}"
    else:
        hint = "there are no jobs; choose another namespace with -n"
    return f"there is no RolloutJob {name} in {where}; {hint}"


def condition(job: Mapping[str, Any], kind: str) -> Mapping[str, str]:
    """Return a condition of a job; empty if it has none of this type."""
    conditions: Iterable[Mapping[str, str]] = job.get("status", {}).get("conditions", ())
    return next((found for found in conditions if found["type"] == kind), {})


def explanation(job: Mapping[str, Any]) -> str:
    """Return in one line why a job is not ready or has failed; '' if there is nothing to say."""
    if condition(job, "Ready").get("status") == "True":
        return ""
    failed = condition(job, "Failed")
    if failed.get("status") == "True":
        return _line(failed)
    for kind in _WAITING_CONDITIONS:
        found = condition(job, kind)
        if found and found["status"] != "True":
            return _line(found)
    return _line(condition(job, "Ready"))


def summary(job: Mapping[str, Any]) -> str:
    """Return the state of a job, and why it is not ready, in one line."""
    why = explanation(job)
    return f"{full_name(job)} is {state(job)}{f': {why}' if why else ''}"


def state(job: Mapping[str, Any]) -> str:
    """Return the state of a job in one word."""
    found: str = job.get("status", {}).get("state", "Pending")
    return found


def full_name(job: Mapping[str, Any]) -> str:
    """Return ``namespace/name`` of a job."""
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


def _line(found: Mapping[str, str]) -> str:
    reason, message = found.get("reason", ""), found.get("message", "")
    return f"{reason}: {message}" if reason and message else reason or message


HEAD, WORKER = "head", "worker"
"""Components, which are also the names of their containers."""
_COMPONENT_LABEL = "app.kubernetes.io/component"
_SLOT_LABEL, _RANK_LABEL = f"{GROUP}/slot", f"{GROUP}/rank"


def selector(job: str, component: str | None = None, slot: int | None = None) -> str:
    """Return the label selector of a job's pods.

    Args:
        job: name of the job.
        component: the component; None for all pods.
        slot: number of the worker; None for all workers.
    """
    labels = {"app.kubernetes.io/managed-by": "das-rollout", f"{GROUP}/job": job}
    if component is not None:
        labels[_COMPONENT_LABEL] = component
    if slot is not None:
        labels[_SLOT_LABEL] = str(slot)
    return ",".join(f"{name}={value}" for name, value in labels.items())


def list_pods(kubectl: Kubectl, labels: str, *, node: str | None = None) -> list[dict[str, Any]]:
    """Return the pods with these labels, or those of them on one node.

    Raises:
        PluginError: if kubectl fails.
    """
    on_node = [] if node is None else [f"--field-selector=spec.nodeName={node}"]
    pods: list[dict[str, Any]] = kubectl.get("pods", "-l", labels, *on_node)["items"]
    return pods


def running_head(kubectl: Kubectl, job: Mapping[str, Any]) -> str:
    """Return the name of the head's pod.

    Raises:
        PluginError: if no head runs, with the state of the job and the reason.
    """
    for pod in list_pods(kubectl, selector(job["metadata"]["name"], HEAD)):
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return str(pod["metadata"]["name"])
    raise PluginError(f"the head of the job does not run. {summary(job)}")


def leaders(pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the worker pods that are not terminating and have an engine's core, by slot."""
    found = [
        pod
        for pod in pods
        if pod["metadata"]["labels"].get(_RANK_LABEL, "0") == "0" and "deletionTimestamp" not in pod["metadata"]
    ]
    return sorted(found, key=slot_of)


def slot_of(pod: Mapping[str, Any]) -> int:
    """Return the number of the worker that a pod belongs to."""
    return int(pod["metadata"]["labels"][_SLOT_LABEL])
