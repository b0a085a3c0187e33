"""Rollouts as NumPy arrays, and padded batches of them."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_api import FinishReason, InvalidRequestError, Rollout, RoutedExperts, Trajectory, WeightSpan
from rollout_api.arrays import TokenArrays, pad_batch


def rollout(tokens: list[int], logprobs: list[float] | None, spans: dict[int, int], name: str = "r") -> Rollout:
    return Rollout(
        rollout_id=f"job/{name}/0/0",
        problem_id="p",
        token_ids=tokens,
        logprobs=logprobs,
        weight_spans=[WeightSpan(start=start, weight_version=version) for start, version in spans.items()],
        finish_reason=FinishReason.STOP if tokens else FinishReason.FAILED,
    )


TWO_VERSIONS = rollout([7, 8, 9], [-0.5, -1.0, -1.5], {0: 3, 1: 4})


def test_arrays_of_a_rollout_have_one_element_per_token() -> None:
    arrays = TokenArrays.of(TWO_VERSIONS)
    assert (np.int64, np.float32, np.int64) == (
        arrays.token_ids.dtype,
        arrays.logprobs.dtype if arrays.logprobs is not None else None,
        arrays.weight_versions.dtype,
    )
    assert [7, 8, 9] == arrays.token_ids.tolist()
    assert arrays.logprobs is not None
    assert [-0.5, -1.0, -1.5] == arrays.logprobs.tolist()
    assert [3, 4, 4] == arrays.weight_versions.tolist() == TWO_VERSIONS.weight_versions


def test_missing_log_probabilities_stay_missing() -> None:
    assert TokenArrays.of(rollout([7], None, {0: 3})).logprobs is None
    assert pad_batch([([1], rollout([7], None, {0: 3}))], pad_token_id=0).logprobs is None


def test_a_batch_is_padded_to_its_longest_sequence() -> None:
    batch = pad_batch([([1, 2], TWO_VERSIONS), ([3], rollout([4], [-2.0], {0: 5}))], pad_token_id=99)
    assert [[1, 2, 7, 8, 9], [3, 4, 99, 99, 99]] == batch.input_ids.tolist()
    assert [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]] == batch.attention_mask.tolist()
    assert [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]] == batch.loss_mask.tolist()
    assert batch.logprobs is not None
    assert [[0, 0, -0.5, -1.0, -1.5], [0, -2.0, 0, 0, 0]] == batch.logprobs.tolist()
    assert [[-1, -1, 3, 4, 4], [-1, 5, -1, -1, -1]] == batch.weight_version.tolist()
    assert (np.int64, np.int64, np.int64, np.float32, np.int64) == (
        batch.input_ids.dtype,
        batch.attention_mask.dtype,
        batch.loss_mask.dtype,
        batch.logprobs.dtype,
        batch.weight_version.dtype,
    )


def test_a_batch_can_be_padded_further_for_kernels() -> None:
    batch = pad_batch([([1, 2], TWO_VERSIONS)], pad_token_id=0, pad_to_multiple_of=4)
    assert (1, 8) == batch.input_ids.shape == batch.loss_mask.shape == batch.weight_version.shape
    assert [1, 2, 7, 8, 9, 0, 0, 0] == batch.input_ids[0].tolist()


def test_the_environments_tokens_of_a_trajectory_are_masked() -> None:
    trajectory = Trajectory("t", [1, 2])
    trajectory.append(rollout([5, 6], [-0.1, -0.2], {0: 3}))
    trajectory.observe([50, 51])
    trajectory.append(rollout([7], [-0.3], {0: 4}))
    batch = pad_batch([trajectory], pad_token_id=0)
    assert [[1, 2, 5, 6, 50, 51, 7]] == batch.input_ids.tolist()
    assert [[0, 0, 1, 1, 0, 0, 1]] == batch.loss_mask.tolist()
    assert batch.logprobs is not None
    assert np.allclose([[0, 0, -0.1, -0.2, 0, 0, -0.3]], batch.logprobs)
    assert [[-1, -1, 3, 3, -1, -1, 4]] == batch.weight_version.tolist()


def test_a_rollout_without_tokens_trains_nothing() -> None:
    batch = pad_batch([([1], rollout([], None, {})), ([1, 2], TWO_VERSIONS)], pad_token_id=0)
    assert [0, 0, 0, 0, 0] == batch.loss_mask[0].tolist()
    assert batch.logprobs is not None


def test_a_batch_in_which_only_some_rollouts_have_log_probabilities_is_rejected() -> None:
    without = rollout([4], None, {0: 5}, "without")
    with pytest.raises(InvalidRequestError, match=r"job/without/0/0 was sampled without log-probabilities.*logprobs"):
        pad_batch([([1, 2], TWO_VERSIONS), ([3], without)], pad_token_id=0)


def test_an_empty_batch_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="no rollouts"):
        pad_batch([], pad_token_id=0)


def test_kept_tokens_are_flattened_with_offsets() -> None:
    rollout = kept_rollout([[3, 9], [4], [1, 2, 5]])
    arrays = TokenArrays.of(rollout)
    assert arrays.kept_token_ids is not None
    assert arrays.kept_offsets is not None
    assert (np.int32, np.int64) == (arrays.kept_token_ids.dtype, arrays.kept_offsets.dtype)
    assert [3, 9, 4, 1, 2, 5] == arrays.kept_token_ids.tolist()
    assert [0, 2, 3, 6] == arrays.kept_offsets.tolist()


def test_unknown_kept_tokens_are_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="the kept tokens at position 1 are unknown"):
        TokenArrays.of(kept_rollout([[3], [], [1]]))


def test_prompt_log_probabilities_are_an_array() -> None:
    rollout = kept_rollout([[3]]).model_copy(update={"prompt_logprobs": [-0.5, -1.5]})
    found = TokenArrays.of(rollout).prompt_logprobs
    assert found is not None
    assert (np.float32, [-0.5, -1.5]) == (found.dtype, found.tolist())


def test_routed_experts_are_a_view() -> None:
    experts = RoutedExperts(shape=[2, 1, 2], dtype="uint16", data=bytes([1, 0, 2, 0, 0, 1, 3, 0]))
    found = TokenArrays.of(TWO_VERSIONS.model_copy(update={"routed_experts": experts})).routed_experts
    assert found is not None
    assert [[[1, 2]], [[256, 3]]] == found.tolist()
    assert not found.flags.writeable
    assert TokenArrays.of(TWO_VERSIONS).routed_experts is None


def kept_rollout(kept: list[list[int]]) -> Rollout:
    return Rollout(
        rollout_id="j/r/0/0",
        problem_id="p",
        token_ids=[1] * len(kept),
        kept_token_ids=kept,
        weight_spans=[WeightSpan(start=0, weight_version=0)],
        finish_reason=FinishReason.STOP,
    )
