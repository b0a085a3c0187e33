"""The page of a report in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_tools.report.page import render_page
from rollout_tools.report.recording import JobRecording
from tests.support.browser import Browser, chromium, drawn_marks, num_colors
from tests.support.recordings import START, ended, recording, small_job

HOSTILE = "</script><img src=x onerror=\"document.title='hacked'\">{{7*7}}<b>%{y}"
PLOTS = [
    "makespans",
    "running",
    "gantt",
    "accepted-by-step",
    "accepted-by-source",
    "acceptance-by-position",
    "drafts-by-class",
    "lengths-by-step",
    "calibration",
    "lengths-of-problem",
    "rewards",
    "staleness",
    "engine-time",
    "saved",
    "trials",
    "cost-model",
]


@pytest.fixture(scope="module")
def running_browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(running_browser: Browser) -> Browser:
    running_browser.messages.clear()
    running_browser.requests.clear()
    return running_browser


def written(directory: Path, job: JobRecording) -> Path:
    file = directory / "page.html"
    file.write_text(render_page(job))
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_plot_is_drawn_without_errors_and_without_a_network(
    browser: Browser, tmp_path: Path, width: int, scheme: Any
) -> None:
    file = written(tmp_path, small_job())
    page = browser.open(file, width=width, scheme=scheme)
    marks = drawn_marks(page)
    assert PLOTS == list(marks)
    assert [] == [name for name, count in marks.items() if not count]
    assert num_colors(page.screenshot()) > 30
    assert width == page.evaluate("document.documentElement.scrollWidth")  # nothing is cut off at the side
    assert [] == browser.messages
    assert [file.as_uri()] == [url for url in browser.requests if not url.startswith(("data:", "blob:"))]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert {"light": "rgb(246, 247, 249)", "dark": "rgb(17, 21, 27)"}[scheme] == background
    page.click("#theme")
    assert background != page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.close()


def test_length_classes_are_shown_if_the_policy_determines_them() -> None:
    job = small_job()
    assert "drafts-by-class" in render_page(job)
    for classes in ([], [one._replace(steps=0) for one in job.classes]):  # nothing was decoded
        assert "drafts-by-class" not in render_page(replace(job, classes=classes))


def test_a_hostile_text_is_only_shown(browser: Browser, tmp_path: Path) -> None:
    job = small_job(HOSTILE, HOSTILE)
    job = replace(job, name=HOSTILE, model=HOSTILE, ended=[replace(one, engine=f"{HOSTILE}-1") for one in job.ended])
    page = browser.open(written(tmp_path, job))
    assert f"{HOSTILE} – rollout report" == page.title()
    assert HOSTILE == page.inner_text("h1")
    assert 0 == page.locator("img").count()
    assert HOSTILE in page.inner_text("#columns")
    assert HOSTILE in page.text_content("#prompt pre")
    assert HOSTILE[:12] in page.inner_text("#problem")
    assert HOSTILE in page.locator("select[data-plot=lengths-of-problem] option").all_inner_texts()
    assert HOSTILE in page.locator("#plot-gantt .ytick").first.text_content()
    assert [] == browser.messages
    page.close()


def test_another_step_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(written(tmp_path, small_job()))
    select = "select[data-plot=running]"
    assert ["1", "2", "3", "whole job"] == page.locator(f"{select} option").all_inner_texts()
    assert "2" == page.input_value(select)  # the index of the last step
    page.select_option(select, label="whole job")
    page.wait_for_function("document.getElementById('plot-running').textContent.includes('waiting')")
    assert drawn_marks(page)["running"] >= 4
    page.close()


def test_rollouts_are_shown_with_their_sources_and_compared(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(written(tmp_path, small_job(text="five")))
    titles = page.locator("#columns h4").all_inner_texts()
    assert ["weight version 1", "weight version 2", "weight version 3"] == titles
    first = page.locator("#columns .rollout").first
    assert "2+2 =five (1.0)\n" == first.locator("pre").text_content()
    spans = first.locator("pre span")
    marked = [(span.text_content(), span.get_attribute("class")) for span in spans.all()]
    assert [("+2", "source-1"), (" =", "source-2"), (" (1.0)", "source-3"), ("\n", "source-4")] == marked
    assert "accepted draft token, from: history" == spans.first.get_attribute("title")
    first.locator("button").first.click()
    different = page.locator("#comparison .different").all_inner_texts()
    assert ["(1.0)", "(3.1)"] == [text.strip() for text in different]
    assert "weight version 1" in page.inner_text("#comparison")
    assert "Older rollouts that are not in the report: 5." == page.inner_text("#omitted")
    page.uncheck("#show-sources")
    assert "rgba(0, 0, 0, 0)" == spans.first.evaluate("(span) => getComputedStyle(span).backgroundColor")
    page.close()


def test_a_shortest_difference_is_found(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(written(tmp_path, small_job()))
    for before, after, num_lost, num_added in (
        ("abcabba", "cbabac", 3, 2),
        ("same", "same", 0, 0),
        ("", "new", 0, 3),
        ("xaby", "xcdy", 2, 2),
    ):
        lost, added = page.evaluate("([a, b]) => tokenDiff([...a], [...b])", [before, after])
        assert (num_lost, num_added) == (sum(lost), sum(added))
        kept = [token for token, is_lost in zip(before, lost, strict=True) if not is_lost]
        assert kept == [token for token, is_added in zip(after, added, strict=True) if not is_added]
    page.close()


def test_a_job_of_one_rollout_without_measurements_has_a_page(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(written(tmp_path, recording([ended()])))
    marks = drawn_marks(page)
    assert ["makespans", "running", "gantt", "accepted-by-step", "accepted-by-source", "lengths-by-step"] == list(marks)
    assert all(marks.values())
    assert [] == browser.messages
    page.close()


def test_a_large_step_is_drawn_with_its_longest_rollouts(browser: Browser, tmp_path: Path) -> None:
    rollouts = [
        ended(sample=sample, started_at=START + sample % 50, finished_at=START + sample % 50 + 1 + sample / 3000)
        for sample in range(3000)
    ]
    page = browser.open(written(tmp_path, recording(rollouts)))
    assert 2000 == drawn_marks(page)["gantt"]
    assert "Of a step with more than 2,000 rollouts, those that ran the longest are drawn." in page.inner_text("main")
    page.close()
