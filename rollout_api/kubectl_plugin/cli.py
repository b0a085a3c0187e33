"""The command line of ``kubectl rollouts``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rollout_api.kubectl_plugin.bundle import save_bundle
from rollout_api.kubectl_plugin.commands import (
    connect,
    drain,
    failure_lines,
    forward,
    run_in_head,
    save_report,
    show_logs,
)
from rollout_api.kubectl_plugin.kubectl import RESOURCE, Kubectl, PluginError, explanation, full_name, get_job, summary

_FAILED = 4
"""Exit code for a job that has no head, as of ``rollout status`` for one without a coordinator."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cluster = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    options = cluster.add_argument_group("options of kubectl")
    options.add_argument("-n", "--namespace", help="namespace of the job (default: that of the context)")
    options.add_argument("--context", help="context of the kubeconfig")
    options.add_argument("--kubeconfig", help="kubeconfig file")
    parser = argparse.ArgumentParser(
        "kubectl rollouts", description="Watch and operate RolloutJobs of das-rollout.", parents=[cluster]
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[Kubectl, argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[cluster])
        command.set_defaults(run=run)
        return command

    command = add("status", _status, "Show the state of a job and its engines, and what to do if something is wrong.")
    command.add_argument("job", nargs="?", help="name of the job (default: list all jobs)")
    command.add_argument("-A", "--all-namespaces", action="store_true", help="list the jobs of all namespaces")
    command.add_argument("--json", action="store_true", help="print the coordinator's status of the job as JSON")

    command = add("top", _top, "Show the engines and the running rollouts of a job, live.")
    command.add_argument("job", help="name of the job")

    command = add("logs", _logs, "Show the logs of all pods of a job, each line with its pod.")
    command.add_argument("job", help="name of the job")
    command.add_argument("-f", "--follow", action="store_true", help="continue with new lines until Ctrl-C")
    command.add_argument("--tail", type=int, default=-1, metavar="N", help="begin with the last N lines of each pod")
    pods = command.add_mutually_exclusive_group()
    pods.add_argument("--head", action="store_true", help="show the head alone")
    pods.add_argument("--worker", type=int, metavar="N", help="show one worker alone")
    pods.add_argument(
        "--previous",
        action="store_true",
        help="show why earlier pods have failed, and the ends of their logs: failed pods are deleted and replaced",
    )

    command = add(
        "drain", _drain, "Let a worker leave a job: its rollouts continue on other workers, and it is replaced."
    )
    command.add_argument("job", help="name of the job")
    workers = command.add_mutually_exclusive_group(required=True)
    workers.add_argument("worker", nargs="?", help="number or pod of the worker")
    workers.add_argument("--node", help="drain all workers of the job on this node, which is cordoned first")

    command = add("connect", _connect, "Show how a program connects to a job, or forward a port to it.")
    command.add_argument("job", help="name of the job")
    command.add_argument(
        "--port-forward",
        nargs="?",
        const="auto",
        choices=["auto", "http", "redis"],
        help="forward a port of this machine to the job's HTTP server, or to its Redis, until Ctrl-C",
    )
    command.add_argument("--port", type=int, default=0, help="port of this machine (default: a free one)")
    command.add_argument("--show-secret", action="store_true", help="show the password of Redis")

    command = add("report", _report, "Save the report of a job as an HTML page.")
    command.add_argument("job", help="name of the job")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file for the page")

    command = add(
        "bundle",
        _bundle,
        "Collect all that explains what has happened to a job in one archive, without passwords and tokens. It also "
        "finds what the operator has kept of a job that has failed.",
    )
    command.add_argument("job", help="name of the job")
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: bundle-JOB.tar.gz)")
    command.add_argument("--with-rollouts", action="store_true", help="include prompts and responses")

    command = add(
        "cancel", _cancel, "Delete a job, or cancel some of its requests. Finished rollouts stay in the history."
    )
    command.add_argument("job", help="name of the job")
    command.add_argument("request", nargs="*", help="ids of the requests to cancel (default: delete the job)")
    command.add_argument("-y", "--yes", action="store_true", help="do not ask for a confirmation")
    return parser


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the plugin and exit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a forwarded port is closed then, too
    options = build_parser().parse_args(arguments)
    given = {name: getattr(options, name, None) for name in ("namespace", "context", "kubeconfig")}
    try:
        sys.exit(options.run(Kubectl(**given), options))
    except PluginError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes the rest when it ends
        sys.exit(141)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _confirm(question: str) -> bool:
    _say(question)
    try:
        return input("Continue? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # nobody is there to answer
        return False


def _status(kubectl: Kubectl, options: argparse.Namespace) -> int:
    if options.job is None:
        return _list(kubectl, all_namespaces=options.all_namespaces)
    job = get_job(kubectl, options.job)
    if options.json:
        return run_in_head(kubectl, job, "status", "--json")
    _say(summary(job))
    try:
        return run_in_head(kubectl, job, "status")
    except PluginError as error:
        sys.stderr.write(f"{error}\n")
        return _FAILED


def _list(kubectl: Kubectl, *, all_namespaces: bool) -> int:
    scope = ["--all-namespaces"] if all_namespaces else []
    jobs: list[dict[str, Any]] = kubectl.get(RESOURCE, *scope)["items"]
    if not jobs:
        _say("There are no RolloutJobs" + ("." if all_namespaces else " in this namespace; -A shows all namespaces."))
        return 0
    code = kubectl.show("get", RESOURCE, *scope)
    for job in jobs:
        if why := explanation(job):
            _say(f"{full_name(job)}: {why}")
    return code


def _top(kubectl: Kubectl, options: argparse.Namespace) -> int:
    return run_in_head(kubectl, get_job(kubectl, options.job), "top", tty=True)


def _logs(kubectl: Kubectl, options: argparse.Namespace) -> int:
    job = get_job(kubectl, options.job)
    if options.previous:
        for line in failure_lines(job):
            _say(line)
        return 0
    return show_logs(kubectl, job, follow=options.follow, tail=options.tail, head=options.head, worker=options.worker)


def _drain(kubectl: Kubectl, options: argparse.Namespace) -> int:
    return drain(kubectl, get_job(kubectl, options.job), worker=options.worker, node=options.node, say=_say)


def _connect(kubectl: Kubectl, options: argparse.Namespace) -> int:
    job = get_job(kubectl, options.job)
    if options.port_forward is None:
        return connect(kubectl, job, show_secret=options.show_secret, say=_say)
    return forward(
        kubectl, job, target=options.port_forward, port=options.port, show_secret=options.show_secret, say=_say
    )


def _report(kubectl: Kubectl, options: argparse.Namespace) -> int:
    code = save_report(kubectl, get_job(kubectl, options.job), options.output)
    if not code:
        _say(f"The report is in {options.output}.")
    return code


def _bundle(kubectl: Kubectl, options: argparse.Namespace) -> int:
    target: Path = options.output or Path(f"bundle-{options.job}.tar.gz")
    save_bundle(kubectl, options.job, target, with_rollouts=options.with_rollouts, say=_say)
    _say(f"The bundle is in {target}. Its README.md says what it contains.")
    return 0


def _cancel(kubectl: Kubectl, options: argparse.Namespace) -> int:
    job = get_job(kubectl, options.job)
    if options.request:
        question = f"The requests {', '.join(options.request)} of job {full_name(job)} are cancelled."
        if not options.yes and not _confirm(question):
            return 130
        return run_in_head(kubectl, job, "cancel", *options.request, "--yes")
    question = (
        f"Job {full_name(job)} is deleted with its pods. Rollouts that have not finished are lost; finished ones stay "
        "in its history, and its clients are told that it was deleted. To interrupt it instead, set "
        "spec.lifecycle.suspend to true."
    )
    if not options.yes and not _confirm(question):
        return 130
    return kubectl.show("delete", RESOURCE, job["metadata"]["name"])
