"""Arguments and logs of the commands of the operator's image."""

from __future__ import annotations

import argparse
import json
import logging
from datetime import UTC, datetime


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


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object, with the job and the traceback if it has them, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "severity": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (job := getattr(record, "job", None)) is not None:
            line["job"] = job
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logs(*, as_json: bool, level: str) -> None:
    """Make all loggers write to standard error."""
    handler = logging.StreamHandler()
    text_formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text_formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf logs every watch event twice at INFO.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    # kopf warns that it does not handle signals in its thread; the main thread handles them.
    logging.getLogger("kopf._core.reactor.running").addFilter(lambda record: "signals are ignored" not in record.msg)
