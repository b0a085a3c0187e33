"""Make the pictures of the documentation site with headless Chromium: ``python scripts/docs_screenshots.py``.

The site must have been built (``make docs``). It is served on a free port while the pictures are made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
IMAGES = ROOT / "docs" / "images"
PICTURES = {
    "site-home-light": ("", False),
    "site-home-dark": ("", True),
    "site-tutorial": ("tutorials/first-job/", False),
}
"""Name of a picture → the page, and whether the browser prefers dark colors."""
SIZE = "1280,900"
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", f"--window-size={SIZE}"),
)


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Log nothing."""


def take(browser: str, url: str, file: Path, *, dark: bool) -> None:
    """Write a picture of a page."""
    with tempfile.TemporaryDirectory() as profile:
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
        command = [browser, *OPTIONS, *scheme, f"--user-data-dir={profile}", f"--screenshot={file}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=120, env={**os.environ, "HOME": profile})


def main() -> None:
    """Write all pictures."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: there is no Chromium; install it (Debian: apt-get install chromium)")
    if not (SITE / "index.html").exists():
        sys.exit("error: there is no site; run make docs first")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, (page, dark) in PICTURES.items():
        take(browser, f"http://127.0.0.1:{server.server_port}/{page}", IMAGES / f"{name}.png", dark=dark)
    server.shutdown()


if __name__ == "__main__":
    main()
