"""Check everything about a release except for pushing it: ``python -m scripts.release [--strict] [--tag vX.Y.Z]``.

Distributions, SBOMs, release notes and the chart's package are written to dist/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import redis

from rollout_store.runtime.embedded_redis import EmbeddedRedis
from scripts.release.chart import check_chart, package_chart
from scripts.release.distributions import (
    CLIENT_PYTHONS,
    PACKAGE_PYTHONS,
    Distributions,
    build_pure,
    build_wheel,
    check_client,
    check_contents,
    check_package,
    create_environment,
    find_python,
    install,
    write_sbom,
)
from scripts.release.images import check_images
from scripts.release.steps import CheckError, NotCheckedError, Report, run
from scripts.release.versions import current_version, disagreements, image_files, release_notes
from scripts.repository import ROOT, tracked_files

DIST = ROOT / "dist"
TESTED = ROOT / "requirements" / "cpu.txt"
"""The versions of other distributions that the tests run with."""


class ReleaseCheck:
    """The steps of the check.

    Args:
        directory: for temporary files.
        redis_url: URL of a Redis server whose data may be deleted.
        tag: the tag of the release; an empty string before the release is tagged.
        registry: registry and path of the images that the chart names; an empty string for the names in values.yaml.
    """

    def __init__(self, directory: Path, redis_url: str, *, tag: str, registry: str) -> None:
        self.report = Report()
        self._directory, self._redis_url, self._tag, self._registry = directory, redis_url, tag, registry
        self._version = current_version()
        self._tools = directory / "tools" / "bin" / "python"

    def run(self) -> None:
        """Run all steps."""
        step = self.report.step
        step("the version is the same everywhere", self._check_versions)
        if step("install the tools of requirements/release.txt", self._install_tools):
            step("workflows fit GitHub's schema", self._check_workflows)
            step("release notes", self._write_notes)
            step("documentation of this version, as the last commit has it", self._check_documentation)
            distributions = step("build the source distributions and the client's wheel", self._build_pure)
            if distributions is not None:
                self._check_distributions(distributions)
        package = step("lint and package the chart", lambda: package_chart(DIST, self._registry))
        if package is not None:
            step("the packaged chart renders valid manifests", lambda: check_chart(package, self._registry))
        check_images(self.report)

    def _check_distributions(self, distributions: Distributions) -> None:
        step = self.report.step
        for version in PACKAGE_PYTHONS:
            name = f"build the package's wheel for Python {version}"
            wheel = step(name, partial(self._build_wheel, distributions, version))
            if wheel is not None:
                distributions.wheels[version] = wheel
        step("metadata and contents of all distributions", lambda: check_contents(self._tools, distributions))
        for version in CLIENT_PYTHONS:
            name = f"client on Python {version}: a session with a job"
            step(name, partial(self._check_client, distributions, version))
        for version in distributions.wheels:
            name = f"package on Python {version}: its commands and the native extension"
            step(name, partial(self._check_package, distributions, version))

    def _check_versions(self) -> None:
        problems = disagreements(ROOT, image_files())
        if self._tag and self._tag != f"v{self._version}":
            problems.append(f"The tag is {self._tag}, but the version is {self._version}.")
        if problems:
            raise CheckError("\n".join(problems))

    def _install_tools(self) -> bool:
        python = create_environment(sys.executable, self._directory / "tools")
        install(python, "-r", ROOT / "requirements" / "release.txt")
        return True

    def _check_workflows(self) -> None:
        files = [ROOT / name for name in tracked_files(".github/workflows/*.yml")]
        run(self._tools.with_name("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *files)

    def _write_notes(self) -> None:
        notes = release_notes((ROOT / "CHANGELOG.md").read_text(), self._version, tagged=bool(self._tag))
        DIST.mkdir(exist_ok=True)
        (DIST / "release-notes.md").write_text(notes)

    def _check_documentation(self) -> None:
        """Let mike add the documentation of the last commit to the branch ``gh-pages`` of a clone."""
        clone, mike = self._directory / "documentation", self._tools.with_name("mike")
        run("git", "clone", "-q", "--no-tags", ROOT, clone)
        for name, value in (("user.name", "release-check"), ("user.email", "release-check@localhost")):
            run("git", "config", name, value, cwd=clone)
        # PATCH changes nothing that users have to know.
        documented = self._version.rpartition(".")[0]
        run(mike, "deploy", "--update-aliases", documented, "latest", cwd=clone, programs=mike.parent)
        run(mike, "set-default", "latest", cwd=clone)
        listed = json.loads(run("git", "show", "gh-pages:versions.json", cwd=clone))
        published = run("git", "ls-tree", "-r", "--name-only", "gh-pages", cwd=clone).split()
        if [{"version": documented, "title": documented, "aliases": ["latest"]}] != listed:
            raise CheckError(f"versions.json of the branch gh-pages is {listed}")
        if f"{documented}/index.html" not in published:
            raise CheckError(f"the branch gh-pages lacks {documented}/index.html")

    def _build_pure(self) -> Distributions:
        return build_pure(self._tools, DIST)

    def _build_wheel(self, distributions: Distributions, version: str) -> Path:
        return build_wheel(_python(version), distributions.source, self._directory / f"wheel-{version}")

    def _check_client(self, distributions: Distributions, version: str) -> None:
        directory = self._directory / f"client-{version}"
        python = create_environment(_python(version), directory / "environment")
        install(python, "-c", TESTED, distributions.client)
        redis.Redis.from_url(self._redis_url).flushall()
        (directory / "session").mkdir()
        check_client(python, self._redis_url, directory / "session")
        self._write_sbom("das-rollout-api", python, ROOT / "rollout_api" / "pyproject.toml")

    def _check_package(self, distributions: Distributions, version: str) -> None:
        directory = self._directory / f"package-{version}"
        python = create_environment(_python(version), directory / "environment")
        install(python, "-c", TESTED, distributions.client, f"{distributions.wheels[version]}[worker]")
        (directory / "session").mkdir()
        check_package(python, directory / "session")
        self._write_sbom("das-rollout", python, ROOT / "pyproject.toml")

    def _write_sbom(self, name: str, python: Path, project: Path) -> None:
        """Describe an environment; the file of the newest version of Python remains."""
        write_sbom(self._tools, python, project, DIST / f"{name}.cdx.json")


def _python(version: str) -> str:
    python = find_python(version)
    if python is None:
        raise NotCheckedError(f"Python {version} is not installed")
    return python


def main() -> int:
    """Run the check and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strict", action="store_true", help="fail if something cannot be checked on this machine")
    parser.add_argument(
        "--tag", default="", help="the release's tag, which must fit the version; none before it exists"
    )
    parser.add_argument("--registry", default="", help="registry and path of the images that the chart names")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-check-") as temporary:
        directory = Path(temporary)
        (directory / "redis").mkdir()
        lock = os.open(directory / "redis" / "lock", os.O_CREAT | os.O_RDWR)
        server = EmbeddedRedis(directory / "redis", keep_open=lock)
        try:
            check = ReleaseCheck(directory, server.start(), tag=arguments.tag, registry=arguments.registry)
            check.run()
        finally:
            server.stop()
            os.close(lock)
    return check.report.finish(strict=arguments.strict)


if __name__ == "__main__":
    sys.exit(main())
