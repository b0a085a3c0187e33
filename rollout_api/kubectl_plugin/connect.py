"""``kubectl rollouts connect``: how a program reaches a job, within the cluster or through a forwarded port."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rollout_api.bundle.redaction import HIDDEN
from rollout_api.kubectl_plugin.kubectl import Kubectl, PluginError, full_name, summary
from rollout_api.redis_client.address import without_password

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
    """Return how to connect to a job.

    Raises:
        PluginError: if the operator has not published it yet.
    """
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
    """Return the value of a key of a Secret.

    Raises:
        PluginError: if the Secret or the key does not exist, or may not be read.
    """
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
        namespace: namespace of the job, in which names without a namespace are.

    Raises:
        PluginError: if the URL is not that of a Service.
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
    """Show how programs within the cluster connect to a job.

    Raises:
        PluginError: if the job has not published it, or the Secret cannot be read.
    """
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

    Raises:
        PluginError: if there is no such server, or the port cannot be forwarded.
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
    """Return the port that kubectl forwards.

    Raises:
        PluginError: if it forwards none. It has printed the reason.
    """
    for line in process.stdout or ():
        if match := _FORWARDING.match(line):
            return int(match[1])
    raise PluginError("kubectl cannot forward the port; see its message above")
