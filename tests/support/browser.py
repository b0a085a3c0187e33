"""A headless Chromium that opens the pages which the project writes."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Browser:
    """Opens pages, and keeps what they write to the console or fail with, and what they request over a network."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.messages: list[str] = []
        self.requests: list[str] = []

    def open(self, file: Path, *, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Any:
        """Return the page (of Playwright) once all its plots are drawn."""
        page = self._browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn]")
        return page


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium, and skip the test where it is not installed."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        try:
            yield Browser(browser)
        finally:
            browser.close()


def drawn_marks(page: Any) -> dict[str, int]:
    """Return the number of drawn bars, points and lines of each plot in a report, by the plot's name."""
    counts: dict[str, int] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".plot")].map((plot) => [
            plot.id.replace("plot-", ""),
            [...plot.querySelectorAll(".bars .point path, .scatterlayer .point, .scatterlayer path.js-line")]
                .filter((mark) => mark.getBBox().width || mark.getBBox().height).length,
        ]))"""
    )
    return counts


def num_colors(screenshot: bytes) -> int:
    """Return the number of different colors in a screenshot (PNG)."""
    colors = Image.open(io.BytesIO(screenshot)).convert("RGB").getcolors(maxcolors=2**24)
    return len(colors or [])
