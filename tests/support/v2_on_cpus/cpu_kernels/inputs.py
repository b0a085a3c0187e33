"""Kernels that lay out a step and update the requests after it, in vLLM 0.32 and 0.33.

These are the kernels of ``input_batch.py``, ``block_table.py`` and ``buffer_utils.py`` in ``vllm/v1/worker/gpu``. The
block tables of all groups of layers are passed as a tensor of addresses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpu_kernels import Grid, Kernel
from cpu_kernels.arrays import Array, enumerate_rows, int32_memory


def prepare_prefill_inputs(
    input_ids_ptr: Tensor,
    next_prefill_tokens_ptr: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the next prompt tokens of requests whose prompt is not computed yet (``_prepare_prefill_inputs_kernel``)."""
    requests = idx_mapping_ptr.numpy()
    computed, prefill = num_computed_tokens_ptr.numpy()[requests], prefill_lens_ptr.numpy()[requests]
    if not (computed < prefill).any():
        return
    input_ids, following = input_ids_ptr.numpy(), next_prefill_tokens_ptr.numpy()
    starts, token_ids = query_start_loc_ptr.numpy(), all_token_ids_ptr.numpy()
    for row in np.flatnonzero(computed < prefill).tolist():
        request, start, end = requests[row], starts[row], starts[row + 1]
        next_position = computed[row] + end - start
        input_ids[start:end] = token_ids[request, computed[row] : next_position]
        lookahead = token_ids[request, next_position : min(next_position + num_lookahead, prefill[row])]
        following[:, request] = 0
        following[: len(lookahead), request] = lookahead


