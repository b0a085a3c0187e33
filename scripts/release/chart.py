"""Packages the Helm chart, and checks what the package renders: ``python -m scripts.release.chart [REGISTRY]``."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate

from scripts.release.steps import CheckError, run
from scripts.release.versions import current_version
from scripts.repository import ROOT
from tests.support.cluster.chart import CHART, HELM, VALUE_SETS, render_chart
from tests.support.cluster.schemas import RELEASES, check_schemas

_IMAGE = re.compile(r"(?<=: )(?=das-rollout-(?:operator|worker):)")
"""The place before the name of each of the project's images in values.yaml."""


def package_chart(directory: Path, registry: str = "") -> Path:
    """Package the chart and return the path of the package.

    Args:
        directory: where the package is written.
        registry: registry and path of the images that the package names, such as ``ghcr.io/owner``; without it, the
            names are those in values.yaml.
    """
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        chart = Path(shutil.copytree(CHART, Path(temporary) / CHART.name))
        if registry:
            values = chart / "values.yaml"
            values.write_text(_IMAGE.sub(f"{registry}/", values.read_text()))
        run(HELM, "lint", "--strict", chart)
        run(HELM, "package", chart, "--destination", directory)
    return directory / f"{CHART.name}-{current_version()}.tgz"


def _images(manifest: Any) -> Iterator[str]:
    """Yield the images that a manifest names in any of its containers or arguments."""
    if isinstance(manifest, dict):
        for value in manifest.values():
            yield from _images(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from _images(value)
    elif isinstance(manifest, str) and re.search(r"das-rollout-(operator|worker):\S+$", manifest):
        yield manifest.rpartition("=")[2]


def check_chart(package: Path, registry: str = "") -> None:
    """Check that what the package renders fits the schemas of Kubernetes, and names this version's images.

    Raises:
        CheckError: if it does not, or cannot be rendered.
    """
    for name, values in VALUE_SETS.items():
        try:
            manifests = render_chart("rl", chart=package, **values)
            for release in RELEASES:
                check_schemas(manifests, release)
        except (RuntimeError, kubernetes_validate.ValidationError) as error:
            raise CheckError(f"{package.name} with the values {name!r}: {error}") from error
        if not values:
            prefix = f"{registry}/" if registry else ""
            expected = {f"{prefix}das-rollout-{part}:{current_version()}" for part in ("operator", "worker")}
            if (named := set(_images(manifests))) != expected:
                raise CheckError(f"{package.name} names the images {sorted(named)} instead of {sorted(expected)}")


if __name__ == "__main__":
    print(package_chart(ROOT / "dist", *sys.argv[1:]))
