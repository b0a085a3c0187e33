"""The commands ``report``, ``logs``, ``drain`` and ``connect``.

Commands that need the job's Redis run ``rollout`` in the pod of the job's head, which has its URL. All functions raise
:class:`PluginError` with what the user can do.
"""

from __future__ import annotations

import base64
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rollout_api.kubectl_plugin.kubectl import (
    HEAD,
    WORKER,
    Kubectl,
    PluginError,
    full_name,
    leaders,
    list_pods,
    running_head,
    selector,
    slot_of,
    summary,
)
from rollout_api.redaction import HIDDEN
from rollout_api.redis_client.address import without_password


def exec_arguments(pod: str, job: Mapping[str, Any], command: Sequence[str], *, columns: int, tty: bool) -> list[str]:
    """Return the arguments of ``kubectl`` that run a command of ``rollout`` for a job in its head.

    Args:
        pod: the head's pod.
        job: the job.
        command: name of the command and its further arguments.
        columns: width of the user's terminal.
        tty: whether the command gets the user's terminal.
    """
    name, *arguments = command
    rollout = ["rollout", name, full_name(job), *arguments, f"--uid={job['metadata']['uid']}"]
    # Without a terminal of its own, the command does not know how wide the user's is.
    environment = [] if tty else ["env", f"COLUMNS={columns}"]
    return ["exec", *(["-it"] if tty else []), pod, "-c", HEAD, "--", *environment, *rollout]


def run_in_head(kubectl: Kubectl, job: Mapping[str, Any], *command: str, tty: bool = False) -> int:
    """Run a command of ``rollout`` in the head, and return its exit code."""
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    columns = shutil.get_terminal_size((100, 24)).columns
    pod = running_head(kubectl, job)
    return kubectl.show(*exec_arguments(pod, job, command, columns=columns, tty=tty and has_terminal))


def save_report(kubectl: Kubectl, job: Mapping[str, Any], target: Path) -> int:
    """Let the head write the job's report, copy it to *target*, and return the exit code."""
    pod = running_head(kubectl, job)
    remote = f"/tmp/report-{secrets.token_hex(8)}.html"  # noqa: S108 - a volume of the pod
    code = kubectl.show(*exec_arguments(pod, job, ("report", f"--html={remote}"), columns=100, tty=False))
    if code:
        return code
    try:
        with target.open("wb") as file:
            return kubectl.save(file, "exec", pod, "-c", HEAD, "--", "cat", remote)
    except OSError as error:
        raise PluginError(f"cannot write {target}: {error.strerror}") from None
    finally:
        kubectl.show("exec", pod, "-c", HEAD, "--", "rm", "-f", remote)


_SPARE_STREAMS = 5


def logs_arguments(labels: str, num_pods: int, *, follow: bool, tail: int) -> list[str]:
    """Return the arguments of ``kubectl`` that print the logs of pods.

    Args:
        labels: label selector of the pods.
        num_pods: number of these pods.
        follow: whether to continue with new lines.
        tail: number of last lines of each pod to begin with; -1 for all.
    """
    arguments = ["logs", f"--selector={labels}", "--prefix", f"--tail={tail}", "--ignore-errors"]
    # kubectl refuses to follow more than five logs otherwise.
    return [*arguments, *(["--follow", f"--max-log-requests={num_pods + _SPARE_STREAMS}"] if follow else [])]


def show_logs(
    kubectl: Kubectl, job: Mapping[str, Any], *, follow: bool, tail: int, head: bool, worker: int | None
) -> int:
    """Show the logs of the pods of a job, each line with its pod, and return the exit code.

    Args:
        kubectl: access to the cluster.
        job: the job.
        follow: whether to continue with new lines until Ctrl-C.
        tail: number of last lines of each pod to begin with; -1 for all.
        head: whether to show the head alone.
        worker: number of the worker to show alone; None for all pods.
    """
    component = HEAD if head else None if worker is None else WORKER
    labels = selector(job["metadata"]["name"], component, worker)
    pods = list_pods(kubectl, labels)
    if not pods:
        raise PluginError(f"there are no such pods. {summary(job)}")
    return kubectl.show(*logs_arguments(labels, len(pods), follow=follow, tail=tail))


def failure_lines(job: Mapping[str, Any]) -> list[str]:
    """Return what the status of a job has kept of its failed pods, which are deleted: reasons and ends of logs."""
    failures: Sequence[Mapping[str, Any]] = job.get("status", {}).get("failures", ())
    lines = []
    for failure in failures:
        code = failure.get("exitCode")
        lines.append(
            f"{failure['time']} {failure['pod']}: {failure['reason']}{'' if code is None else f', exit code {code}'}"
        )
        lines += [f"  {line}" for line in failure.get("message", "").splitlines()]
    return lines or ["No pod of this job has failed."]


