"""Images of prompts in an engine: reading them, and models that see none."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_store.job.admission_rules import AdmissionError
from rollout_worker.engine import images
from rollout_worker.engine.images import ImageCache, decode_image
from tests.support.engines import EngineHarness
from tests.support.responses import PROMPT
from tests.support.vision_model import BROKEN_IMAGE, HUGE_IMAGE, make_image


async def test_recent_images_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {color: make_image(color) for color in ("red", "green", "blue")}
    num_reads: Counter[str] = Counter()

    async def read(digest: str) -> bytes | None:
        num_reads[digest] += 1
        await asyncio.sleep(0)
        return stored.get(digest)

    size = len(stored["red"]) + 40 * 40 * 3
    monkeypatch.setattr(images, "MAX_CACHED_BYTES", 2 * size + size // 2)
    cache = ImageCache(read)
    at_once = await asyncio.gather(*(cache.get("red") for _ in range(5)))
    assert {(255, 0, 0)} == {image.media.getpixel((0, 0)) for image in at_once}
    for color in ("green", "red", "blue", "red", "green"):
        await cache.get(color)
    assert {"red": 1, "green": 2, "blue": 1} == num_reads
    for _ in range(2):  # what failed is read again
        with pytest.raises(AdmissionError, match=r"the image none .* not in Redis any more"):
            await cache.get("none")
    assert 2 == num_reads["none"]


@pytest.mark.parametrize("data", [b"no image", make_image("red")[:60], HUGE_IMAGE, BROKEN_IMAGE])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(AdmissionError, match="cannot be decoded"):
        decode_image(data)


def test_a_model_that_reads_text_only_refuses_images(drafting_engine: EngineHarness) -> None:
    request = drafting_engine.request(PROMPT, Sampling(n=1, max_tokens=4), images=["0" * 64])
    call = drafting_engine.engine.generate(request, 0, images=[decode_image(make_image("red"))])
    with pytest.raises(AdmissionError, match="reads text only"):
        drafting_engine.loop.run(call)
