"""A TCP proxy in front of Redis that can drop connections and delay traffic."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Proxy:
    """Forwards connections from a loopback port of its own."""

    def __init__(self, port: int) -> None:
        """Start to forward to *port*."""
        self.dropped = 0
        self._target = port
        self._delay = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    def drop(self) -> None:
        """Abort all connections, even in the middle of a message."""

        def cut() -> None:
            self.dropped += len(self._writers)
            for writer in list(self._writers):
                writer.transport.abort()

        self._loop.call_soon_threadsafe(cut)

    def delay(self, seconds: float) -> None:
        """Delay all traffic by *seconds* from now on."""
        self._delay = seconds

    def close(self) -> None:
        """Stop listening."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _end(self) -> None:
        self._server.close()
        connections = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        with suppress(asyncio.CancelledError):  # asyncio would report it
            await asyncio.gather(self._pipe(reader, far_writer), self._pipe(far_reader, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(1 << 16):
                if self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
