"""Functions of vLLM sample the same tokens with its kernels in the interpreter and with those of ``cpu_kernels``.

The other kernels are tested by the engine tests that run with them, which compare with the model's exact distribution.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("run with make test-v2", allow_module_level=True)

import cpu_kernels
import vllm.v1.worker.cpu.shm  # noqa: F401  # must be the first of vLLM's modules
from cpu_kernels import KernelReplacement, kernels
from cpu_kernels.sampling import murmur3_uniform, philox_uniform
from triton.runtime import interpreter
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

pytestmark = pytest.mark.v2

STATES = 12
"""Number of requests that the runner has memory for."""
DRAFTS = 4
VOCABULARY = 2100
"""More than two blocks of the kernels that sample."""

seeds = pytest.mark.parametrize("seed", range(6))


def find_kernel(name: str) -> tuple[Any, str, Any]:
    module_name, attribute = name.rsplit(".", 1)
    module = importlib.import_module(module_name)
    return module, attribute, getattr(module, attribute)


@pytest.fixture(autouse=True)
def _original_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the replacements of engines that other tests have run in this process."""
    for name in kernels():
        module, attribute, kernel = find_kernel(name)
        if isinstance(getattr(kernel, "func", None), KernelReplacement):
            monkeypatch.setattr(module, attribute, kernel.func.original)


@contextmanager
def replaced(*, interpreted: bool = False) -> Iterator[None]:
    """Replace all kernels, and let the interpreter fail unless *interpreted*."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a kernel ran in the interpreter")

    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in kernels().items():
            module, attribute, original = find_kernel(name)
            patch.setattr(module, attribute, KernelOverride(original, KernelReplacement(kernel, original)))
        if not interpreted:
            patch.setattr(interpreter.GridExecutor, "__call__", fail)
        yield


def run_both(
    function: Callable[..., Any], *args: Any, interpreted: bool = False, **kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Call a function with the original kernels and with the replacements.

    Returns:
        For each of both, all tensors that the function has received or returned.
    """
    results = []
    for use in (False, True):
        arguments, named = copy.deepcopy((args, kwargs))
        if use:
            with replaced(interpreted=interpreted):
                returned = function(*arguments, **named)
        else:
            returned = function(*arguments, **named)
        results.append([*tensors(arguments), *tensors(tuple(named.values())), *tensors(returned)])
    return results[0], results[1]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def assert_same(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    expected, actual = run_both(function, *args, **kwargs)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=2e-6, equal_nan=True)


