"""Validation of manifests, its error messages, and the reference page."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_api import ManifestError, parse_job
from rollout_api.manifest.field_types import field_path, parse_quantity
from rollout_api.manifest.spec import Source
from rollout_tools.cli.job_address import check_manifest, read_manifest
from scripts import crd, manifest_docs

ROOT = Path(__file__).parents[2]

SHORTEST: dict[str, Any] = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "math"},
    "spec": {
        "model": {"uri": "Qwen/Qwen3-8B"},
        "source": {"dataset": {"tasks": [{"name": "sums", "generator": "chain_sum"}]}},
    },
}


def manifest_with(path: str, value: object) -> dict[str, Any]:
    """Return the shortest manifest with one field set."""
    manifest = copy.deepcopy(SHORTEST)
    section: Any = manifest
    *parents, last = path.split(".")
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    return manifest


def errors_of(manifest: object) -> dict[str, str]:
    with pytest.raises(ManifestError) as caught:
        parse_job(manifest)
    return {error.path: error.message for error in caught.value.errors}


def test_the_shortest_manifest_has_defaults_for_everything_else() -> None:
    job = parse_job(SHORTEST)
    assert (job.metadata.namespace, job.history_name) == ("default", "math")
    assert (job.spec.speculation.policy, job.spec.speculation.max_draft_tokens) == ("marginal", 16)
    assert (job.spec.source.dataset.epochs, job.spec.sampling.n) == (1, 8)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(example: Path) -> None:
    assert read_manifest(example).kind == "RolloutJob"


@pytest.mark.parametrize(
    ("path", "value", "error_path", "message"),
    [
        ("apiVersion", "das.rollout.dev/v2", "apiVersion", "v1beta1"),
        ("kind", "Job", "kind", "RolloutJob"),
        ("metadata.name", "Not_A_Label", "metadata.name", "pattern"),
        ("spec.modle", {}, "spec.modle", "unknown field; did you mean model?"),
        ("spec.sampling.topP", float("nan"), "spec.sampling.topP", "finite"),
        ("spec.sampling.temprature", 1, "spec.sampling.temprature", "did you mean temperature?"),
        ("spec.workers.gpusPerWorkers", 1, "spec.workers.gpusPerWorkers", "did you mean gpusPerWorker?"),
        ("spec.sampling.minTokens", 5000, "spec.sampling.minTokens", "more than maxTokens"),
        ("spec.sampling.maxTokens", 4096, "spec.sampling.maxTokens", "no room for a prompt"),
        ("spec.sampling.minP", 0.1, "spec.sampling.minP", "speculation.policy: off"),
        ("spec.sampling.logitBias", {"3": 1.0}, "spec.sampling.logitBias", "speculation.policy: off"),
        ("spec.engine.kvCacheMemory", "4Zi", "spec.engine.kvCacheMemory", "16Gi"),
        ("spec.engine.kvCacheMemory", "0", "spec.engine.kvCacheMemory", "more than 0"),
        ("spec.speculation.policy", "das", "spec.speculation.policy", "'das-classes', 'das-optimal'"),
        ("spec.speculation.minSurvival", 1.5, "spec.speculation.minSurvival", "less than or equal to 1"),
        ("spec.speculation.minSurvival", float("nan"), "spec.speculation.minSurvival", "finite"),
        ("spec.speculation.indexBytes", "500m", "spec.speculation.indexBytes", "at least 1Mi"),
        ("spec.redis.url", "http://redis", "spec.redis.url", "redis://"),
        ("metadata.name", "1st", "metadata.name", "pattern"),
        ("metadata.name", "a" * 46, "metadata.name", "at most 45"),
        ("spec.workers.minReplicas", 2, "spec.workers.minReplicas", "more than replicas"),
        ("spec.workers", {"replicas": 3, "maxReplicas": 2}, "spec.workers.maxReplicas", "less than replicas"),
        ("spec.runtimeRef", {"name": "a", "kind": "Runtime"}, "spec.runtimeRef.kind", "'RolloutRuntime'"),
        (
            "spec.workers",
            {"gpuResource": "amd.com/gpu", "deviceClaimTemplate": "gpus"},
            "spec.workers.deviceClaimTemplate",
            "remove gpuResource or deviceClaimTemplate",
        ),
        (
            "spec.workers",
            {"gpuResource": "amd.com/gpu", "resources": {"extended": {"amd.com/gpu": 1}}},
            "spec.workers.resources",
            "gpusPerWorker already requests the GPUs",
        ),
        ("spec.head.resources", {"extended": {"rdma/hca": 1}}, "spec.head.resources.extended", "unknown field"),
        (
            "spec.redis",
            {"url": "redis://a", "urlFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
            "spec.redis",
            "either",
        ),
        (
            "spec.lifecycle.failurePolicy",
            {"rules": [{"action": "Ignore"}]},
            "spec.lifecycle.failurePolicy.rules[0]",
            "either",
        ),
        ("spec.redis.url", "redis://:secret@redis", "spec.redis.url", "ROLLOUT_REDIS_URL"),
        ("spec.redis.url", "redis://redis/0?password=secret", "spec.redis.url", "ROLLOUT_REDIS_URL"),
        ("spec.redis.url", "redis+sentinel://a/m?sentinel_password=b", "spec.redis.url", "ROLLOUT_REDIS_URL"),
        ("spec.redis.url", "redis+cluster://a,b", "spec.redis.url", "rediss+sentinel://"),
        ("spec.history.redis.url", "http://redis", "spec.history.redis.url", "rediss+cluster://"),
        ("spec.history.redis.url", "redis+cluster://:b@a", "spec.history.redis.url", "ROLLOUT_HISTORY_REDIS_URL"),
        (
            "spec.history.redis",
            {"url": "redis://a", "urlFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
            "spec.history.redis",
            "either",
        ),
        ("spec.history.maxBytes", "1Ki", "spec.history.maxBytes", "at least 1Mi"),
        ("spec.engine.enableExpertParallel", True, "spec.engine.enableExpertParallel", "at least 2"),
        (
            "spec.engine",
            {"gpuMemoryUtilizationPercentage": 80, "kvCacheMemory": "8Gi"},
            "spec.engine.gpuMemoryUtilizationPercentage",
            "remove one",
        ),
        ("spec.engine.extraArgs", {"dtype": "half"}, "spec.engine.extraArgs", "dtype: set spec.engine.dtype instead"),
        ("spec.engine.extraArgs", {"seed": 1}, "spec.engine.extraArgs", "spec.sampling.seed"),
        ("spec.engine.extraArgs", {"data_parallel_size": 2}, "spec.engine.extraArgs", "runs several engines"),
        ("spec.engine.extraArgs", {"worker_cls": "a.B"}, "spec.engine.extraArgs", "das-rollout sets it"),
        ("spec.engine.extraArgs", {"max-num-batched-tokens": 1}, "spec.engine.extraArgs", ", max_num_batched_tokens"),
        ("spec.engine.extraArgs", {"maxNumBatchedTokens": 1}, "spec.engine.extraArgs", ", max_num_batched_tokens"),
        ("spec.engine.extraArgs", {"additional_config": {"a": "b" * 20_000}}, "spec.engine.extraArgs", "bytes as JSON"),
        ("spec.engine.tensorParallelSize", 4, "spec.workers.gpusPerWorker", "not a multiple of the 4 GPUs"),
        ("spec.model.cache", {"prefetch": True}, "spec.model.cache.prefetch", "set persistentVolumeClaim"),
        ("spec.weights.allowedRoots", ["models"], "spec.weights.allowedRoots", "absolute"),
        ("spec.source.dataset.checkpoints", ["a", "b"], "spec.source.dataset.checkpoints", "2 checkpoints for 1"),
        ("spec.source.dataset", {}, "spec.source.dataset", "name either tasks or environment"),
        (
            "spec.source.dataset.environment",
            {"entryPoint": "a:b"},
            "spec.source.dataset",
            "name either tasks or environment",
        ),
        (
            "spec",
            {
                "model": {"uri": "a"},
                "source": {"dataset": {"environment": {"verifiers": "a", "memoryLimit": "4Gi"}}},
                "head": {"resources": {"memory": "4096Mi"}},
            },
            "spec.source.dataset.environment.memoryLimit",
            "does not fit into head.resources.memory, 4096Mi",
        ),
        ("spec.source.dataset", {"environment": {}}, "spec.source.dataset.environment", "verifiers or entryPoint"),
        (
            "spec.source.dataset",
            {"environment": {"entryPoint": "a:b", "verifiers": "c"}},
            "spec.source.dataset.environment",
            "name either verifiers or entryPoint",
        ),
        (
            "spec.source.dataset",
            {"environment": {"verifiers": "a", "memoryLimit": "500k"}},
            "spec.source.dataset.environment.memoryLimit",
            "at least 1Mi",
        ),
        (
            "spec.source.dataset",
            {"environment": {"verifiers": "a", "args": {"text": "x" * 16_384}}},
            "spec.source.dataset.environment.args",
            "more than 16384",
        ),
        (
            "spec.source.dataset",
            {"environment": {"verifiers": "a"}, "seed": 3},
            "spec.source.dataset.seed",
            "pass it to an environment in environment.args",
        ),
        ("spec.source", {}, "spec.source", "name either dataset or trainer"),
    ],
)
def test_an_error_has_the_path_of_its_field(path: str, value: object, error_path: str, message: str) -> None:
    errors = errors_of(manifest_with(path, value))
    assert [error_path] == list(errors)
    assert message in errors[error_path]


def test_all_extra_args_that_cannot_be_set_are_named() -> None:
    args = {"speculative_config": {}, "max_num_batched_tokens": 8192, "load_format": "dummy", "block_size": 32}
    message = errors_of(manifest_with("spec.engine.extraArgs", args))["spec.engine.extraArgs"]
    assert message.startswith("speculative_config: set spec.speculation instead; load_format: cannot be set, because ")
    assert "max_num_batched_tokens" not in message
    assert "block_size" not in message


def test_extra_args_are_any_json_values() -> None:
    args = {"block_size": 32, "trust_remote_code": True, "hf_overrides": {"a": [1, 0.5, None, "b"]}}
    assert args == parse_job(manifest_with("spec.engine.extraArgs", args)).spec.engine.extra_args


def test_a_job_may_be_incomplete_without_its_runtime() -> None:
    manifest = manifest_with("spec.runtimeRef", {"name": "h100"})
    manifest["spec"] |= {"engine": {"tensorParallelSize": 8}}
    manifest["spec"]["model"]["cache"] = {"prefetch": True}
    job = parse_job(manifest)
    assert "ClusterRolloutRuntime" == job.spec.runtime_ref.kind
    with pytest.raises(ManifestError) as caught:
        job.without_runtime()
    assert ["spec.model.cache.prefetch", "spec.workers.gpusPerWorker"] == [one.path for one in caught.value.errors]


WRONG_VALUES: dict[str, list[object]] = {
    "integer": [True, "1", 1.5, 2**63],
    "number": [True, "0.5"],
    "boolean": [1, 0, 0.0, "true", "yes"],
    "string": [1, True, 1.5],
    "int-or-string": [True, 1.5, "1" * 33],
    "array": [{}, "a"],
    "object": [[], "a"],
}
"""Values that the API server refuses, by the type in the CRD's schema."""


