"""Runs kubectl with the user's cluster and namespace."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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
