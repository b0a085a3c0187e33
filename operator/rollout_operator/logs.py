"""Log lines as JSON objects, one per line, for log collectors."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Formats a record with time, severity, logger and message, and with the job and the traceback if it has them."""

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


def configure(*, as_json: bool, level: str) -> None:
    """Make all loggers write to standard error."""
    handler = logging.StreamHandler()
    text_formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text_formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf logs every watch event twice at INFO.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    # kopf warns that it does not handle signals in its thread; the main thread handles them.
    logging.getLogger("kopf._core.reactor.running").addFilter(lambda record: "signals are ignored" not in record.msg)