def prepare_pos_seq_lens(
    pos_ptr: Tensor,
    seq_lens_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Compute the position of each token and the length of each sequence (``_prepare_pos_seq_lens_kernel``)."""
    requests = idx_mapping_ptr.numpy()
    starts = query_start_loc_ptr.numpy()[: len(requests) + 1]
    lengths = np.diff(starts)
    computed = num_computed_tokens_ptr.numpy()[requests]
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[: len(requests)] = computed + lengths
    seq_lens[len(requests) : max_num_reqs] = 0
    if len(requests):
        first, end = starts[0], starts[-1]
        pos_ptr.numpy()[first:end] = np.arange(first, end) + np.repeat(computed - starts[:-1], lengths)


def combine_sampled_and_draft_tokens(
    input_ids_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    prefill_len_ptr: Tensor,
    draft_tokens_ptr: Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: Tensor,
    logits_indices_ptr: Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Insert the last sampled token and the drafts of each request (``_combine_sampled_and_draft_tokens_kernel``)."""
    requests = idx_mapping_ptr.numpy()
    count = len(requests)
    if not count:
        return
    logits = cu_num_logits_ptr.numpy()[: count + 1]
    logit_counts = np.diff(logits)
    ends = query_start_loc_ptr.numpy()[1 : count + 1]
    logit_starts = ends - logit_counts
    first, end = logits[0], logits[-1]
    logits_indices_ptr.numpy()[first:end] = np.arange(first, end) + np.repeat(logit_starts - logits[:-1], logit_counts)

    seq_lens, prefill = seq_lens_ptr.numpy()[:count], prefill_len_ptr.numpy()[requests]
    generating = seq_lens > prefill
    input_ids = input_ids_ptr.numpy()
    if NUM_NEW_SAMPLED_TOKENS > 0:
        rows = np.flatnonzero(generating & (seq_lens - logit_counts >= prefill))
        input_ids[logit_starts[rows]] = last_sampled_tokens_ptr.numpy().reshape(-1)[requests[rows]]
    drafts = np.where(generating, np.maximum(logit_counts - NUM_NEW_SAMPLED_TOKENS, 0), 0)
    rows, places = enumerate_rows(drafts)
    if len(rows):
        input_ids[(ends - drafts)[rows] + places] = draft_tokens_ptr.numpy()[requests[rows], places]


def get_num_sampled_and_rejected(
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    seq_lens_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    prefill_len_ptr: Tensor,
) -> None:
    """Count rejected tokens; discard what was sampled within a prompt (``_get_num_sampled_and_rejected_kernel``)."""
    requests = idx_mapping_ptr.numpy()
    count = len(requests)
    in_prompt = seq_lens_ptr.numpy()[:count] < prefill_len_ptr.numpy()[requests]
    num_sampled = num_sampled_ptr.numpy()
    num_sampled[:count][in_prompt] = 0
    rejected = np.diff(cu_num_logits_ptr.numpy()[: count + 1]) - num_sampled[:count]
    rejected[in_prompt] = 0
    num_rejected_ptr.numpy()[:count] = rejected


def post_update(
    idx_mapping_ptr: Tensor,
    num_computed_tokens_ptr: Tensor,
    last_sampled_tokens_ptr: Tensor,
    output_bin_counts_ptr: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: Tensor,
    num_rejected_ptr: Tensor,
    query_start_loc_ptr: Tensor | None,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    total_len_ptr: Tensor,
    draft_tokens_ptr: Tensor | None = None,
    draft_tokens_out_ptr: Tensor | None = None,
    num_draft_tokens: int = 0,
) -> None:
    """Append the sampled tokens to their requests, and store their drafts (``_post_update_kernel``)."""
    mapping = idx_mapping_ptr.numpy()
    rows = np.flatnonzero(mapping >= 0)
    requests = mapping[rows]
    if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:  # vLLM 0.33
        draft_tokens_out_ptr.numpy()[requests] = draft_tokens_ptr.numpy()[rows]
    num_sampled, sampled = num_sampled_ptr.numpy()[rows], sampled_tokens_ptr.numpy()
    total_len = total_len_ptr.numpy()

    element_rows, places = enumerate_rows(num_sampled)
    element_requests = requests[element_rows]
    tokens = sampled[rows[element_rows], places]
    all_token_ids_ptr.numpy()[element_requests, total_len[element_requests] + places] = tokens
    if output_bin_counts_ptr is not None:
        np.add.at(output_bin_counts_ptr.numpy(), (element_requests, tokens), 1)
    with_tokens = num_sampled > 0
    last = sampled[rows[with_tokens], num_sampled[with_tokens] - 1]
    last_sampled_tokens_ptr.numpy().reshape(-1)[requests[with_tokens]] = last
    total_len[requests] += num_sampled

    computed = -num_rejected_ptr.numpy()[rows]
    if query_start_loc_ptr is not None:
        computed += np.diff(query_start_loc_ptr.numpy()[: len(mapping) + 1])[rows]
    num_computed_tokens_ptr.numpy()[requests] += computed


def post_update_num_computed_tokens(
    idx_mapping_ptr: Tensor, num_computed_tokens_ptr: Tensor, query_start_loc_ptr: Tensor
) -> None:
    """Count the tokens of a step as computed (``_post_update_num_computed_tokens_kernel``)."""
    requests = idx_mapping_ptr.numpy()
    num_computed_tokens_ptr.numpy()[requests] += np.diff(query_start_loc_ptr.numpy()[: len(requests) + 1])


def expand_idx_mapping(
    idx_mapping_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Compute the request and the place in the request of each row of logits (``_expand_idx_mapping_kernel``)."""
    requests = idx_mapping_ptr.numpy()
    if not len(requests):
        return
    logits = cu_num_logits_ptr.numpy()[: len(requests) + 1]
    rows, places = enumerate_rows(np.diff(logits))
    expanded_idx_mapping_ptr.numpy()[logits[0] : logits[-1]] = requests[rows]
    expanded_local_pos_ptr.numpy()[logits[0] : logits[-1]] = places


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks_ptr: Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the block tables of the batch's requests (``_gather_block_tables_kernel``).

    The kernel clears rows that fill the batch up to the size of a CUDA graph. There are none on CPUs.
    """
    requests = batch_idx_to_req_idx.numpy()[:num_reqs]
    all_num_blocks = num_blocks_ptr.numpy()
    groups = zip(
        src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist(), block_table_strides.tolist(), strict=True
    )
    for group, (source, target, stride) in enumerate(groups):
        num_blocks = all_num_blocks[group, requests]
        width = int(num_blocks.max(initial=0))
        capacity = all_num_blocks.shape[1]
        rows = _table(source, capacity, stride)[requests, :width]
        used = np.arange(width) < num_blocks[:, None]
        np.copyto(_table(target, capacity, stride)[:num_reqs, :width], rows, where=used)


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    dcp_sharded: Tensor,
    slot_mappings_ptr: Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> Grid | None:
    """Compute where the keys and values of each token are stored (``_compute_slot_mappings_kernel``)."""
    requests = idx_mapping.numpy()
    if CP_SIZE != 1:
        return len(block_sizes), len(requests) + 1
    starts = query_start_loc.numpy()[: len(requests) + 1]
    first, end = int(starts[0]), int(starts[-1])
    token_requests = np.repeat(requests, np.diff(starts))
    positions = pos.numpy()[first:end]
    slot_mappings, enabled = slot_mappings_ptr.numpy(), slot_mapping_enabled.tolist()
    slot_mappings[:, end:max_num_tokens] = PAD_ID
    # A dummy request has the index -1 and no blocks.
    is_real = token_requests >= 0
    rows = int(requests.max(initial=0)) + 1
    groups = zip(block_table_ptrs.tolist(), block_table_strides.tolist(), block_sizes.tolist(), enabled, strict=True)
    for group, (address, stride, block_size, is_enabled) in enumerate(groups):
        if is_enabled:
            blocks, offsets = np.divmod(positions, block_size)
            numbers = _table(address, rows, stride)[np.where(is_real, token_requests, 0), np.where(is_real, blocks, 0)]
            slots = numbers.astype(np.int64) * block_size + offsets
            slot_mappings[group, first:end] = np.where(is_real, slots, PAD_ID)
        else:
            slot_mappings[group, first:end] = PAD_ID
    return None


def apply_write(
    output_ptr: Tensor,
    output_stride: int | Tensor,
    write_indices_ptr: Tensor,
    write_starts_ptr: Tensor,
    write_contents_ptr: Tensor,
    write_cu_lens_ptr: Tensor,
    write_group_ids_ptr: Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> Grid | None:
    """Copy values that the host has staged into rows of a tensor (``_apply_write_kernel``)."""
    if MULTI_GROUP or not output_ptr.is_contiguous():
        return (len(write_indices_ptr),)
    output: Array = output_ptr.numpy().reshape(-1)
    contents = write_contents_ptr.numpy()
    targets = write_indices_ptr.numpy().astype(np.int64) * output_stride + write_starts_ptr.numpy()
    start = 0
    for target, end in zip(targets.tolist(), write_cu_lens_ptr.tolist(), strict=True):
        output[target : target + end - start] = contents[start:end]
        start = end
    return None


def _table(address: int, rows: int, stride: int) -> npt.NDArray[np.int32]:
    return int32_memory(address, rows * stride).reshape(rows, stride)


KERNELS: dict[str, Kernel] = {
    "input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    "input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
    "input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
    "input_batch._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
    "input_batch._post_update_kernel": post_update,
    "input_batch._post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
    "input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
    "block_table._gather_block_tables_kernel": gather_block_tables,
    "block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    "buffer_utils._apply_write_kernel": apply_write,
}
