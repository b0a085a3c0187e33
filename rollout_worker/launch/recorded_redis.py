"""Records in the state directory of a local job where its Redis is, so that other commands find it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout_worker.launch.errors import StateError

RECORD_FILE = "redis-server.json"


@dataclass(frozen=True)
class RecordedRedis:
    """The Redis server of a job."""

    url: str
    embedded: bool
    """Whether ``rollout run`` has started the server, which then ends with it."""


def record_redis(directory: Path, server: RecordedRedis) -> None:
    """Write the server of the job in *directory* to a file that only its owner can read, because of the password."""
    temporary = directory / f"{RECORD_FILE}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(asdict(server)))
    temporary.replace(directory / RECORD_FILE)


def read_recorded_redis(directory: Path) -> RecordedRedis | None:
    """Return the last server of the job in *directory*; None if the job has not run there.

    Raises:
        StateError: if the file cannot be read.
    """
    path = directory / RECORD_FILE
    try:
        return RecordedRedis(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        raise StateError(f"cannot read {path}; run the job again, which writes the file anew") from None
