"""The archive of a bundle, which has no secrets: a part that fails does not prevent the others, and is named."""

from __future__ import annotations

import asyncio
import io
import json
import string
import tarfile
import time
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.bundle import BundleArchive, ContainerLog, Evidence, read_archive
from rollout_api.redaction import HIDDEN, Redactor, is_secret_name


def test_parts_that_fail_are_explained_beside_those_that_exist() -> None:
    file = io.BytesIO()
    archive = BundleArchive(file, folder="bundle-math", redactor=Redactor(["hunter22"]))
    archive.collect("status.json", "The status.", lambda: {"state": "failed", "reason": "hunter22 | refused"})
    archive.collect("redis.json", "The server.", lambda: 1 // 0)
    archive.note_missing("logs", "The logs.", "the pod is gone,\nits password was hunter22")
    archive.collect("log.txt", "A log.", lambda: "password=abcdefgh\nlast line")
    archive.close("Job math", "Collected now.")

    files = dict(read_archive(file.getvalue()))
    assert ["status.json", "log.txt", "README.md"] == list(files)
    assert {"state": "failed", "reason": "*** | refused"} == json.loads(files["status.json"])
    assert b"password=***\nlast line" == files["log.txt"]
    page = files["README.md"].decode()
    assert "| `redis.json` | The server. | integer division or modulo by zero |" in page
    assert "| `logs` | The logs. | the pod is gone, its password was *** |" in page


def test_an_archive_can_contain_another() -> None:
    inner, outer = io.BytesIO(), io.BytesIO()
    archive = BundleArchive(inner, folder="inner", redactor=Redactor())
    archive.add("a.txt", "A text.", "content")
    archive.close("Inner", "")
    archive = BundleArchive(outer, folder="outer", redactor=Redactor())
    archive.add_archive("head", "What the head has collected.", inner.getvalue())
    archive.close("Outer", "")
    files = dict(read_archive(outer.getvalue()))
    assert ["head/a.txt", "head/README.md", "README.md"] == list(files)
    assert b"content" == files["head/a.txt"]


def test_paths_outside_of_the_archive_are_not_read() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in ("bundle/../../evil", "bundle//evil", "bundle/good"):
            tar.addfile(tarfile.TarInfo(name))
    assert ["good"] == [name for name, _ in read_archive(file.getvalue())]
    with pytest.raises(tarfile.TarError):
        dict(read_archive(b"something else"))


class Cluster:
    """A cluster with a pod that has restarted, where Events must not be read and one log is gone."""

    async def events(self) -> list[dict[str, Any]]:
        raise PermissionError("events is forbidden")

    async def pods(self) -> list[dict[str, Any]]:
        statuses = [
            {"name": "head", "restartCount": 1, "state": {"running": {}}},
            {"name": "proxy", "state": {"waiting": {}}},
        ]
        return [{"metadata": {"name": "math-head", "managedFields": []}, "status": {"containerStatuses": statuses}}]

    async def log(self, log: ContainerLog, num_logs: int) -> str:
        if log.previous:
            raise LookupError("it is gone")
        return f"one of {num_logs} logs\n"


def test_what_a_cluster_does_not_tell_is_named() -> None:
    evidence = Evidence({"metadata": {"name": "math"}})
    asyncio.run(evidence.read(Cluster()))
    file = io.BytesIO()
    archive = BundleArchive(file, folder="bundle-math", redactor=Redactor())
    evidence.add_to(archive)
    archive.close("Job math", "")
    files = dict(read_archive(file.getvalue()))
    assert ["job.json", "pods/math-head.json", "logs/math-head/head.log", "README.md"] == list(files)
    assert {"name": "math-head"} == json.loads(files["pods/math-head.json"])["metadata"]
    assert b"one of 2 logs\n" == files["logs/math-head/head.log"]
    page = files["README.md"].decode()
    assert "| `events.json` |  | events is forbidden |" in page
    assert "| `logs/math-head/head-previous.log` |  | it is gone |" in page


REDACTOR = Redactor()
SECRETS = st.text(string.ascii_letters + string.digits + "_-.~", min_size=12, max_size=40).filter(
    lambda secret: any(one.isalpha() for one in secret)
)
ANY_SECRETS = st.text(string.printable, min_size=6, max_size=30).filter(lambda secret: secret.strip() == secret)
WORDS = st.lists(st.sampled_from(["engine", "failed:", "at", "step=3", "http://host:80/x", "a@b", "{", '"x"', "(KV)"]))
SECRET_NAMES = st.sampled_from(
    [
        "password",
        "REDIS_PASSWORD",
        "api_key",
        "apiKey",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "token",
        "access-token",
        "clientSecret",
        "aws_secret_access_key",
        "OPENAI_KEY",
        "db.credentials",
    ]
)
TEMPLATES = st.sampled_from(
    [
        "{name}={secret}",
        "{name}: {secret}",
        '"{name}": "{secret}"',
        "'{name}': '{secret}'",
        '\\"{name}\\": \\"{secret}\\"',
        "--{name} {secret}",
        "--{name}={secret}",
        "{name} = '{secret}'",
    ]
)


@given(before=WORDS, after=WORDS, name=SECRET_NAMES, template=TEMPLATES, secret=SECRETS)
def test_assigned_secrets_disappear_from_logs(
    before: list[str], after: list[str], name: str, template: str, secret: str
) -> None:
    line = " ".join([*before, template.format(name=name, secret=secret), *after])
    assert secret not in REDACTOR.text(line)


@given(
    before=WORDS,
    after=WORDS,
    scheme=st.sampled_from(["redis", "rediss+sentinel", "https", "s3", "postgresql"]),
    user=st.sampled_from(["", "job"]),
    password=ANY_SECRETS,
)
def test_passwords_disappear_from_urls(
    before: list[str], after: list[str], scheme: str, user: str, password: str
) -> None:
    encoded = quote(password, safe="")
    url = f"{scheme}://{user}:{encoded}@host-{len(password)}:6379/0"
    redacted = REDACTOR.text(" ".join([*before, url, *after]))
    assert f":{encoded}@" not in redacted
    assert f"@host-{len(password)}:6379/0" in redacted


@given(before=st.text(), after=st.text(), secret=ANY_SECRETS)
def test_known_secrets_disappear_wherever_they_are(before: str, after: str, secret: str) -> None:
    redacted = Redactor([secret]).text(f"{before} {secret} {quote(secret, safe='')} {after}")
    for part in (before, after):
        if secret in part:
            return
    assert secret not in redacted.replace(HIDDEN, "") or secret in HIDDEN


@given(name=SECRET_NAMES, secret=SECRETS, depth=st.integers(0, 3))
def test_secrets_disappear_from_objects(name: str, secret: str, depth: int) -> None:
    documents: list[Any] = [
        {name: secret},
        {name: [secret]},
        [{"name": name, "value": secret}],
        {"args": ["--token", secret, f"--password={secret}"]},
        {"annotation": json.dumps({name: secret})},
        {"url": f"redis://u:{secret}@h"},
    ]
    for document in documents:
        for _ in range(depth):
            document = {"spec": [document]}
        assert secret not in json.dumps(REDACTOR.value(document))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abcdefgh1234", f"Authorization: Bearer {HIDDEN}"),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {HIDDEN}"),
        ("sent Bearer abcdefgh1234 to x", f"sent Bearer {HIDDEN} to x"),
        ("with hf_AbCdEfGhIjKlMnOpQrStUvWx.", f"with {HIDDEN}."),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nnext", f"{HIDDEN}\nnext"),
        ("REDIS_PASS=abc1", f"REDIS_PASS={HIDDEN}"),
        ("REDISCLI_AUTH: abc1", f"REDISCLI_AUTH: {HIDDEN}"),
        ("DB_PWD='abc1'", f"DB_PWD={HIDDEN}"),
        ("redis-server --requirepass abc1 --port 1", f"redis-server --requirepass {HIDDEN} --port 1"),
        ("requirepass abc1\nmasterauth abc1", f"requirepass {HIDDEN}\nmasterauth {HIDDEN}"),
        ('CONFIG SET requirepass "a b c"', f"CONFIG SET requirepass {HIDDEN}"),
        ("FATAL CONFIG FILE ERROR >>> 'requirepass abc1'", f"FATAL CONFIG FILE ERROR >>> 'requirepass {HIDDEN}'"),
        ("sentinel auth-pass main abc1", f"sentinel auth-pass main {HIDDEN}"),
        ("user job on >abc1 ~a:* +@all", f"user job on >{HIDDEN} ~a:* +@all"),
        ("ACL SETUSER job reset on ~a:* >abc1 +@all", f"ACL SETUSER job reset on ~a:* >{HIDDEN} +@all"),
        ("https://s3/b?X-Amz-Signature=abc1&x=2", f"https://s3/b?X-Amz-Signature={HIDDEN}&x=2"),
        ("with glpat-AbCdEfGhIjKlMnOpQrSt", f"with {HIDDEN}"),
        ("with xoxb-123456789012-AbCdEfGh", f"with {HIDDEN}"),
        ("with ASIAABCDEFGHIJKLMNOP", f"with {HIDDEN}"),
        ("at redis://:p'ssword@h:6379/0", f"at redis://{HIDDEN}@h:6379/0"),
        ("at redis://u:p<w@h/0 now", f"at redis://u:{HIDDEN}@h/0 now"),
        ("HF_TOKEN: <set to the key 'token' in secret 'hf'>", "HF_TOKEN: <set to the key 'token' in secret 'hf'>"),
    ],
)
def test_secrets_are_recognized_by_their_shape(text: str, expected: str) -> None:
    assert expected == REDACTOR.text(text)


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-27T22:31:18.123Z ERROR engine-0: CUDA out of memory. Tried to allocate 2.00 GiB",
        "max_tokens=4096 tokens: 17, token_budget 3, accepted tokens per step: 1.7",
        "KeyError: 'math'",
        "the user math has > 3 jobs, user bob said >hello, and vllm>=0.32",
        "neither requirepass nor masterauth is set",
        "the key rollout:{u-1}:requests is missing",
        "http://math-head.rl.svc:8080/status answered 503",
        "tokenizer=Qwen/Qwen3-8B tokens_per_second=812.5",
        "TOKENIZERS_PARALLELISM=false",
    ],
)
def test_ordinary_lines_stay_as_they_are(text: str) -> None:
    assert text == REDACTOR.text(text)


def test_references_and_figures_stay_in_objects() -> None:
    spec = {
        "model": {"uri": "Qwen/Qwen3-8B", "tokenSecretRef": {"name": "hf", "key": "token"}},
        "redis": {"urlFrom": {"secretKeyRef": {"name": "rollout-redis", "key": "url"}}},
        "sampling": {"maxTokens": 16384},
        "server": {"tokensSecretName": "agents"},
        "progress": {"tokens": 12, "tokensPerSecond": 3.5},
    }
    assert spec == REDACTOR.value(spec)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token", True), ("tokens", False), ("token_ids", False), ("secretName", False), ("monkey", False), ("KEY", True)],
)
def test_names_are_told_apart(name: str, expected: bool) -> None:
    assert expected == is_secret_name(name)


def test_long_lines_are_redacted_in_linear_time() -> None:
    started = time.process_time()
    for unit in ("a", "a.", "a-", "a=", "--a ", "a://", '\\"', "eyJ", "eyJ-"):
        REDACTOR.text(unit * 200_000)
    assert time.process_time() - started < 30
