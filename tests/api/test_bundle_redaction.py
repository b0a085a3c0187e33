"""Secrets disappear from texts and objects, and what explains a failure stays."""

from __future__ import annotations

import json
import string
import time
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.bundle.redaction import HIDDEN, Redactor, is_secret_name

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
    started = time.perf_counter()
    for unit in ("a", "a.", "a-", "a=", "--a ", "a://", '\\"', "eyJ", "eyJ-"):
        REDACTOR.text(unit * 200_000)
    assert time.perf_counter() - started < 30
