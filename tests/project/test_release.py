"""The version of a release is the same everywhere, and its notes are those of the changelog."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.release.steps import CheckError, NotCheckedError, Report
from scripts.release.versions import PLACES, current_version, disagreements, image_files, release_notes, set_version
from scripts.repository import ROOT

CHANGELOG = """# Changelog

## Unreleased

## 0.2.0 (2026-12-01)

### Added

- Two.

## 0.1.0

- One.
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of all files of the repository that state the version."""
    for name in {*image_files(), *(name for name, _ in PLACES)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_version_is_the_same_everywhere() -> None:
    assert [] == disagreements(ROOT, image_files())


def test_a_new_version_is_written_everywhere(copy: Path) -> None:
    images = image_files()
    set_version(copy, images, "7.8.9")
    assert "7.8.9" == current_version(copy)
    assert [] == disagreements(copy, images)
    assert "das-rollout-operator:7.8.9" in (copy / "charts/das-rollout/values.yaml").read_text()


@pytest.mark.parametrize("name", sorted({name for name, _ in PLACES} | {"charts/das-rollout/values.yaml", "README.md"}))
def test_another_version_in_one_file_is_found(copy: Path, name: str) -> None:
    file = copy / name
    file.write_text(file.read_text().replace(current_version(), "7.8.9"))
    assert disagreements(copy, image_files())


def test_a_version_that_helm_or_pip_would_not_accept_is_refused(copy: Path) -> None:
    with pytest.raises(ValueError, match=r"MAJOR\.MINOR\.PATCH"):
        set_version(copy, image_files(), "0.2.0rc1")


def test_the_notes_of_a_version_are_its_section_of_the_changelog() -> None:
    assert "### Added\n\n- Two.\n" == release_notes(CHANGELOG, "0.2.0", tagged=True)
    assert "- One.\n" == release_notes(CHANGELOG, "0.1.0", tagged=False)


@pytest.mark.parametrize(("version", "message"), [("0.3.0", "no section for 0.3.0"), ("0.1.0", "the date of 0.1.0")])
def test_a_tagged_version_needs_a_section_with_a_date(version: str, message: str) -> None:
    with pytest.raises(CheckError, match=message):
        release_notes(CHANGELOG, version, tagged=True)


def test_the_changelog_has_notes_of_this_version() -> None:
    assert release_notes((ROOT / "CHANGELOG.md").read_text(), current_version(), tagged=False)


def test_a_step_that_cannot_run_fails_a_strict_check_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def lacks_docker() -> None:
        raise NotCheckedError("needs Docker")

    report = Report()
    assert 5 == report.step("add", lambda: 2 + 3)
    report.step("image", lacks_docker)
    assert [0, 1] == [report.finish(strict=False), report.finish(strict=True)]
    assert "not checked: image: needs Docker\n" in capsys.readouterr().out


def test_a_failed_step_fails_the_check_and_the_next_ones_run(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise CheckError("README.md is missing")

    report = Report()
    assert report.step("contents", fails) is None
    assert 5 == report.step("add", lambda: 2 + 3)
    assert 1 == report.finish(strict=False)
    printed = capsys.readouterr()
    assert "failed: contents\n" in printed.out
    assert "README.md is missing\n" == printed.err
