"""URLs of Redis: parsing, errors, and removal of passwords."""

from __future__ import annotations

import pytest

from rollout_api.redis_client.address import (
    Kind,
    RedisAddress,
    parse_address,
    parse_server_address,
    split_history_url,
    without_password,
)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://", RedisAddress(Kind.SERVER, (("localhost", 6379),))),
        ("redis://:p%40w@h:1/2", RedisAddress(Kind.SERVER, (("h", 1),), options={"password": "p@w", "db": 2})),
        ("redis://[::1]", RedisAddress(Kind.SERVER, (("::1", 6379),))),
        (
            "rediss://u@h?ssl_check_hostname=no&ssl_ca_certs=/ca&db=3",
            RedisAddress(
                Kind.SERVER,
                (("h", 6379),),
                tls=True,
                options={"ssl_check_hostname": False, "ssl_ca_certs": "/ca", "db": 3, "username": "u"},
            ),
        ),
        (
            "unix://u:p@/a/b.sock?db=1",
            RedisAddress(Kind.SERVER, path="/a/b.sock", options={"username": "u", "password": "p", "db": 1}),
        ),
        (
            "redis+sentinel://u:p@a,[::1]:1/main/4?sentinel_username=s&sentinel_password=q%26",
            RedisAddress(
                Kind.SENTINEL,
                (("a", 26379), ("::1", 1)),
                service="main",
                options={"username": "u", "password": "p", "db": 4},
                sentinel_options={"username": "s", "password": "q&"},
            ),
        ),
        (
            "rediss+sentinel://a/main?ssl_cert_reqs=none",
            RedisAddress(
                Kind.SENTINEL,
                (("a", 26379),),
                service="main",
                tls=True,
                options={"ssl_cert_reqs": "none"},
                sentinel_options={"ssl_cert_reqs": "none"},
            ),
        ),
        (
            "redis+cluster://:p@a,b:1/0?socket_timeout=1.5",
            RedisAddress(Kind.CLUSTER, (("a", 6379), ("b", 1)), options={"password": "p", "socket_timeout": 1.5}),
        ),
        (
            "rediss+cluster://a?ssl_keyfile=/k&ssl_certfile=/c",
            RedisAddress(Kind.CLUSTER, (("a", 6379),), tls=True, options={"ssl_keyfile": "/k", "ssl_certfile": "/c"}),
        ),
        # Options that the code that connects decides are ignored.
        ("redis://h?decode_responses=true&retry_on_timeout=true", RedisAddress(Kind.SERVER, (("h", 6379),))),
    ],
)
def test_url_is_parsed(url: str, address: RedisAddress) -> None:
    assert address == parse_address(url)


@pytest.mark.parametrize(
    ("url", "expected_error"),
    [
        ("http://h", "must begin with one of redis://"),
        ("h:6379", "must begin with one of redis://"),
        ("redis://h:x", "a host must be name, name:port"),
        ("redis://h:70000", "between 1 and 65535"),
        ("redis://h/one", "must be a number"),
        ("redis://a,b", "several hosts"),
        ("redis+sentinel://a,,b/main", "a host must be"),
        ("redis+sentinel://a,b", "as in …/mymaster"),
        ("redis+cluster://a/1", "only has database 0"),
        ("redis+cluster://a?db=1", "only has database 0"),
        ("unix://h", "unix:///path"),
        ("redis://h?sentinel_password=x", "for redis\\+sentinel://"),
        ("redis://h?ssl_ca_certs=/ca", "no effect without TLS"),
        ("redis://h?passwort=x", "no option 'passwort'"),
        ("redis://h?socket_timeout=soon", "'socket_timeout'"),
    ],
)
def test_error_says_what_is_wrong(url: str, expected_error: str) -> None:
    with pytest.raises(ValueError, match=expected_error):
        parse_address(url)


@pytest.mark.parametrize(
    "value", ["hunter2", "hunter2:6379", "https://hooks.example.com/hunter2", '{"url": "hunter2"}']
)
def test_value_that_is_no_url_of_redis_is_not_shown(value: str) -> None:
    with pytest.raises(ValueError, match="this value, which is not shown, is not a Redis URL") as caught:
        parse_server_address(value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("password", ["sec/ret", "sec?ret", "sec#ret", "sec:ret/", "sec@ret/", "sec?ret/x"])
@pytest.mark.parametrize("scheme", ["redis", "rediss+sentinel", "redis+cluster"])
def test_unescaped_password_is_an_error_that_does_not_contain_it(scheme: str, password: str) -> None:
    url = f"{scheme}://user:{password}@host:6379/main"
    with pytest.raises(ValueError, match=r"must be|does not have the form") as caught:
        parse_address(url)
    for shown in (str(caught.value), without_password(url)):
        assert "sec" not in shown
        assert "ret" not in shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:secret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://secret@h:1/0", "redis://***@h:1/0"),  # a user name alone may be meant as a password
        ("redis://:secret@h", "redis://***@h"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://h:1/0?db=1&password=secret", "redis://h:1/0?db=1&password=***"),
        ("redis://h?password=se@cret&db=1", "redis://h?password=***&db=1"),
        (
            "rediss+sentinel://u:p@a,b:1/main?sentinel_password=secret&ssl_password=x",
            "rediss+sentinel://u:***@a,b:1/main?sentinel_password=***&ssl_password=***",
        ),
        ("redis+cluster://u:secret@a,b", "redis+cluster://u:***@a,b"),
        ("unix://u:secret@/a.sock", "unix://u:***@/a.sock"),
        ("u:secret@h", "u:***@h"),
    ],
)
def test_passwords_are_replaced(url: str, shown: str) -> None:
    assert shown == without_password(url)


def test_text_of_an_address_has_no_credentials() -> None:
    url = "redis+sentinel://u:secret@a,[::1]:1/main?sentinel_password=secret"
    assert "main, whose Sentinels are a:26379,[::1]:1" == str(parse_address(url))
    assert "secret" not in repr(parse_address(url))


@pytest.mark.parametrize(
    ("url", "server", "history"),
    [
        ("redis://redis:6379/math", "redis://redis:6379", "default/math"),
        ("redis://redis:6379/team/math", "redis://redis:6379", "team/math"),
        (
            "rediss://u:p%2F@redis/2/math?ssl_cert_reqs=none",
            "rediss://u:p%2F@redis/2?ssl_cert_reqs=none",
            "default/math",
        ),
        ("redis://redis/0/7b/math", "redis://redis/0", "7b/math"),
        ("redis+sentinel://a,b/mymaster/math", "redis+sentinel://a,b/mymaster", "default/math"),
        ("redis+sentinel://a,b/mymaster/1/team/math", "redis+sentinel://a,b/mymaster/1", "team/math"),
        ("redis+cluster://a,b/math", "redis+cluster://a,b", "default/math"),
    ],
)
def test_the_url_of_a_history_is_that_of_its_server_with_its_name(url: str, server: str, history: str) -> None:
    assert (server, history) == split_history_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:secret@redis:6379",
        "redis://u:secret@redis:6379/0",
        "redis+sentinel://u:secret@a/mymaster",
        "redis://u:secret@redis/0/a/b/c",
        "unix://u:secret@/run/redis/math",
        "math",
        "http://u:secret@redis/math",
        "redis://u:sec/ret@redis/math",
        "redis://u:sec/ret@redis",
    ],
)
def test_the_url_of_a_history_needs_a_server_and_a_name(url: str) -> None:
    with pytest.raises(ValueError, match="redis://redis:6379/math") as caught:
        split_history_url(url)
    assert "sec" not in str(caught.value)
