"""Stop strings end a response with the same token, wherever it is continued and however many tokens a step returns."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import decode_draft_sources
from rollout_api.protocol.messages import FinishReason, Partial, WeightSpan
from rollout_worker.engine.response import GenerationResult, ResponseBuilder
from rollout_worker.engine.sampling_params import StopStrings, token_decoder
from tests.support.engines import EngineHarness
from tests.support.responses import PROMPT, PROMPTS, WITHOUT_EOS, accepted_share, prefix_of

pytestmark = pytest.mark.v2

TOKENS = st.lists(st.integers(0, 7), max_size=40)
STOPS = st.lists(st.text("w01 ", min_size=1, max_size=6), min_size=1, max_size=3)
PIECES = ("w0 ", "w1 ", "w10", " ", "w", "", "0 w1", "1")
"""Text of each token; the sixth completes no character, like the first bytes of one that consists of several."""


def decode(token: int) -> str:
    return PIECES[token]


def first_stop(texts: Sequence[str], stop: Sequence[str], min_tokens: int = 0) -> int | None:
    """Return the number of tokens up to the first one that completes a stop string, by definition.

    Args:
        texts: text of each token.
        stop: the stop strings.
        min_tokens: number of first tokens that end no response.
    """
    for count in range(min_tokens + 1, len(texts) + 1):
        start, text = len("".join(texts[: count - 1])), "".join(texts[:count])
        if any(text.startswith(string, at) for string in stop for at in range(len(text)) if at + len(string) > start):
            return count
    return None


def completion(tokens: Sequence[int]) -> Any:
    """Return what vLLM returns for new tokens, with a different log-probability for each token id."""
    logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens]
    return SimpleNamespace(token_ids=list(tokens), logprobs=logprobs)


@st.composite
def chunks(draw: st.DrawFn) -> list[list[int]]:
    tokens = draw(TOKENS)
    ends = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=8)))
    return [tokens[start:end] for start, end in zip([0, *ends], [*ends, len(tokens)], strict=True)]


@given(chunks=chunks(), stop=STOPS, min_tokens=st.integers(0, 12), prefix=st.integers(0, 40))
@example(chunks=[[0, 1, 2, 7, 0, 1]], stop=["1 w101", "w10"], min_tokens=0, prefix=0)
def test_the_response_is_the_same_for_all_chunks(
    chunks: list[list[int]], stop: list[str], min_tokens: int, prefix: int
) -> None:
    tokens = [token for chunk in chunks for token in chunk]
    kept = first_stop([PIECES[token] for token in tokens], stop, min_tokens)
    # A prefix that contains a stop string before its end is not the beginning of this response.
    prefix = min(prefix, len(tokens) if kept is None else kept)
    start = Partial(
        token_ids=tokens[:prefix],
        logprobs=[-float(token) for token in tokens[:prefix]],
        weight_spans=[WeightSpan(start=0, weight_version=1)] if prefix else [],
    )
    stop_strings = StopStrings(stop, min_tokens, start.token_ids, lambda _: decode)
    response = ResponseBuilder(start, logprobs=True, stop_strings=stop_strings)
    skipped = prefix
    for chunk in chunks:
        new = chunk[skipped:]
        skipped = max(0, skipped - len(chunk))
        response.append(completion(new))
    assert (kept is not None) == response.stopped
    expected = tokens[:kept]
    result = response.finish(None, [(1, 0), (2, 3), (3, 30)], started=0, finished=1)
    assert expected == result.token_ids
    assert [-float(token) for token in expected] == result.logprobs
    assert all(span.start < len(expected) for span in result.weight_spans)
    assert len(expected) - prefix == result.num_decoding_steps


def test_a_prefix_may_contain_a_stop_string_before_its_last_token() -> None:
    """Like an end token: the trainer has decided to continue behind it."""
    span = [WeightSpan(start=0, weight_version=0)]
    for tokens, stopped in (([0, 1], True), ([1, 0], False), ([1], True), ([1, 0, 1], True)):
        prefix = Partial(token_ids=tokens, weight_spans=span)
        stop_strings = StopStrings(["w1"], 0, tokens, lambda _: decode)
        response = ResponseBuilder(prefix, logprobs=False, stop_strings=stop_strings)
        assert stopped == response.stopped
        assert tokens == response.token_ids


@given(
    tokens=TOKENS,
    repeated=st.tuples(st.integers(0, 7), st.integers(0, 1000)),
    end=TOKENS,
    stop=STOPS,
    min_tokens=st.integers(0, 1100),
)
@example(tokens=[4], repeated=(5, 1000), end=[7], stop=["w1"], min_tokens=0)  # it begins before tokens without text
def test_the_result_is_the_same_although_only_the_end_of_a_prefix_is_decoded(
    tokens: list[int], repeated: tuple[int, int], end: list[int], stop: list[str], min_tokens: int
) -> None:
    *prefix, last = [*tokens, *[repeated[0]] * repeated[1], *end, 0]
    texts = [PIECES[token] for token in [*prefix, last]]
    stop_strings = StopStrings(stop, min_tokens, prefix, lambda _: decode)
    for count, is_completed in (
        (len(prefix), stop_strings.completed_by_prefix),
        (len(prefix) + 1, stop_strings.completed_by(last)),
    ):
        before = max(min_tokens, count - 1)  # stop strings that are completed earlier do not count
        assert (first_stop(texts[:count], stop, before) is not None) == is_completed


def test_a_long_prefix_is_not_decoded_as_a_whole() -> None:
    decoded: list[int] = []

    def count(token: int) -> str:
        decoded.append(token)
        return decode(token)

    prefix = [0] * 20_000
    stop_strings = StopStrings(["w1 w0", "x" * 50], 0, prefix, lambda _: count)
    assert not stop_strings.completed_by_prefix
    assert len(decoded) < 500
    assert [False, False, True] == [stop_strings.completed_by(token) for token in (0, 1, 0)]


# With engines


@pytest.fixture(scope="module", params=["plain_engine", "drafting_engine"])
def engine(request: pytest.FixtureRequest) -> EngineHarness:
    """An engine that drafts all of :func:`whole_responses` correctly, and one without drafts."""
    harness: EngineHarness = request.getfixturevalue(request.param)
    if harness.history is not None:
        for number, result in enumerate(whole_responses(harness)):
            harness.add_history(f"stop-{number}", [result.token_ids])
    return harness


GREEDY = Sampling(n=1, max_tokens=60, temperature=0, allowed_token_ids=WITHOUT_EOS, logprobs=True)


def whole_responses(engine: EngineHarness) -> list[GenerationResult]:
    """Return greedy responses without stop strings, which drafts do not change."""
    return engine.sample(PROMPTS, GREEDY, "stop")


def texts(tokens: Sequence[int]) -> list[str]:
    return [f"w{token}" if number == 0 else f" w{token}" for number, token in enumerate(tokens)]


@pytest.mark.parametrize("min_tokens", [0, 11])
def test_the_first_stop_string_ends_a_response(
    engine: EngineHarness, min_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM finds it, so that no tokens are decoded a second time.
    monkeypatch.delattr("rollout_worker.engine.generation.token_decoder")
    requests, expected = [], []
    for number, (prompt, whole) in enumerate(zip(PROMPTS, whole_responses(engine), strict=True)):
        at = 20 + number % 7
        words = [f"w{token}" for token in whole.token_ids]
        # The first string of the list occurs last, within the same draft.
        stop = [" ".join(words[at + 2 : at + 5]), " ".join(words[at : at + 3])]
        sampling = GREEDY.model_copy(update={"stop": stop, "min_tokens": min_tokens})
        requests.append(engine.request(prompt, sampling, f"stop-{number}"))
        kept = first_stop(texts(whole.token_ids), stop, min_tokens)
        assert kept is not None
        expected.append((whole, kept))
    results = engine.generate(requests)
    for (whole, kept), result in zip(expected, results, strict=True):
        assert (whole.token_ids[:kept], FinishReason.STOP) == (result.token_ids, result.finish_reason)
        assert result.logprobs is not None
        assert kept == len(result.logprobs)
        assert [WeightSpan(start=0, weight_version=0)] == result.weight_spans
        # A last token that was drafted belongs to a step of which the sampled token is cut off.
        assert result.draft_sources is None or kept == len(decode_draft_sources(result.draft_sources))
        ends_in_draft = any(decode_draft_sources(result.draft_sources or b"")[-1:])
        assert kept + ends_in_draft == result.num_decoding_steps + result.num_accepted_tokens
        assert 0 <= result.num_accepted_tokens <= result.num_draft_tokens
    if engine.history is not None:
        assert accepted_share(results) > 0.2


@pytest.mark.parametrize("interval", [0, 16])
def test_a_continued_response_ends_with_a_stop_string_that_begins_in_its_prefix(
    engine: EngineHarness, interval: int
) -> None:
    requests = []
    for number, (prompt, whole) in enumerate(zip(PROMPTS, whole_responses(engine), strict=True)):
        words = [f"w{token}" for token in whole.token_ids]
        sampling = GREEDY.model_copy(update={"stop": [" ".join(words[48:54])]})
        requests.append(engine.request(prompt, sampling, f"stop-{number}"))
    stopped = engine.generate(requests)
    partials: list[tuple[int, Partial]] = []

    async def continue_all(length: int) -> list[GenerationResult]:
        calls = []
        for number, (request, result) in enumerate(zip(requests, stopped, strict=True)):
            calls.append(
                engine.engine.generate(
                    request,
                    0,
                    prefix=prefix_of(result, min(length, len(result.token_ids))),
                    on_partial=receiver(number),
                    partial_interval=interval,
                )
            )
        return list(await asyncio.gather(*calls))

    def receiver(number: int) -> Callable[[Partial], None]:
        return lambda partial: partials.append((number, partial))

    for length in (1, 49, 52, 54):
        partials.clear()
        results = engine.loop.run(continue_all(length))
        for expected, actual in zip(stopped, results, strict=True):
            assert FinishReason.STOP == actual.finish_reason
            assert expected.token_ids == actual.token_ids
            assert expected.weight_spans == actual.weight_spans
            assert actual.logprobs is not None
            assert len(actual.token_ids) == len(actual.logprobs)
        for number, partial in partials:
            assert stopped[number].token_ids[: len(partial.token_ids)] == partial.token_ids
        assert (interval > 0 and length == 1) == bool(partials)
    engine.sample([PROMPT], Sampling(n=1, max_tokens=2))
    assert 0 == engine.engine.counters.running


def test_a_stop_string_in_the_last_token_has_precedence_over_the_length(engine: EngineHarness) -> None:
    whole = whole_responses(engine)[0]
    for stop, max_tokens in ((f"w{whole.token_ids[29]}", 30), ("never", 30)):
        kept = first_stop(texts(whole.token_ids[:max_tokens]), [stop], 29)
        sampling = GREEDY.model_copy(update={"stop": [stop], "min_tokens": 29, "max_tokens": max_tokens})
        [result] = engine.generate([engine.request(PROMPTS[0], sampling, "stop-0")])
        assert whole.token_ids[:30] == result.token_ids
        assert (FinishReason.LENGTH if kept is None else FinishReason.STOP) == result.finish_reason


def test_characters_of_several_tokens_are_decoded_as_in_vllm() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = tokenizer.encode("a→b€").ids
    decoder = functools.partial(
        token_decoder, PreTrainedTokenizerFast(tokenizer_object=tokenizer), tokenizer.encode("x").ids
    )
    decode_token = decoder()
    assert ["a", "", "", "→", "b", "", "", "€"] == [decode_token(token) for token in tokens]
    for length in range(4):
        stop = StopStrings(["→"], 0, tokens[:length], decoder)
        assert not stop.completed_by_prefix
        assert [False] * (3 - length) + [True] == [stop.completed_by(token) for token in tokens[length:4]]
    assert StopStrings(["→"], 0, tokens[:4], decoder).completed_by_prefix
    many = tokens * 100
    for length in range(len(many) - len(tokens), len(many)):
        last = many[length]
        assert (last == tokens[-1]) == StopStrings(["€"], 0, many[:length], decoder).completed_by(last)
