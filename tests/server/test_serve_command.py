"""``rollout serve`` as a process."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from rollout_api.ports import free_port
from tests.support.manifests import rollout_job
from tests.support.redis_servers import Certificates, Server
from tests.support.served_job import ServedJob
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

TOKEN = "a-token-that-is-long-enough"
COMMAND = [sys.executable, "-m", "rollout_tools.cli", "serve"]


@pytest.fixture
def manifest(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(rollout_job(model={"uri": str(model)}, workers={"gpusPerWorker": 0})))
    return file


@contextmanager
def running(*arguments: str | Path, certificate: Path | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    process = subprocess.Popen([*COMMAND, *arguments, "--port", str(port)])
    scheme = "http" if certificate is None else "https"
    url = f"{scheme}://127.0.0.1:{port}"
    verify = True if certificate is None else ssl.create_default_context(cafile=str(certificate))

    def is_healthy() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/health", verify=verify).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(is_healthy, 90)
        yield process, url
    finally:
        process.kill()
        process.wait()


def run(*arguments: str | Path) -> tuple[int, str]:
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=90, check=False)
    return ended.returncode, ended.stderr


def test_a_job_is_served_until_sigterm(manifest: Path, job: ServedJob, redis_url: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "trainer").write_text(TOKEN)
    options = ["--tokens", str(tokens), "--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    options += ["--max-model-tokens-per-token", "50", "--host="]
    with running("-f", manifest, "--redis", redis_url, *options) as (process, url):
        body = {"model": "math", "prompt": "one"}
        assert 401 == httpx.post(f"{url}/v1/completions", json=body).status_code
        ipv6 = url.replace("127.0.0.1", "[::1]")
        assert 401 == httpx.post(f"{ipv6}/v1/completions", json=body).status_code
        with job.serving(lambda request: job.answer_text(request, "two")):
            headers = {"Authorization": f"Bearer {TOKEN}"}
            reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20)
            too_long = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 60}, headers=headers, timeout=20)
        assert "two" == reply.json()["choices"][0]["text"]
        assert "at most 50 tokens" in too_long.json()["error"]["message"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=30) in (0, -signal.SIGTERM)


def test_warnings_are_printed(manifest: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Server(tmp_path) as redis:
        ServedJob(redis.url, model)
        with running("-f", manifest, "--redis", redis.url):
            redis.kill()
            printed: list[str] = []

            def is_warned() -> bool:
                printed.append(capfd.readouterr().err)
                return "does not answer" in "".join(printed)

            wait_for(is_warned, 30, lambda: "".join(printed))


def test_a_job_is_served_over_tls(manifest: Path, job: ServedJob, redis_url: str, tmp_path: Path) -> None:
    files = Certificates.make(tmp_path)
    options: list[str | Path] = ["--certificate", files.certificate, "--certificate-key", files.key]
    with running("-f", manifest, "--redis", redis_url, *options, certificate=files.certificate) as (_, url):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health")
    code, message = run("-f", manifest, "--redis", redis_url, *options[:2])
    assert code == 5
    assert "--certificate-key belong together" in message
    code, message = run("-f", manifest, "--redis", redis_url, *options[:3], files.certificate)
    assert code == 5
    assert "pass two PEM files" in message


def test_what_cannot_be_used_is_named(manifest: Path, job: ServedJob, redis_url: str, tmp_path: Path) -> None:
    code, message = run("-f", manifest, "--redis", redis_url, "--tokens", tmp_path / "missing")
    assert code == 5
    assert "the tokens cannot be read" in message
    code, message = run("-f", manifest, "--redis", redis_url, "--no-such-option=1")
    assert code == 2
    assert "--no-such-option" in message
    code, message = run("-f", manifest, "--redis", "redis://127.0.0.1:1/0")
    assert code == 3
    assert "127.0.0.1:1" in message
