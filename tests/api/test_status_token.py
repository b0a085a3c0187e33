"""The token of /status and /metrics."""

from __future__ import annotations

import hashlib

import pytest

from rollout_api.status_token import HASH_VARIABLE, TOKEN_VARIABLE, StatusToken

TOKEN = "a-token-of-thirty-two-characters"
HASH = hashlib.sha256(TOKEN.encode()).hexdigest()


@pytest.mark.parametrize(
    "environment", [{TOKEN_VARIABLE: TOKEN}, {TOKEN_VARIABLE: f"{TOKEN}\n"}, {HASH_VARIABLE: HASH}], ids=str
)
def test_requests_need_the_token(environment: dict[str, str]) -> None:
    token = StatusToken.from_environment(environment)
    assert HASH == token.sha256
    for authorization in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
        assert token.permits("/metrics", authorization)
    wrong: tuple[str | None, ...] = (
        None,
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Basic {TOKEN}",
        "Bearer \udcff",
    )
    for refused in wrong:
        assert not token.permits("/metrics", refused)
        assert not token.permits("/healthz/", refused)
        assert token.permits("/healthz", refused)
        assert token.permits("/readyz", refused)


def test_without_a_token_every_request_is_permitted() -> None:
    token = StatusToken.from_environment({})
    assert token.permits("/status", None)
    assert token.permits("/status", f"Bearer {TOKEN}")
    assert {} == token.headers()


def test_only_a_process_with_the_token_itself_can_send_it() -> None:
    assert {"Authorization": f"Bearer {TOKEN}"} == StatusToken.from_environment({TOKEN_VARIABLE: TOKEN}).headers()
    assert {} == StatusToken.from_environment({HASH_VARIABLE: HASH}).headers()


@pytest.mark.parametrize(
    ("environment", "message"),
    [({TOKEN_VARIABLE: "short"}, "at least 32 characters"), ({HASH_VARIABLE: TOKEN}, "64 hexadecimal digits")],
)
def test_a_token_that_could_be_guessed_is_rejected(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StatusToken.from_environment(environment)
