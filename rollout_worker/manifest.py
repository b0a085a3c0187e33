"""Reads RolloutJob manifests from YAML files."""

from __future__ import annotations

from pathlib import Path

import yaml

from rollout_api.manifest.rollout_job import KIND, FieldError, ManifestError, RolloutJob, parse_job


def read_manifest(path: Path) -> RolloutJob:
    """The job in a YAML file.

    Raises:
        ManifestError: if the file cannot be read, is no YAML, or does not hold one valid RolloutJob. What else is in a
            file of several documents is for kubectl.
    """
    try:
        documents = list(yaml.load_all(path.read_text(), Loader=_UniqueKeyLoader))
    except OSError as error:
        raise ManifestError([FieldError(str(path), error.strerror or str(error))]) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # PyYAML lets both through, for dates and odd keys
        raise ManifestError([FieldError(str(path), f"no YAML: {error}")]) from None
    jobs = documents
    if len(documents) > 1:
        jobs = [one for one in documents if isinstance(one, dict) and one.get("kind") == KIND]
    if len(jobs) != 1:
        about = f"holds {len(documents)} documents, of which {len(jobs)} are RolloutJobs; one is expected"
        raise ManifestError([FieldError(str(path), about)])
    return parse_job(jobs[0])


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which plain YAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
