"""Timeouts and limits of weight transfers."""

from __future__ import annotations

MAX_READING_PAUSE_S = 0.02
"""Seconds, between two decoding steps, for which a CPU engine unpacks weights in order to pass them on."""
TRANSFER_CONNECT_TIMEOUT_S = 15.0
"""Seconds for which an engine tries to reach a trainer whose transfer group it joins, and after which torch tries once
more. The engine does not decode meanwhile."""
STREAM_CHUNK_BYTES = 32 << 20
"""Bytes of a tensor that are copied to or from the device at once while weights are passed on to another engine."""
STREAM_CONNECT_TIMEOUT_S = 20.0
"""Seconds to wait for a connection to the engine that passes its weights on, and for its first answer."""
STREAM_TOKEN_TIMEOUT_S = 2.0
"""Seconds within which a receiver that has connected must send its token."""
STREAM_MAX_HEADER_BYTES = 64 << 20
"""Maximum size of the list of tensors that a sender announces."""
STREAM_IDLE_TIMEOUT_S = 60.0
"""Seconds without a sent or received byte after which a connection that passes weights on is closed."""
STREAM_OFFER_TIMEOUT_S = 60.0
"""Seconds for which an engine waits for the engine to which it passes its weights on."""
STREAM_POLL_INTERVAL_S = 0.2
"""Seconds between two checks whether the sending engine must stop offering its weights."""
