"""Functions of vLLM give the same results with its kernels in the interpreter and with those of ``cpu_kernels``."""

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
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.penalties import apply_penalties, bincount
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
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
        self.in_prompt = random.random(count) < 0.3
        self.drafts = np.where(self.in_prompt, 0, random.integers(0, DRAFTS + 1, count))
        self.lengths = np.where(self.in_prompt, random.integers(1, 9, count), self.drafts + 1)
        self.prefill = random.integers(10, 20, STATES)
        self.computed = self.prefill + random.integers(1, 20, STATES)
        self.computed[self.requests[self.in_prompt]] = random.integers(0, 10, self.in_prompt.sum())
        self.total = np.maximum(self.computed + 1, self.prefill)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.logits = np.concatenate([[0], np.cumsum(self.drafts + 1)])
        rows = np.repeat(np.arange(count), self.drafts + 1)
        self.expanded = self.requests[rows]
        self.places = np.arange(len(rows)) - self.logits[rows]
        self.token_ids = self.tokens((STATES, 64))
        self.seq_lens = self.computed[self.requests] + self.lengths

    def tokens(self, shape: Any) -> np.ndarray[Any, Any]:
        return self.random.integers(0, VOCABULARY, shape)

    def logit_values(self, rows: int | None = None) -> torch.Tensor:
        shape = (len(self.expanded) if rows is None else rows, VOCABULARY)
        return torch.tensor(self.random.normal(size=shape) * 3, dtype=torch.float32)

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
def test_prompt_tokens_are_copied(seed: int) -> None:
    step = Step(seed)
    assert_same(
        input_batch.prepare_prefill_inputs,
        int32(np.full(128, -5)),
        int32(np.full((2, STATES), -5)),
        int32(step.requests),
        int32(step.starts),
        int32(step.token_ids),
        int32(step.prefill),
        int32(step.computed),
    )


@seeds
def test_positions_and_sequence_lengths(seed: int) -> None:
    step = Step(seed)
    assert_same(
        input_batch.prepare_pos_seq_lens,
        int32(step.requests),
        int32([*step.starts, 99, 99]),
        int32(step.computed),
        int64(np.full(128, -5)),
        int32(np.full(STATES, -5)),
    )


@seeds
@pytest.mark.parametrize("new_tokens", [0, 1])
def test_sampled_and_draft_tokens_are_inserted(seed: int, new_tokens: int) -> None:
    step = Step(seed)
    assert_same(
        input_batch.combine_sampled_and_draft_tokens,
        int32(np.full(128, -5)),
        int32(step.requests),
        int64(step.tokens((STATES, 1))),
        int32(step.starts),
        int32(step.seq_lens),
        int32(step.prefill),
        int64(step.tokens((STATES, DRAFTS + 1))),
        int32(step.logits),
        int(step.logits[-1]),
        new_tokens,
    )


@seeds
def test_sampled_and_rejected_tokens_are_counted(seed: int) -> None:
    step = Step(seed)
    assert_same(
        input_batch.get_num_sampled_and_rejected,
        int32(step.random.integers(1, step.drafts + 2)),
        int32(step.seq_lens),
        int32(step.logits),
        int32(step.requests),
        int32(step.prefill),
    )


@seeds
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("with_queries", [False, True])
def test_sampled_tokens_are_appended(seed: int, counted: bool, with_queries: bool) -> None:
    step = Step(seed)
    sampled = np.where(step.in_prompt, 0, step.random.integers(1, step.drafts + 2))
    requests = np.where(step.random.random(len(step.requests)) < 0.2, -1, step.requests)
    tokens = step.tokens((len(requests), DRAFTS + 1))
    tokens[:, 1] = tokens[:, 0]  # counted twice
    assert_same(
        input_batch.post_update,
        int32(requests),
        int32(step.computed),
        int64(step.tokens((STATES, 1))),
        int32(step.random.integers(0, 5, (STATES, VOCABULARY))) if counted else None,
        int64(tokens),
        int32(sampled),
        int32(np.where(step.in_prompt, 0, step.drafts + 1 - sampled)),
        int32(step.starts) if with_queries else None,
        int32(step.token_ids),
        int32(step.total),
    )


@seeds
def test_computed_tokens_are_counted(seed: int) -> None:
    step = Step(seed)
    arguments = int32(step.requests), int32(step.computed), int32(step.starts)
    assert_same(input_batch.post_update_num_computed_tokens, *arguments)


@seeds
def test_requests_are_expanded_to_rows_of_logits(seed: int) -> None:
    step = Step(seed)
    arguments = int32(step.requests), int(step.logits[-1]), int32(step.logits), DRAFTS + 1
    assert_same(input_batch.expand_idx_mapping, *arguments)


@seeds
@pytest.mark.parametrize("groups", [1, 2])
def test_block_tables_and_slots(seed: int, groups: int) -> None:
    step = Step(seed)
    requests = int32(step.requests)
    blocks = [step.random.integers(1, 50, (groups, STATES, 8)) for _ in range(2)]
    counts = step.random.integers(5, 9, STATES)

    def use_tables() -> list[torch.Tensor]:
        tables = BlockTables(
            [16, 8][:groups], STATES, 64, [8] * groups, torch.device("cpu"), slot_mapping_enabled=[True, False][:groups]
        )
        results = []
        for numbers in blocks:  # the second time, some tables become shorter
            for request, count in enumerate(counts.tolist()):
                rows = tuple(numbers[group, request, :count].tolist() for group in range(groups))
                tables.append_block_ids(request, rows, overwrite=True)
            tables.apply_staged_writes()
            results += [table.clone() for table in tables.gather_block_tables(requests, len(requests))]
            mapping = requests.clone()
            mapping[0] = -1  # a dummy request
            positions = np.concatenate(
                [start + np.arange(length) for start, length in zip(step.computed, step.lengths, strict=False)]
            )
            slots = tables.compute_slot_mappings(mapping, int32(step.starts), int64(positions), 64)
            results.append(slots.clone())
            counts[:] -= 2
        counts[:] += 4
        return results

    # Staged writes of several groups run in the interpreter.
    assert_same(use_tables, interpreted=groups > 1)


