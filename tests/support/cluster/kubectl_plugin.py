"""``kubectl rollouts`` as a user runs it: kubectl finds the plugin's program on the PATH."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


class KubectlPlugin:
    """The plugin for one cluster and namespace."""

    def __init__(self, directory: Path, kubectl: Path, kubeconfig: Path, namespace: str) -> None:
        """Create the program in a directory that is on the PATH of kubectl.

        Args:
            directory: an empty directory.
            kubectl: the program.
            kubeconfig: how to access the cluster.
            namespace: the namespace of the jobs.
        """
        self._namespace = namespace
        (directory / "kubectl").symlink_to(kubectl)
        plugin = directory / "kubectl-rollouts"
        plugin.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rollout_api.kubectl_plugin "$@"\n')
        plugin.chmod(0o755)
        self._environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
        }
        self._kubectl = directory / "kubectl"

    def run(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command of the plugin; *answer* is what the user enters."""
        return subprocess.run(
            self._command(*arguments), env=self._environment, input=answer, capture_output=True, text=True
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of the plugin, whose output the caller reads."""
        return subprocess.Popen(
            self._command(*arguments), env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def _command(self, *arguments: str) -> list[str]:
        return [str(self._kubectl), "rollouts", *arguments, "--namespace", self._namespace]