_HANDOVER_GRACE_S = 20
"""Part of a worker's termination grace period for handing over unfinished rollouts."""
_EXTRA_WAIT_S = 60
"""Seconds that the command waits beyond the grace period of a pod."""


def choose_worker(job: str, pods: Sequence[dict[str, Any]], worker: str) -> dict[str, Any]:
    """Return the pod of a worker that is named by its number or by its pod."""
    for pod in leaders(pods):
        if worker in (str(slot_of(pod)), pod["metadata"]["name"]):
            return pod
    known = ", ".join(pod["metadata"]["name"] for pod in leaders(pods)) or "none"
    raise PluginError(f"job {job} has no worker {worker}; its workers are: {known}")


def plan_text(pods: Sequence[Mapping[str, Any]], num_workers: int) -> str:
    """Return what happens when these workers of a job with *num_workers* workers are drained."""
    names = ", ".join(pod["metadata"]["name"] for pod in pods)
    seconds = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in pods) - _HANDOVER_GRACE_S
    elsewhere = (
        "wait for the replacements" if len(pods) == num_workers else "continue on other workers from where they are"
    )
    return (
        f"Draining {names}. Running rollouts have {seconds} s to finish; the others {elsewhere}. The operator creates "
        "a replacement of each worker."
    )


def drain(
    kubectl: Kubectl, job: Mapping[str, Any], *, worker: str | None, node: str | None, say: Callable[[str], None]
) -> int:
    """Drain one worker of a job, or all of its workers on a node, and wait until their pods are gone.

    Args:
        kubectl: access to the cluster.
        job: the job.
        worker: number or pod of the worker; None with a node.
        node: name of the node, which is cordoned first, so that no replacement is created there.
        say: shows a line to the user.

    Returns:
        The exit code of kubectl.
    """
    name = job["metadata"]["name"]
    pods = list_pods(kubectl, selector(name, WORKER))
    if worker is not None:
        chosen = [choose_worker(name, pods, worker)]
    else:
        chosen = [pod for pod in leaders(pods) if pod["spec"].get("nodeName") == node]
        if not chosen:
            raise PluginError(f"job {name} has no worker on node {node}")
        say(kubectl.output("cordon", str(node)).strip())
    say(plan_text(chosen, len(leaders(pods))))
    grace = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in chosen)
    names = [pod["metadata"]["name"] for pod in chosen]
    code = kubectl.show("delete", "pod", *names, "--wait=true", f"--timeout={grace + _EXTRA_WAIT_S}s")
    if code:
        return code
    say("The workers have left the job.")
    if node is not None:
        say(f"Node {node} stays cordoned until you run: kubectl uncordon {node}")
    return 0


_SERVER_PORT, _REDIS_PORT = 8000, 6379
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Connection:
    """What a job's status says about connections to it."""

    server_url: str | None
    """URL of the HTTP server within the cluster."""
    redis_url: str | None
    """URL of Redis, if it needs no credentials."""
    secret: tuple[str, str] | None
    """Name of the Secret with the URL of Redis, and the key in it."""
    tokens_secret: str | None
    """Secret with the bearer tokens of the HTTP server."""


def connection_of(job: Mapping[str, Any]) -> Connection:
    """Return how to connect to a job."""
    found = job.get("status", {}).get("connection")
    if not found:
        raise PluginError(f"the operator has not published how to connect to the job. {summary(job)}")
    secret = found.get("secretName")
    return Connection(
        found.get("serverUrl"),
        found.get("url"),
        (secret, found.get("secretKey", "url")) if secret else None,
        job["spec"].get("server", {}).get("tokensSecretName"),
    )


def read_secret(kubectl: Kubectl, secret: tuple[str, str]) -> str:
    """Return the value of a key of a Secret."""
    name, key = secret
    data = kubectl.get("secret", name).get("data", {})
    if key not in data:
        raise PluginError(f"Secret {name} has no key {key}")
    return base64.b64decode(data[key]).decode()