@seeds
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_staged_writes(seed: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(seed)
    writes = [
        (int(random.integers(5)), int(random.integers(6)), random.integers(0, 9, random.integers(1, 5)).tolist())
        for _ in range(6)
    ]

    def write() -> tuple[torch.Tensor, torch.Tensor]:
        table = StagedWriteTensor((5, 10), dtype, torch.device("cpu"))
        column = StagedWriteTensor(5, dtype, torch.device("cpu"))
        for row, start, values in writes:
            table.stage_write(row, start, values)
            column.stage_write_elem(row, start)
        table.apply_write()
        column.apply_write()
        return table.gpu, column.gpu

    assert_same(write)


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
    *_, expected_tokens, expected_counts = expected
    *_, tokens, counts = actual
    assert torch.equal(counts, expected_counts)
    valid = torch.arange(DRAFTS + 1) < counts[:, None]
    assert torch.equal(tokens[valid], expected_tokens[valid])
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
    *_, expected_tokens, expected_counts = expected
    *_, tokens, counts = actual
    assert torch.equal(counts, expected_counts)
    valid = torch.arange(DRAFTS + 1) < counts[:, None]
    assert torch.equal(tokens[valid], expected_tokens[valid])


@seeds
def test_draft_tokens_are_gathered(seed: int) -> None:
    step = Step(seed)
    ends = step.starts[1:]
    assert_same(
        rejection_sampler.gather_draft_sampled,
        int32(step.tokens(128)),
        int64(step.random.integers(8, 24, 128)),
        int64(np.concatenate([np.arange(e - d - 1, e) for e, d in zip(ends, step.drafts, strict=True)])),
        int32(step.expanded),
        int32(step.places),
        int32(step.prefill),
    )


@seeds
def test_sampled_tokens_are_flattened(seed: int) -> None:
    step = Step(seed)

    def flatten() -> torch.Tensor:
        flat = torch.zeros(len(step.expanded), dtype=torch.int64)
        sampled, counts = int64(step.token_ids[: len(step.requests), : DRAFTS + 1]), int32(step.drafts + 1)
        arguments = flat, sampled, sampled.stride(0), counts, int32(step.logits)
        rejection_sampler._flatten_sampled_kernel[(len(step.requests),)](*arguments, num_warps=1)
        return flat

    assert_same(flatten)


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


@seeds
def test_temperature(seed: int) -> None:
    step = Step(seed)
    assert_same(apply_temperature, step.logit_values(), int32(step.expanded), step.temperatures())


@seeds
def test_min_p(seed: int) -> None:
    step = Step(seed)
    ratios = torch.tensor(step.random.choice([0.0, 0.05, 0.3], STATES), dtype=torch.float32)
    assert_same(apply_min_p, step.logit_values(), int32(step.expanded), ratios)


@seeds
def test_penalties(seed: int) -> None:
    step = Step(seed)
    repetition, frequency, presence = (
        torch.tensor(step.random.choice([neutral, *values], STATES), dtype=torch.float32)
        for neutral, values in ((1.0, (0.8, 1.5)), (0.0, (0.5, -0.3)), (0.0, (0.4, -0.2)))
    )
    drafts = step.tokens(len(step.expanded))
    drafts[step.random.random(len(drafts)) < 0.2] = -1
    assert_same(
        apply_penalties,
        step.logit_values(),
        int32(step.expanded),
        int32(drafts),
        int32(step.places),
        repetition,
        frequency,
        presence,
        int32(step.random.integers(-(2**31), 2**31, (STATES, -(-VOCABULARY // 32)))),
        int32(step.random.integers(0, 2, (STATES, VOCABULARY))),
    )


@seeds
def test_tokens_of_new_requests_are_counted(seed: int) -> None:
    step = Step(seed)
    token_ids = step.random.integers(0, 64, (STATES, 64))  # some occur repeatedly
    assert_same(
        bincount,
        int32(step.requests),
        int32(token_ids),
        int32(step.prefill - step.random.integers(0, 10, STATES)),
        int32(step.prefill),
        int32(np.full((STATES, -(-VOCABULARY // 32)), 3)),
        int32(np.full((STATES, VOCABULARY), 3)),
        int(step.prefill.max()),
    )


@seeds
@pytest.mark.parametrize("restores", [False, True])
def test_allowed_tokens_biases_and_minimum_lengths(seed: int, restores: bool) -> None:
    step = Step(seed)
    distinct = [int32([step.random.permutation(VOCABULARY)[:8] for _ in range(STATES)]) for _ in range(3)]
    allowed, biased, stops = distinct
    stops[: STATES // 2] = allowed[: STATES // 2]  # no token would be left
    counts = [int32(step.random.choice([0, 3, 8], STATES)) for _ in range(3)]
    assert_same(
        apply_logit_bias,
        step.logit_values(),
        int32(step.expanded),
        int64(step.random.integers(0, 20, len(step.expanded))),
        counts[0],
        allowed,
        counts[1],
        biased,
        torch.tensor(step.random.normal(size=(STATES, 8)), dtype=torch.float32),
        int32(step.random.integers(5, 30, STATES)),
        counts[2],
        torch.tensor(step.random.random(STATES) < 0.5),
        stops,
        restores,
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
