"""The doctor examines real Redis servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api.ports import free_port
from rollout_api.protocol.access_rules import access_rules
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.redis_client.address import Kind
from rollout_api.redis_client.server_functions import load
from rollout_tools.doctor.findings import Finding, Severity
from rollout_tools.doctor.redis_server import RedisFacts, check_redis, percentile, read_redis
from tests.support.redis_servers import Certificates, Cluster, Sentinels, Server

NOW = datetime.now(UTC)
KEY = MessageKeys("doctor").prefix + "x"
SAFE: dict[str, Any] = {"appendonly": True, "maxmemory": "200mb"}


def examine(url: str, keys: Sequence[str] = (KEY,), *, history: bool = False) -> dict[str, Finding]:
    """Return the findings about a server, by their checks."""
    facts = read_redis(url, keys=keys, may_be_cluster=history)
    return {finding.check: finding for finding in check_redis(facts, holds_messages=not history, now=NOW)}


def not_ok(findings: dict[str, Finding]) -> dict[str, Severity]:
    return {check: one.severity for check, one in findings.items() if one.severity is not Severity.OK}


def test_a_safe_server_gives_no_advice_and_keeps_nothing(tmp_path: Path) -> None:
    with Server(tmp_path, **SAFE) as server:
        findings = examine(server.url)
        # A loaded machine may delay some PINGs.
        assert not_ok(findings).keys() <= {"round trips"}
        assert "append-only file, appendfsync always" == findings["persistence"].seen
        assert "over 300 PINGs" in findings["round trips"].seen
        assert "functions" in findings
        assert [] == server.client().keys()


@pytest.mark.parametrize(
    ("options", "check", "severity", "seen"),
    [
        ({**SAFE, "appendonly": False}, "persistence", Severity.WARNING, "no snapshot"),
        ({**SAFE, "settings": {"appendfsync": "no"}}, "persistence", Severity.WARNING, "appendfsync no"),
        ({**SAFE, "maxmemory": "0"}, "memory", Severity.WARNING, "without a limit"),
        (
            {**SAFE, "maxmemory": "0", "settings": {"maxmemory-policy": "allkeys-lru"}},
            "eviction",
            Severity.WARNING,
            "allkeys-lru",
        ),
        (
            {**SAFE, "settings": {"maxmemory-policy": "allkeys-lru"}},
            "connection",
            Severity.ERROR,
            "127.0.0.1",
        ),
    ],
)
def test_a_dangerous_setting_is_reported(
    options: dict[str, Any], check: str, severity: Severity, seen: str, tmp_path: Path
) -> None:
    with Server(tmp_path, **options) as server:
        finding = examine(server.url)[check]
    assert severity == finding.severity
    assert seen in finding.seen
    assert finding.advice


def test_a_full_server_is_an_error(tmp_path: Path) -> None:
    with Server(tmp_path, appendonly=True, maxmemory="4mb") as server:
        client = server.client()
        assert Severity.OK == examine(server.url)["memory"].severity
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for number in range(10_000):
                client.set(f"key {number}", "x" * 4096)
        findings = examine(server.url)
    assert (Severity.ERROR, Severity.OK) == (findings["memory"].severity, findings["permissions"].severity)


def test_a_snapshot_is_not_enough_for_messages(tmp_path: Path) -> None:
    with Server(tmp_path, maxmemory="200mb") as server:
        server.client().save()
        finding = examine(server.url)["persistence"]
    assert (Severity.WARNING, "snapshots (RDB) only") == (finding.severity, finding.seen)


def test_an_unreachable_server_is_an_error_without_its_password() -> None:
    findings = examine(f"redis://u:secret@127.0.0.1:{free_port()}")
    assert {"connection": Severity.ERROR} == not_ok(findings)
    assert "cannot be reached" in findings["connection"].advice
    assert "secret" not in repr(findings)


def test_a_malformed_url_is_an_error() -> None:
    assert "is not a Redis URL" in examine("http://x")["connection"].advice


def test_a_job_user_may_use_the_keys_of_its_job_alone(tmp_path: Path) -> None:
    rules = " ".join(access_rules("team", "job", "uid-1", "math"))
    own = MessageKeys("uid-1").prefix + "probe"
    of_history = HistoryKeys("team", "math").log("probe")
    with Server(tmp_path, users=[f"job on >pw {rules}"], **SAFE) as server:
        url = server.url_of("job", "pw")
        without_functions = examine(url, (own, of_history))
        load(server.raw_client())
        allowed = examine(url, (own, of_history))
        foreign = examine(url, (own, HistoryKeys("team", "other").log("probe")))
        assert [] == server.client().keys()
    assert Severity.ERROR == without_functions["functions"].severity
    assert "lacks the functions" in without_functions["functions"].seen
    assert "load_functions" in without_functions["functions"].advice
    assert not_ok(allowed).keys() <= {"round trips"}
    assert Severity.ERROR == foreign["permissions"].severity
    assert "history:team/other" in foreign["permissions"].seen
    assert MessageKeys("uid-1").prefix not in foreign["permissions"].seen
    assert "access_rules" in foreign["permissions"].advice


def test_a_user_who_may_only_read_cannot_run_jobs(tmp_path: Path) -> None:
    with Server(tmp_path, users=["reader on >pw ~* +@read +@connection +info +ping"], **SAFE) as server:
        findings = examine(server.url_of("reader", "pw"))
    finding = findings["permissions"]
    assert Severity.ERROR == finding.severity
    assert "'fcall'" in findings["functions"].seen
    assert "SET " in finding.seen
    assert "XADD " in finding.seen
    assert "GET " not in finding.seen.replace("GETALL ", "").replace("SET ", "")


def test_a_wrong_password_is_explained(tmp_path: Path) -> None:
    with Server(tmp_path, password="right") as server:
        finding = examine(server.url.replace("right", "wrong"))["connection"]
    assert "refused the user name or password" in finding.advice


def test_the_expiry_of_a_certificate_is_reported(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "pki")
    with Server(tmp_path / "server", certificates=certificates, **SAFE) as server:
        finding = examine(server.url)["TLS certificate"]
        without_authority = examine(f"rediss://127.0.0.1:{server.port}")
    assert Severity.WARNING == finding.severity, "the test's certificate is valid for two days"
    assert f"{NOW + timedelta(days=2):%Y-%m-%d}" in finding.seen
    assert {"connection": Severity.ERROR} == not_ok(without_authority)
    assert "certificate" in without_authority["connection"].advice


def test_a_certificate_that_is_valid_for_long_is_good() -> None:
    facts = RedisFacts(
        "x", Kind.SERVER, info={"role": "master"}, round_trips_ms=[1], certificate_expiry=NOW + timedelta(days=15)
    )
    assert "TLS certificate" not in not_ok({one.check: one for one in check_redis(facts, holds_messages=True, now=NOW)})


def test_a_replica_is_an_error_and_the_sentinels_find_the_primary(tmp_path: Path) -> None:
    with Sentinels(tmp_path) as sentinels:
        replica = next(server for server in sentinels.servers if server is not sentinels.primary)
        assert Severity.ERROR == examine(replica.url)["role"].severity
        found = examine(sentinels.url)["role"]
    assert (Severity.OK, "primary with 1 replica, found by Sentinels") == (found.severity, found.seen)


def test_a_cluster_is_for_histories_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        key = HistoryKeys("team", "math").log("probe")
        history = examine(cluster.url, (key,), history=True)
        assert Severity.OK == history["role"].severity
        assert Severity.OK == history["permissions"].severity
        assert "a job's messages are on one server" in examine(cluster.url)["connection"].advice


@pytest.mark.parametrize(("difference", "severity"), [(0.2, Severity.OK), (-3.0, Severity.WARNING)])
def test_a_difference_of_the_clocks_is_reported(difference: float, severity: Severity) -> None:
    facts = RedisFacts("x", Kind.SERVER, info={"role": "master"}, round_trips_ms=[1], clock_difference_s=difference)
    findings = {one.check: one for one in check_redis(facts, holds_messages=True, now=NOW)}
    assert severity == findings["clock"].severity


@pytest.mark.parametrize(
    ("durations", "severity"),
    [([0.3] * 300, Severity.OK), ([5.0] * 300, Severity.WARNING), ([0.3] * 295 + [80.0] * 5, Severity.WARNING)],
)
def test_slow_round_trips_are_reported(durations: list[float], severity: Severity) -> None:
    facts = RedisFacts("x", Kind.SERVER, info={"role": "master"}, round_trips_ms=durations)
    findings = {one.check: one for one in check_redis(facts, holds_messages=True, now=NOW)}
    assert severity == findings["round trips"].severity


def test_a_failed_write_to_the_disk_is_an_error() -> None:
    facts = RedisFacts("x", Kind.SERVER, info={"role": "master"}, round_trips_ms=[1])
    for field in ("aof_last_write_status", "rdb_last_bgsave_status"):
        failed = dataclasses.replace(facts, info={"role": "master", field: "err"})
        findings = {one.check: one for one in check_redis(failed, holds_messages=True, now=NOW)}
        assert Severity.ERROR == findings["persistence"].severity


def test_percentiles_are_values_that_were_measured() -> None:
    assert (3, 5, 5) == tuple(percentile([5, 1, 3, 2, 4], share) for share in (0.5, 0.99, 1.0))
