"""The operator keeps a bundle of a failed job before it deletes the pods, on a simulated cluster."""

from __future__ import annotations

from rollout_operator.objects import names
from rollout_operator.objects.observed import KeptBundle, Rejection, Target
from rollout_operator.planning.actions import DeletePod, KeepBundle, SetFinalizer
from rollout_operator.planning.teardown import MAX_PODS

from tests.support.planned_jobs import running_job
from tests.support.simulated_cluster import SimulatedCluster

CONFIG_MAP = Target("ConfigMap", "math-bundle")


def failed_job(*, replicas: int = 3) -> SimulatedCluster:
    """Return a cluster with a job that has just failed because of worker 1, and whose pods still exist."""
    cluster = running_job(
        lifecycle={"backoffLimit": 0}, workers={"replicas": replicas, "minReplicas": 1, "maxReplicas": replicas}
    )
    cluster.terminate("math-worker-1", 1)
    cluster.execute(cluster.plan())
    assert "Failed" == cluster.status["state"]
    return cluster


def test_the_bundle_is_kept_before_any_pod_is_deleted() -> None:
    cluster = failed_job()
    planned = cluster.plan()
    assert [KeepBundle("math-bundle", ("math-head", "math-worker-1", "math-worker-0", "math-worker-2"))] == list(
        planned.actions
    )
    assert 0 == planned.requeue_after
    cluster.execute(planned)
    assert 4 == len(cluster.bundled_pods)
    actions = cluster.plan().actions
    assert 4 == sum(isinstance(action, DeletePod) for action in actions)
    assert not any(isinstance(action, KeepBundle) for action in actions)


def test_an_operator_that_was_killed_meanwhile_keeps_the_bundle_again() -> None:
    cluster = failed_job()
    cluster.execute(cluster.plan(), max_steps=0)
    assert isinstance(cluster.plan().actions[0], KeepBundle)


def test_the_bundle_of_an_earlier_job_is_replaced() -> None:
    cluster = failed_job()
    cluster.bundle = KeptBundle("earlier-uid", is_foreign=False)
    cluster.reconcile()
    assert KeptBundle("job-uid", is_foreign=False) == cluster.bundle


def test_a_bundle_that_cannot_be_stored_does_not_delay_the_teardown() -> None:
    cluster = failed_job()
    cluster.rejections = (Rejection(CONFIG_MAP, "Forbidden", "no", cluster.now),)
    actions = cluster.plan().actions
    assert 4 == len(actions)
    assert all(isinstance(action, DeletePod) for action in actions)


def test_a_config_map_of_somebody_else_is_not_replaced() -> None:
    cluster = failed_job()
    cluster.bundle = KeptBundle("", is_foreign=True)
    planned = cluster.plan()
    assert all(isinstance(action, DeletePod) for action in planned.actions)
    assert ["BundleNotKept"] == [event.reason for event in planned.events]
    cluster.reconcile()
    assert KeptBundle("", is_foreign=True) == cluster.bundle


def test_a_job_that_fails_without_pods_has_a_bundle() -> None:
    cluster = running_job(lifecycle={"activeDeadlineSeconds": 1000})
    cluster.pods.clear()
    cluster.now += 2000
    cluster.reconcile()
    assert "Failed" == cluster.status["state"]
    assert KeptBundle("job-uid", is_foreign=False) == cluster.bundle


def test_a_bundle_is_not_kept_again_once_the_job_is_torn_down() -> None:
    cluster = failed_job()
    cluster.reconcile()
    for name in list(cluster.pods):
        cluster.finish_deletion(name)
    cluster.reconcile()
    cluster.run(names.cleanup_pod("math"))
    cluster.terminate(names.cleanup_pod("math"), 0)
    cluster.reconcile()
    assert [] == cluster.job["metadata"]["finalizers"]
    cluster.bundle = None
    cluster.reconcile()
    assert cluster.bundle is None


def test_jobs_that_succeed_or_are_deleted_keep_no_bundle() -> None:
    succeeded, deleted = running_job(), running_job()
    succeeded.terminate("math-head", 0, message='{"done": 1}')
    succeeded.reconcile()
    deleted.delete_job()
    deleted.execute(deleted.plan())
    assert succeeded.bundle is None
    assert deleted.bundle is None


def test_of_many_pods_those_that_failed_and_the_head_are_kept() -> None:
    cluster = failed_job(replicas=40)
    (action,) = (action for action in cluster.plan().actions if not isinstance(action, SetFinalizer))
    assert isinstance(action, KeepBundle)
    assert MAX_PODS == len(action.pods)
    assert ("math-head", "math-worker-1", "math-worker-0") == action.pods[:3]


def test_bundles_are_told_from_other_config_maps() -> None:
    bundle = {"labels": {names.BUNDLE_LABEL: "math"}, "annotations": {names.JOB_UID_ANNOTATION: "u-1"}}
    assert KeptBundle("u-1", is_foreign=False) == KeptBundle.from_config_map({"metadata": bundle})
    assert KeptBundle("", is_foreign=True) == KeptBundle.from_config_map({"metadata": {}})