def forwarded_url(url: str, port: int) -> str:
    """Return the URL under which a program on this machine reaches *url* through the local *port*."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}" if login else f"127.0.0.1:{port}"))


def forward_target(url: str, namespace: str) -> tuple[str, str, int]:
    """Return namespace, Service and port of a URL within the cluster, for ``kubectl port-forward``.

    Args:
        url: URL of an HTTP server or a Redis server.
        namespace: namespace of the job, also for names without a namespace.
    """
    parts = urlsplit(url)
    host, default = parts.hostname or "", _SERVER_PORT if parts.scheme.startswith("http") else _REDIS_PORT
    if "+" in parts.scheme:
        raise PluginError(
            f"{without_password(url)} consists of several servers, which a forwarded port cannot reach; connect from "
            "within the cluster"
        )
    names = host.split(".")
    if len(names) > 2 and names[2] != "svc":
        raise PluginError(f"{host} is outside of the cluster, so it needs no forwarded port; connect to it directly")
    return names[1] if len(names) > 1 else namespace, f"service/{names[0]}", parts.port or default


def http_snippet(job: Mapping[str, Any], url: str, tokens_secret: str | None) -> str:
    """Return Python code that samples from the HTTP server at *url*."""
    token = f"<a token of Secret {tokens_secret}>" if tokens_secret else "none"
    return (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="{token}")\n'
        f'message = {{"role": "user", "content": "3+4="}}\n'
        f'print(client.chat.completions.create(model="{job["metadata"]["name"]}", messages=[message]))\n'
    )


def redis_snippet(job: Mapping[str, Any], url: str) -> str:
    """Return Python code that connects a trainer through Redis at *url*."""
    return (
        "from rollout_api import RolloutClient\n\n"
        f'with RolloutClient.connect("{url}", "{full_name(job)}", name="trainer") as client:\n'
        "    print(client.status)\n"
    )


def describe(job: Mapping[str, Any], found: Connection, redis_url: str | None) -> list[str]:
    """Return lines about how programs within the cluster connect to a job.

    Args:
        job: the job.
        found: how to connect.
        redis_url: URL of Redis that may be shown; None if it is in a Secret.
    """
    lines = [summary(job), ""]
    if found.server_url:
        lines.append(f"HTTP server within the cluster: {found.server_url}")
        if found.tokens_secret:
            lines.append(f"  Each client needs a bearer token, one key of Secret {found.tokens_secret}.")
        lines += ["", http_snippet(job, found.server_url, found.tokens_secret)]
    if redis_url is not None:
        lines += [f"Redis within the cluster: {redis_url}", "", redis_snippet(job, redis_url)]
    elif found.secret:
        name, key = found.secret
        lines += [
            f"The URL of Redis is in Secret {name}, key {key} (shown with --show-secret). In a pod's manifest:",
            f"  env: [{{name: ROLLOUT_REDIS_URL, valueFrom: {{secretKeyRef: {{name: {name}, key: {key}}}}}}}]",
            "",
            redis_snippet(job, "$ROLLOUT_REDIS_URL")
            .replace('"$ROLLOUT_REDIS_URL"', 'os.environ["ROLLOUT_REDIS_URL"]')
            .replace("from rollout_api", "import os\n\nfrom rollout_api"),
        ]
    return [*lines, "From outside of the cluster: add --port-forward."]


def connect(kubectl: Kubectl, job: Mapping[str, Any], *, show_secret: bool, say: Callable[[str], None]) -> int:
    """Show how programs within the cluster connect to a job."""
    found = connection_of(job)
    redis_url = read_secret(kubectl, found.secret) if found.secret and show_secret else found.redis_url
    for line in describe(job, found, redis_url):
        say(line)
    return 0


def forward(
    kubectl: Kubectl,
    job: Mapping[str, Any],
    *,
    target: str,
    port: int,
    show_secret: bool,
    say: Callable[[str], None],
) -> int:
    """Forward a port of this machine to the job's HTTP server or to its Redis until Ctrl-C.

    Args:
        kubectl: access to the cluster.
        job: the job.
        target: ``http``, ``redis``, or ``auto`` for the HTTP server if there is one.
        port: the port; 0 for a free one.
        show_secret: whether the password of Redis may be shown.
        say: shows a line to the user.
    """
    found = connection_of(job)
    if target == "http" and not found.server_url:
        raise PluginError("the job has no HTTP server (spec.server); forward its Redis: --port-forward=redis")
    is_http = target != "redis" and bool(found.server_url)
    if is_http:
        url = str(found.server_url)
    elif found.secret:
        url = read_secret(kubectl, found.secret)
    else:
        url = str(found.redis_url)
    namespace, service, remote = forward_target(url, job["metadata"]["namespace"])
    process = kubectl.start(
        "port-forward", f"--namespace={namespace}", service, f"{port or ''}:{remote}", "--address=127.0.0.1"
    )
    try:
        local = forwarded_url(url, _local_port(process))
        shown = local if show_secret or is_http else without_password(local)
        say(f"{shown} reaches {'the HTTP server' if is_http else 'Redis'} of {full_name(job)} until Ctrl-C.")
        if shown != local:
            say(f"Replace {HIDDEN} by the password, which --show-secret shows.")
        say("")
        say(http_snippet(job, shown, found.tokens_secret) if is_http else redis_snippet(job, shown))
        for _ in process.stdout or ():
            pass  # "Handling connection for …"
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        process.wait()


def _local_port(process: subprocess.Popen[str]) -> int:
    """Return the port that kubectl forwards."""
    for line in process.stdout or ():
        if match := _FORWARDING.match(line):
            return int(match[1])
    raise PluginError("kubectl cannot forward the port; see its message above")
