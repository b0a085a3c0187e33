"""A fake job that is served over HTTP, and OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.served_job import ServedJob, make_configuration, serving

TOOL_ARGUMENTS = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model's configuration and tokenizer."""
    return make_configuration(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(redis_url: str, model: Path) -> ServedJob:
    """A job in an empty Redis; the test answers its requests."""
    return ServedJob(redis_url, model)


@pytest.fixture
def server(job: ServedJob, redis_url: str, model: Path) -> Iterator[str]:
    """URL of a server of the job."""
    with serving(job, redis_url, model, TOOL_ARGUMENTS) as url:
        yield url


@pytest.fixture
def openai(server: str) -> Iterator[OpenAI]:
    """OpenAI's client, connected to the server."""
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
