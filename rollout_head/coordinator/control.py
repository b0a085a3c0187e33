"""Control messages: cancellations, weight updates, pauses, and the close of the job."""

from __future__ import annotations

from rollout_api.protocol.messages import (
    Cancel,
    CodecError,
    ControlMessage,
    InitWeightTransfer,
    Pause,
    Resume,
    WeightUpdate,
    decode,
)
from rollout_head.coordinator.cancellations import Cancellations
from rollout_head.coordinator.dead_letters import DeadLetters
from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.pause import PauseAnnouncer
from rollout_head.coordinator.weights import WeightAnnouncer
from rollout_store.job import Entry, JobStore, Stream


class ControlProcessor:
    """Processes control messages."""

    def __init__(
        self,
        job_store: JobStore,
        cancellations: Cancellations,
        weights: WeightAnnouncer,
        pause: PauseAnnouncer,
        engines: EngineTracker,
        dead_letters: DeadLetters,
    ) -> None:
        self.closing = False
        """Whether a client has closed the job, which ends once all requests are answered."""
        self._job_store, self._cancellations, self._weights = job_store, cancellations, weights
        self._pause, self._engines, self._dead_letters = pause, engines, dead_letters

    async def restore(self) -> None:
        """Read from Redis whether the job was closed."""
        self.closing = await self._job_store.job.is_closing()

    async def process(self, entry: Entry) -> None:
        """Process an entry of the control stream."""
        try:
            message = decode(entry.data)
            if not isinstance(message, ControlMessage):
                raise CodecError(f"a {message.kind} in place of a control message")
        except CodecError as error:
            await self._dead_letters.add(Stream.CONTROL, entry, str(error))
            return
        if isinstance(message, WeightUpdate):
            newest = self._weights.desired_version
            if newest is not None and message.weight_version < newest:
                reason = f"weight version {message.weight_version} is older than {newest}, which was published before"
                await self._dead_letters.add(Stream.CONTROL, entry, reason)
                return
            await self._weights.publish(message, list(self._engines.engines))
        elif isinstance(message, InitWeightTransfer):
            await self._weights.init_transfer(message, self._engines.engines)
        elif isinstance(message, Cancel):
            if not await self._cancellations.cancel(entry.entry_id, message.request_ids):
                return
        elif isinstance(message, Pause | Resume):
            await self._pause.publish(message.mode if isinstance(message, Pause) else None, list(self._engines.engines))
        else:
            await self._job_store.job.set_closing()
            self.closing = True
            if self._pause.mode is not None:  # a paused job would never answer its requests
                await self._pause.publish(None, list(self._engines.engines))
        await self._job_store.incoming.delete(Stream.CONTROL, entry.entry_id)
