"""Kernels of block tables and of staged writes: ``block_table.py`` and ``buffer_utils.py`` of vLLM 0.32.

The tables of all groups of layers are passed as a tensor of addresses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollout_worker.engine.cpu_kernels import Grid, Kernel
from rollout_worker.engine.cpu_kernels.arrays import Array, int32_memory


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
    "block_table._gather_block_tables_kernel": gather_block_tables,
    "block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    "buffer_utils._apply_write_kernel": apply_write,
}
