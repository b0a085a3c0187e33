"""Reads RolloutJob manifests from YAML files."""

from __future__ import annotations

from pathlib import Path

import yaml

from rollout_api.manifest.rollout_job import KIND, FieldError, ManifestError, RolloutJob, parse_job


def read_manifest(path: Path) -> RolloutJob:
    """Read the job in a YAML file, and ignore its runtime, which only the operator can read.

    Other documents in the file are ignored.

    Raises:
        ManifestError: as :func:`check_manifest`, and if the job is not valid without the settings of its runtime.
    """
    return check_manifest(path).without_runtime()


def check_manifest(path: Path) -> RolloutJob:
    """Return the job in a YAML file as it is written.

    Raises:
        ManifestError: if the file cannot be read, is not YAML, or does not contain exactly one valid RolloutJob.
    """
    try:
        documents = list(yaml.load_all(path.read_text(), Loader=_UniqueKeyLoader))
    except OSError as error:
        raise ManifestError([FieldError(str(path), error.strerror or str(error))]) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        # PyYAML raises ValueError and TypeError for invalid dates and unhashable keys.
        raise ManifestError([FieldError(str(path), f"not valid YAML: {_describe(error)}")]) from None
    jobs = documents
    if len(documents) > 1:
        jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    if len(jobs) != 1:
        message = f"expected one RolloutJob, found {len(jobs)} in {len(documents)} documents"
        raise ManifestError([FieldError(str(path), message)])
    return parse_job(jobs[0])


def _describe(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Rejects duplicate keys, of which plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
