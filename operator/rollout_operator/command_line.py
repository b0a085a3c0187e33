"""Types of arguments that several commands of the operator's image have."""

from __future__ import annotations

import argparse


def namespaced_name(text: str) -> tuple[str, str]:
    """Return the namespace and the name in ``NAMESPACE/NAME``.

    Raises:
        argparse.ArgumentTypeError: if the argument does not have this form.
    """
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAMESPACE/NAME")
    return namespace, name


def refuse_both(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with an error if namespaces are given by name and by a selector."""
    if options.namespace and options.namespace_selector:
        parser.error("--namespace and --namespace-selector exclude each other; remove one of them")
