"""Writes the software bill of materials of a distribution and what it requires, in CycloneDX's format."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.release.steps import CheckError, run


def write_sbom(tools: Path, python: Path, project: Path, output: Path) -> None:
    """Describe the distribution of *project* and everything that is installed with it.

    Args:
        tools: Python of an environment with ``cyclonedx-bom``, which validates the result.
        python: Python of an environment that has the distribution and what it requires, and nothing else.
        project: pyproject.toml of the distribution.
        output: the file that is written.

    Raises:
        CheckError: if the result is not valid, or describes something else.
    """
    options = ("--pyproject", project, "--mc-type", "library", "--output-reproducible", "--output-format", "JSON")
    run(tools.with_name("cyclonedx-py"), "environment", *options, "--output-file", output, python)
    sbom = json.loads(output.read_text())
    for component in sbom["components"]:
        # Where on this machine the project's own wheels were installed from says nothing to readers.
        references = component.pop("externalReferences", [])
        if public := [reference for reference in references if not reference["url"].startswith("file:")]:
            component["externalReferences"] = public
    output.write_text(json.dumps(sbom, indent=2, sort_keys=True) + "\n")
    name = sbom["metadata"]["component"]["name"]
    components = {component["name"].lower().replace("_", "-") for component in sbom["components"]}
    if not name.startswith("das-rollout") or "redis" not in components:
        raise CheckError(f"{output.name} describes {name} with {len(components)} components, without the Redis client")
