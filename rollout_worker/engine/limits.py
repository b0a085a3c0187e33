"""Timeouts and limits of an engine."""

from __future__ import annotations

ABORT_RETRY_INTERVAL_S = 0.02
"""Seconds after which an abort is repeated, because vLLM ignores an abort of a call that it has not received yet."""
LIVENESS_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks that vLLM's core process is alive, while a call to it is waited for."""
HISTORY_POLL_INTERVAL_S = 0.02
"""Seconds between two checks whether the announced history can be drafted from."""
MAX_DEFAULT_PLACES = 2048
"""Places for drafts and the tokens after them, of all responses, up to which vLLM's own limit of a step is kept."""
MIN_SCHEDULED_TOKENS = 8192
"""Tokens that a step schedules at least if there are more places. This is vLLM's own default on data center GPUs."""
PROMPT_TOKENS_BESIDE_PLACES = 4096
"""Tokens of prompts that such a step can read while all places are planned."""
DEFAULT_CUDA_GRAPH_TOKENS = 512
"""Tokens of the largest CUDA graph that vLLM captures by default."""
MAX_CUDA_GRAPH_TOKENS = 2048
"""Tokens of the largest CUDA graph that is captured for batches with drafts. Each graph takes memory and start time. In
larger steps, the GPU is estimated to work for longer than it takes to launch its kernels."""
CPU_KV_CACHE_BYTES = 1 << 30
"""Size of the KV cache of a CPU engine whose manifest does not set it."""
MAX_BATCH_ADAPTERS = 2
"""Adapters that one batch may use: that of the responses which started before an update, and the newest."""
MAX_CPU_ADAPTERS = 8
"""Adapters that vLLM keeps in main memory. It reads a dropped one again from its directory, and dies if that fails."""
TRANSFER_CONNECT_TIMEOUT_S = 15.0
"""Seconds for which an engine tries to reach a trainer whose group it is to join."""
TRANSFER_RETRY_INTERVAL_S = 0.1
"""Seconds between two attempts to reach it."""
