"""What the watches bring is kept by job."""

from __future__ import annotations

from typing import Any

from rollout_operator import names
from rollout_operator.store import Store

from rollout_api.manifest.rollout_job import API_VERSION, KIND


def owned(name: str, uid: str, owner: str = "job-uid", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "rl",
            "uid": uid,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {names.COMPONENT_LABEL: names.WORKER, names.SLOT_LABEL: "0"},
            "ownerReferences": [names.owner({"name": "math", "uid": owner}, API_VERSION, KIND)],
            "managedFields": [{"much": "text"}],
        },
        **more,
    }


KEY = ("rl", "math")


def test_pods_belong_to_the_job_with_the_uid_not_to_another_by_its_name() -> None:
    store = Store()
    assert KEY == store.put(owned("w", "1"), "Pod")
    assert KEY == store.put(owned("v", "2", owner="an-earlier-one"), "Pod")
    assert ["w"] == [pod.name for pod in store.pods(KEY, "job-uid")]


def test_what_is_no_news_wakes_nobody() -> None:
    store = Store()
    assert KEY == store.put(owned("c", "1", data={"a": "1"}), "ConfigMap")
    assert store.put(owned("c", "1", data={"a": "1"}), "ConfigMap") is None
    assert KEY == store.put(owned("c", "1", data={"a": "2"}), "ConfigMap")


def test_what_others_own_is_not_kept() -> None:
    store = Store()
    theirs = owned("c", "1")
    theirs["metadata"]["ownerReferences"][0]["kind"] = "Deployment"
    assert store.put(theirs, "ConfigMap") is None
    assert {} == store.objects(KEY, "job-uid")


def test_a_late_farewell_does_not_take_the_next_one_away() -> None:
    store = Store()
    store.put(owned("w", "1"), "Pod")
    store.put(owned("w", "2"), "Pod")
    store.drop(owned("w", "1"), "Pod")
    assert ["2"] == [pod.uid for pod in store.pods(KEY, "job-uid")]
    store.drop(owned("w", "2"), "Pod")
    assert () == store.pods(KEY, "job-uid")


def test_known_uids_by_namespace_and_what_is_gone() -> None:
    store = Store()
    store.put(owned("w", "1"), "Pod")
    store.put(owned("c", "2"), "ConfigMap")
    assert ({"1"}, {"2"}) == (store.known("Pod", ""), store.known("ConfigMap", "rl"))
    assert set() == store.known("Pod", "other")
    assert KEY == store.drop_uid("ConfigMap", "2")
    assert set() == store.known("ConfigMap", "")


def versioned(name: str, uid: str, version: int, **more: Any) -> dict[str, Any]:
    body = owned(name, uid, **more)
    body["metadata"]["resourceVersion"] = str(version)
    return body


def test_an_answer_to_a_write_that_the_watch_overtook_changes_nothing() -> None:
    store = Store()
    running = versioned("w", "1", 7, status={"phase": "Running"})
    store.put(running, "Pod")
    store.answered(versioned("w", "1", 5), "Pod")
    assert ["Running"] == [pod.phase for pod in store.pods(KEY, "job-uid")]
    store.drop(running, "Pod")
    store.answered(versioned("w", "1", 6), "Pod")
    assert () == store.pods(KEY, "job-uid")
    store.answered(versioned("w", "2", 8), "Pod")
    assert ["2"] == [pod.uid for pod in store.pods(KEY, "job-uid")]


def test_an_answer_about_a_job_is_taken_if_it_is_later() -> None:
    store = Store()

    def job(version: int, state: str) -> dict[str, Any]:
        metadata = {"namespace": "rl", "name": "math", "uid": "job-uid", "resourceVersion": str(version)}
        return {"metadata": metadata, "status": {"state": state}}

    store.put_job(job(5, "Running"))
    store.answered_job(job(4, "Starting"))
    assert ["Running"] == store.states()
    store.answered_job(job(9, "Suspended"))
    assert ["Suspended"] == store.states()
    store.drop_job(job(9, "Suspended"))
    store.answered_job(job(10, "Failed"))
    assert [] == store.states()