def fields(schema: dict[str, Any], path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The path of every field in a schema of the CRD, with its type."""
    yield path, "int-or-string" if schema.get("x-kubernetes-int-or-string") else schema["type"]
    for name, field in schema.get("properties", {}).items():
        yield from fields(field, (*path, name))
    for name, field in (("1", schema.get("additionalProperties")), (0, schema.get("items"))):
        if field is not None:
            yield from fields(field, (*path, name))


def test_what_the_crd_refuses_for_its_type_is_an_error_that_names_the_field() -> None:
    schema = crd.document()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    accepted = []
    for path, kind in fields(schema, ("spec",)):
        for wrong in WRONG_VALUES[kind]:
            value = wrong
            for part in reversed(path[1:]):
                value = [value] if isinstance(part, int) else {part: value}
            if field_path(path) not in errors_of({**SHORTEST, "spec": value}):
                accepted.append((field_path(path), wrong))
    assert [] == accepted


@pytest.mark.parametrize(
    ("name", "value"), [("labels", {"a": 1}), ("labels", {"a b": "c"}), ("annotations", {"a": True})]
)
def test_metadata_that_the_api_server_refuses_is_an_error(name: str, value: object) -> None:
    (path,) = errors_of(manifest_with(f"metadata.{name}", value))
    assert path.startswith(f"metadata.{name}.")


def test_a_whole_number_may_have_a_decimal_point() -> None:
    """``kubectl`` sends 2.0 as 2."""
    spec = parse_job(manifest_with("spec.workers", {"replicas": 2.0, "resources": {"cpu": 4.0}})).spec
    assert (2, "4") == (spec.workers.replicas, spec.workers.resources.cpu)


def test_the_runtime_is_ignored_where_there_is_no_operator(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest_with("spec.runtimeRef", {"name": "h100"})))
    assert check_manifest(file).spec.runtime_ref is not None
    assert read_manifest(file).spec.runtime_ref is None


def test_a_cpu_worker_has_no_gpu_memory() -> None:
    manifest = manifest_with("spec.engine.gpuMemoryUtilizationPercentage", 80)
    manifest["spec"]["workers"] = {"gpusPerWorker": 0}
    errors = errors_of(manifest)
    assert ["spec.engine.gpuMemoryUtilizationPercentage"] == list(errors)
    assert "set engine.kvCacheMemory instead" in errors["spec.engine.gpuMemoryUtilizationPercentage"]


@pytest.mark.parametrize("url", ["redis+sentinel://a,b:1/main", "rediss+sentinel://a/main?ssl_ca_certs=/ca"])
def test_a_redis_may_be_behind_sentinels(url: str) -> None:
    assert url == parse_job(manifest_with("spec.redis.url", url)).spec.redis.url
    assert url == parse_job(manifest_with("spec.history.redis.url", url)).spec.history.redis.url


@pytest.mark.parametrize("url", ["redis+cluster://a,b", "rediss+cluster://a"])
def test_a_history_may_be_on_a_cluster(url: str) -> None:
    assert url == parse_job(manifest_with("spec.history.redis.url", url)).spec.history.redis.url


@pytest.mark.parametrize("field", ["spec.redis.url", "spec.history.redis.url"])
def test_an_error_does_not_repeat_a_password(field: str) -> None:
    with pytest.raises(ManifestError, match="must not contain credentials") as rejected:
        parse_job(manifest_with(field, "redis://user:secret@redis/0"))
    assert "secret@" not in str(rejected.value)
    assert "redis://user:***@redis/0" in str(rejected.value)


def test_all_errors_are_listed_including_those_across_sections() -> None:
    manifest = manifest_with("spec.sampling", {"topP": 0.5, "minP": 0.1, "logitBias": {"1": 2}})
    manifest["spec"] |= {
        "model": {},
        "engine": {"tensorParallelSize": 3},
        "workers": {"gpusPerWorker": 2},
        "typo": 1,
    }
    manifest["spec"]["source"]["dataset"]["tasks"] *= 2
    assert {
        "spec.model.uri",
        "spec.typo",
        "spec.source.dataset.tasks",
        "spec.sampling.minP",
        "spec.sampling.logitBias",
        "spec.workers.gpusPerWorker",
    } == set(errors_of(manifest))


def test_schemas_of_structured_outputs_become_texts() -> None:
    """A message can therefore contain them whatever their depth."""
    schema = {"type": "object", "properties": {"a": {"enum": ["é"]}}}
    for given in (schema, json.dumps(schema)):
        job = parse_job(manifest_with("spec.sampling.structuredOutputs", {"json": given}))
        assert job.spec.sampling.structured_outputs == {"json": json.dumps(schema)}


def test_min_p_is_accepted_without_speculation() -> None:
    manifest = manifest_with("spec.sampling.minP", 0.1)
    manifest["spec"]["speculation"] = {"policy": "off"}
    assert parse_job(manifest).spec.sampling.min_p == 0.1


@pytest.mark.parametrize("policy", ["marginal", "das-classes", "das-optimal", "fixed", "off"])
def test_a_policy_needs_no_quotes(tmp_path: Path, policy: str) -> None:
    """``off`` is false in YAML 1.1."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(SHORTEST).replace("\nspec:\n", f"\nspec:\n  speculation: {{policy: {policy}}}\n"))
    assert policy == read_manifest(file).spec.speculation.policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML: line 1, column 5: expected the node content"),
        ("", "documents"),
        ("a: 1\n---\nb: 2", "2 documents"),
        ("- 1", "must be a mapping"),
        ("a: 1\na: 2", "line 2, column 1: duplicate key"),
        ("a: 2024-13-45", "not valid YAML"),
        ("name: {{ x }}", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ManifestError, match=message):
        read_manifest(file)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        read_manifest(tmp_path / "none.yaml")


def test_the_manifest_page_is_up_to_date_and_lists_every_source() -> None:
    page = (ROOT / "docs" / "manifest.md").read_text()
    assert manifest_docs.document() == page
    assert all(f"| `source.{name}" in page for name in Source.model_fields)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", "1"), ("500m", "0.5"), ("1.5", "1.5"), ("2k", "2000"), ("16Gi", str(16 * 2**30)), ("3T", "3e12")],
)
def test_quantity_is_parsed(text: str, value: str) -> None:
    assert Decimal(value) == parse_quantity(text)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1e3", "1gi", "1KiB", "½"])
def test_text_that_is_not_a_quantity_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)
