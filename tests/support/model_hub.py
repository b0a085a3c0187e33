"""A stand-in for the Hugging Face hub that serves one directory as a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def model_hub(model: str, directory: Path) -> Iterator[str]:
    """Serve the files of a directory as the only commit of the branch ``main``; yield the URL of the hub."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == f"/api/models/{model}/revision/main":
                self._answer_json({"_id": "0", "id": model, "sha": COMMIT, "siblings": []})
            elif path == f"/api/models/{model}/tree/{COMMIT}":
                self._answer_json(
                    [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _hash(file)}
                        for file in sorted(directory.iterdir())
                    ]
                )
            elif path.startswith(f"/{model}/resolve/{COMMIT}/"):
                self._answer_file(directory / path.rpartition("/")[2])
            else:
                self.send_error(404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer_json(self, content: object) -> None:
            self._answer(json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _answer_file(self, file: Path) -> None:
            self._answer(file.read_bytes(), {"ETag": f'"{_hash(file)}"', "X-Repo-Commit": COMMIT})

        def _answer(self, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _hash(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest()