class Step:
    """A random batch of requests: some within their prompt, others with drafts."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        count = int(random.integers(1, 9))
        self.requests = random.permutation(STATES)[:count]
        drafts = np.where(random.random(count) < 0.3, 0, random.integers(0, DRAFTS + 1, count))
        self.logits = np.concatenate([[0], np.cumsum(drafts + 1)])
        rows = np.repeat(np.arange(count), drafts + 1)
        self.expanded = self.requests[rows]
        self.places = np.arange(len(rows)) - self.logits[rows]

    def tokens(self, shape: Any) -> np.ndarray[Any, Any]:
        return self.random.integers(0, VOCABULARY, shape)

    def logit_values(self) -> torch.Tensor:
        return torch.tensor(self.random.normal(size=(len(self.expanded), VOCABULARY)) * 3, dtype=torch.float32)

    def temperatures(self) -> torch.Tensor:
        return torch.tensor(self.random.choice([0.0, 0.0, 0.7, 1.0, 1.3], STATES), dtype=torch.float32)

    def stream_seeds(self) -> torch.Tensor:
        return torch.tensor(self.random.integers(-(2**63), 2**63 - 1, STATES))


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32)


def int64(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int64)


def test_every_kernel_exists_and_has_the_expected_parameters(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        registered: dict[str, Any] = {}
        patch.setattr("vllm.triton_utils.dispatcher.register_kernels", registered.update)
        patch.setattr(cpu_kernels, "_filter_without_triton", lambda: None)
        cpu_kernels.register()
    assert registered.keys() == kernels().keys()
    assert not caplog.records


def test_a_kernel_with_other_parameters_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    name = "vllm.v1.worker.gpu.sample.min_p._min_p_kernel"
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        registered: dict[str, Any] = {}
        patch.setattr("vllm.triton_utils.dispatcher.register_kernels", registered.update)
        patch.setattr(cpu_kernels, "_filter_without_triton", lambda: None)
        patch.setattr(cpu_kernels, "kernels", lambda: {name: lambda logits_ptr: None, "vllm.missing._kernel": print})
        cpu_kernels.register()
    assert not registered
    assert [record.args[0] for record in caplog.records if record.args] == [name, "vllm.missing._kernel"]


@seeds
@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_tokens(seed: int, apply: bool, dtype: torch.dtype) -> None:
    step = Step(seed)
    assert_same(
        gumbel_sample,
        step.logit_values().to(dtype),
        int32(np.where(step.random.random(len(step.expanded)) < 0.1, -1, step.expanded)),
        step.temperatures(),
        step.stream_seeds(),
        int64(step.random.integers(0, 2**31, len(step.expanded))),
        apply_temperature=apply,
        is_drafting=seed % 2 == 0,
    )


def test_sampling_with_64_bits_runs_in_the_interpreter() -> None:
    step = Step(1)
    positions = int64(np.arange(len(step.expanded)))
    arguments = step.logit_values(), int32(step.expanded), step.temperatures(), step.stream_seeds(), positions
    options = {"apply_temperature": False, "is_drafting": False, "use_fp64": True}
    assert_same(gumbel_sample, *arguments, **options, interpreted=True)


def assert_same_verification(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> torch.Tensor:
    """Compare the sampled tokens of each request, of which the rest of a row is undefined; return their numbers."""
    *_, expected_tokens, expected_counts = expected
    *_, tokens, counts = actual
    assert torch.equal(counts, expected_counts)
    valid = torch.arange(DRAFTS + 1) < counts[:, None]
    assert torch.equal(tokens[valid], expected_tokens[valid])
    return counts


@seeds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("likely", [False, True])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 9000])
def test_verified_drafts(seed: int, dtype: torch.dtype, likely: bool, vocabulary: int) -> None:
    step = Step(seed)
    rows = len(step.expanded)
    logits = torch.tensor(step.random.normal(size=(rows, vocabulary)), dtype=torch.float32)
    drafts = step.tokens(rows)
    if likely:
        # Most drafts are accepted, and some end early by a placeholder.
        logits[np.arange(rows - 1), drafts[1:]] += 12
        drafts[step.random.random(rows) < 0.1] = -1
    expected, actual = run_both(
        rejection_sample,
        logits.to(dtype),
        None,
        int32(drafts),
        int32(step.logits),
        int64(step.random.integers(0, 2**31, rows)),
        int32(step.requests),
        int32(step.expanded),
        int32(step.places),
        step.temperatures(),
        step.stream_seeds(),
        DRAFTS,
    )
    counts = assert_same_verification(expected, actual)
    assert not likely or counts.max() > 1


@pytest.mark.parametrize("mode", ["fp64", "block", "synthetic"])
def test_other_kinds_of_verification_run_in_the_interpreter(mode: str) -> None:
    step = Step(3)
    rows = len(step.expanded)
    expected, actual = run_both(
        rejection_sample,
        step.logit_values(),
        None,
        int32(step.tokens(rows)),
        int32(step.logits),
        int64(np.arange(rows)),
        int32(step.requests),
        int32(step.expanded),
        int32(step.places),
        torch.ones(STATES),
        step.stream_seeds(),
        DRAFTS,
        synthetic_conditional_rates=torch.full((DRAFTS,), 0.5) if mode == "synthetic" else None,
        use_fp64=mode == "fp64",
        use_block_verification=mode == "block",
        interpreted=True,
    )
    assert_same_verification(expected, actual)


def score(logits: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = compute_topk_scores(logits, 3, sampled)
    return result.logprob_token_ids, result.logprobs, result.selected_token_ranks


@seeds
def test_log_probabilities_and_ranks(seed: int) -> None:
    step = Step(seed)
    assert_same(score, step.logit_values(), int64(step.tokens(len(step.expanded))))


def test_log_probabilities_and_ranks_of_bfloat16_are_computed_in_float32() -> None:
    # The interpreter compares numbers in bfloat16 as if they were integers.
    step = Step(1)
    logits, sampled = step.logit_values().bfloat16(), int64(step.tokens(len(step.expanded)))
    with replaced():
        assert all(
            torch.equal(*pair) for pair in zip(score(logits, sampled), score(logits.float(), sampled), strict=True)
        )


def test_random_numbers_are_uniform() -> None:
    count = 20_000
    positions = np.arange(count)
    numbers = [
        philox_uniform(np.full(count, 7), positions),
        murmur3_uniform(np.array([-3]), np.array([5]), count)[0],
        murmur3_uniform(np.full(count, 11), positions, 1)[:, 0],
    ]
    for values in numbers:
        assert values.min() > 0
        assert values.max() <= 1
        histogram = np.histogram(values, bins=50, range=(0, 1))[0]
        assert ((histogram - count / 50) ** 2 / (count / 50)).sum() < 110
