"""Wrong manifests: refused by the API server, or answered by a condition and an Event, by the field's name; always as
``rollout check`` does.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollout_api import ManifestError, parse_job
from tests.support.cluster.jobs import Jobs

LONG = "a" * 46

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"source": None}, "spec.source"),
    ({"source": {"dataset": {"tasks": [{"name": "a", "generator": "chain_sum"}]}}}, "dataset or trainer"),
    ({"source": {"trainer": None, "dataset": {"tasks": []}}}, "spec.source.dataset.tasks"),
    ({"source": {"trainer": None, "dataset": {"tasks": [{"name": "A!", "generator": "x"}]}}}, "tasks[0].name"),
    (
        {"source": {"trainer": None, "dataset": {"tasks": [{"name": "a", "generator": "x"}] * 2}}},
        "spec.source.dataset.tasks",
    ),
    (
        {"source": {"trainer": None, "dataset": {"tasks": [{"name": "a", "generator": "x", "config": {"seed": 1}}]}}},
        "spec.source.dataset.tasks[0].config",
    ),
    (
        {
            "source": {
                "trainer": None,
                "dataset": {"tasks": [{"name": "a", "generator": "x"}], "epochs": 2, "checkpoints": ["a"]},
            }
        },
        "checkpoints",
    ),
    ({"model": {"uri": ""}}, "spec.model.uri"),
    ({"model": {"uri": 7}}, "spec.model.uri"),
    ({"model": {"tokenSecretRef": {"name": "hf"}}}, "spec.model.tokenSecretRef.key"),
    ({"engine": {"dtype": "int8"}}, "spec.engine.dtype"),
    ({"engine": {"maxModelLen": 8}}, "spec.engine.maxModelLen"),
    ({"engine": {"kvCacheMemory": "4Zi"}}, "spec.engine.kvCacheMemory"),
    ({"engine": {"kvCacheMemory": "0"}}, "spec.engine.kvCacheMemory"),
    ({"engine": {"tensorParallelSize": 2}}, "gpusPerWorker"),
    ({"engine": {"tensorParallelSize": 2}, "workers": {"gpusPerWorker": 3}}, "gpusPerWorker"),
    ({"engine": {"pipelineParallelSize": 2}, "workers": {"gpusPerWorker": 0}}, "pipelineParallelSize"),
    (
        {
            "engine": {"kvCacheMemory": "8Gi"},
            "workers": {"gpusPerWorker": 0, "accelerator": None, "resources": {"memory": "4Gi"}},
        },
        "kvCacheMemory",
    ),
    ({"sampling": {"topP": 1.5}}, "spec.sampling.topP"),
    ({"sampling": {"topP": 0}}, "spec.sampling.topP"),
    ({"sampling": {"temperature": -1}}, "spec.sampling.temperature"),
    ({"sampling": {"n": 0}}, "spec.sampling.n"),
    ({"sampling": {"minTokens": 5000}}, "minTokens"),
    ({"sampling": {"maxTokens": 4096}}, "maxTokens"),
    ({"sampling": {"minP": 0.1}}, "minP"),
    ({"sampling": {"logitBias": {"3": 1.0}}}, "logitBias"),
    ({"workers": {"replicas": 0}}, "spec.workers.replicas"),
    ({"workers": {"minReplicas": 3}}, "minReplicas"),
    ({"workers": {"maxReplicas": 1}}, "maxReplicas"),
    ({"workers": {"gpusPerWorker": -1}}, "spec.workers.gpusPerWorker"),
    ({"workers": {"accelerator": "tpu"}}, "spec.workers.accelerator"),
    ({"workers": {"tolerations": [{"operator": "Maybe"}]}}, "spec.workers.tolerations[0].operator"),
    ({"speculation": {"policy": "magic"}}, "spec.speculation.policy"),
    ({"speculation": {"maxDraftTokens": 65}}, "spec.speculation.maxDraftTokens"),
    ({"history": {"name": "UPPER"}}, "spec.history.name"),
    ({"history": {"maxBytes": "1000k"}}, "at least 1Mi"),
    ({"history": {"maxBytes": "64GB"}}, "spec.history.maxBytes"),
    ({"history": {"redis": {"url": "http://redis"}}}, "spec.history.redis.url"),
    ({"history": {"redis": {"url": "redis+cluster://:secret@redis"}}}, "spec.history.redis.url"),
    (
        {"history": {"redis": {"url": "redis+sentinel://redis/mymaster?sentinel_password=secret"}}},
        "spec.history.redis.url",
    ),
    (
        {"history": {"redis": {"url": "redis://a", "urlFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}}},
        "url or urlFrom",
    ),
    (
        {"history": {"redis": {"urlFrom": {"secretKeyRef": {"name": "a"}}}}},
        "spec.history.redis.urlFrom.secretKeyRef.key",
    ),
    ({"redis": {"url": "redis+cluster://redis"}}, "spec.redis.url"),
    ({"redis": {"url": "http://redis"}}, "spec.redis.url"),
    ({"redis": {"url": "redis://:secret@redis"}}, "spec.redis.url"),
    ({"redis": {"url": "redis://redis/0?password=secret"}}, "spec.redis.url"),
    ({"redis": {"url": "redis://a", "urlFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}}, "url or urlFrom"),
    ({"weights": {"allowedRoots": ["models"]}}, "spec.weights.allowedRoots"),
    ({"lifecycle": {"activeDeadlineSeconds": 0}}, "spec.lifecycle.activeDeadlineSeconds"),
    ({"lifecycle": {"failurePolicy": {"rules": [{"action": "Ignore"}]}}}, "onExitCodes or onReasons"),
    (
        {"lifecycle": {"failurePolicy": {"rules": [{"action": "Panic", "onReasons": ["A"]}]}}},
        "spec.lifecycle.failurePolicy.rules[0].action",
    ),
    ({"priorityClassName": "High!"}, "spec.priorityClassName"),
    ({"speculation": {"indexBytes": "1000k"}}, "at least 1Mi"),
]

ANSWERED: list[tuple[dict[str, Any], str]] = [
    ({"redis": {"url": "unix:///run/redis.sock"}}, "spec.redis.url"),
    ({"history": {"redis": {"url": "unix:///run/redis.sock"}}}, "spec.history.redis.url"),
    ({"workers": {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}}, "spec.workers.podTemplate"),
    ({"head": {"podTemplate": {"spec": {"volumes": ["x"]}}}}, "spec.head.podTemplate"),
]


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_none(one) for name, one in value.items() if one is not None}
    return value


@pytest.fixture(scope="module")
def refusing(cluster: Any) -> Any:
    made = Jobs(cluster, "refusing")
    yield made
    made.clear()


@pytest.mark.parametrize(("sections", "says"), REFUSED, ids=[str(sections)[:80] for sections, _ in REFUSED])
def test_the_api_server_refuses_what_rollout_check_refuses(refusing: Jobs, sections: dict[str, Any], says: str) -> None:
    manifest = without_none(refusing.manifest("bad", **sections))
    assert says in refusing.apply(manifest)
    assert refusing.get("bad") is None
    with pytest.raises(ManifestError):
        parse_job(manifest)


@pytest.mark.parametrize("name", ["1st", "Upper", LONG])
def test_names_that_leave_no_room_for_those_of_pods_are_refused(refusing: Jobs, name: str) -> None:
    manifest = refusing.manifest(name)
    assert "metadata.name" in refusing.apply(manifest)
    with pytest.raises(ManifestError):
        parse_job(manifest)


@pytest.mark.parametrize(("sections", "field"), ANSWERED)
def test_what_the_api_server_cannot_know_is_answered(
    jobs: Jobs, operator: Any, sections: dict[str, Any], field: str
) -> None:
    jobs.make("bad", **sections)
    jobs.wait(lambda: jobs.condition("bad", "Accepted") == ("False", "Invalid"))
    assert field in jobs.wait(lambda: jobs.events("bad").get("Invalid"))
    assert not jobs.pods("bad")


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {"uri": "other"}}, "model cannot be changed"),
        ({"source": {"dataset": {"tasks": [{"name": "a", "generator": "b"}]}, "trainer": None}}, "source cannot be"),
        ({"engine": {"maxModelLen": 100_000}}, "engine cannot be changed"),
        ({"sampling": {"n": 2}}, "sampling cannot be changed"),
        ({"history": {"name": "other"}}, "history cannot be changed"),
        ({"redis": {"url": "redis://other"}}, "redis cannot be changed"),
        ({"managedBy": "someone"}, "managedBy cannot be changed"),
    ],
)
def test_what_makes_no_sense_to_change_cannot_be_changed(refusing: Jobs, sections: dict[str, Any], says: str) -> None:
    if refusing.get("fixed") is None:
        refusing.make("fixed")
    with pytest.raises(Exception, match=says):
        refusing.patch("fixed", **sections)


def test_the_shortest_manifest_has_all_defaults(refusing: Jobs) -> None:
    manifest = refusing.manifest("short")
    manifest["spec"] = {"source": {"trainer": {}}, "model": {"uri": "Qwen/Qwen3-8B"}}
    assert not refusing.apply(manifest)
    made = refusing.get("short")
    assert made is not None
    assert parse_job(manifest).spec == parse_job({**manifest, "spec": made["spec"]}).spec
    assert (1, 4096, "marginal") == (
        made["spec"]["workers"]["replicas"],
        made["spec"]["engine"]["maxModelLen"],
        made["spec"]["speculation"]["policy"],
    )


def test_scale_and_printed_columns(refusing: Jobs) -> None:
    if refusing.get("fixed") is None:
        refusing.make("fixed")
    kubectl = refusing.cluster.kubectl
    kubectl("-n", refusing.namespace, "scale", "rj/fixed", "--replicas=5")
    job = refusing.get("fixed")
    assert job is not None
    assert 5 == job["spec"]["workers"]["replicas"]
    head = kubectl("-n", refusing.namespace, "get", "rj").stdout.splitlines()[0].split()
    assert ["NAME", "STATE", "WORKERS", "PROGRESS", "TOK/S", "ACCEPTED", "SAVED", "AGE"] == head
