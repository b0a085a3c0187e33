"""Who gets the next place of a semaphore that several groups share."""

from __future__ import annotations

import asyncio

from rollout_operator.cluster.fair_semaphore import FairSemaphore


class Holders:
    """Tasks that hold places until they are released."""

    def __init__(self, places: int, places_per_group: int) -> None:
        self._semaphore = FairSemaphore(places, places_per_group)
        self.served: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """Let holders ask for places; the first letter of a name is the group."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(name))
        await self.settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _hold(self, name: str) -> None:
        async with self._semaphore.hold(name[0]):
            self.served.append(name)
            await self.ends[name].wait()


async def test_a_group_does_not_get_all_places() -> None:
    holders = Holders(4, 3)
    await holders.come(*(f"a{number}" for number in range(100)))
    assert ["a0", "a1", "a2"] == holders.served
    await holders.come("b0")
    assert ["a0", "a1", "a2", "b0"] == holders.served


async def test_a_free_place_goes_to_the_group_that_holds_the_fewest() -> None:
    holders = Holders(2, 2)
    await holders.come(*(f"a{number}" for number in range(100)), "b0", "b1", "c0")
    await holders.leave("a0")
    assert "b0" == holders.served[-1]
    await holders.leave("a1")
    assert "a2" == holders.served[-1]
    await holders.leave("a2")
    assert "c0" == holders.served[-1]
    await holders.leave("b0")
    assert "b1" == holders.served[-1]  # a holds no place, either, but was served later than b


async def test_groups_that_wait_are_served_in_turn() -> None:
    holders = Holders(1, 1)
    await holders.come("a0", "a1", "a2", "b0", "b1", "c0")
    for name in ("a0", "a1", "b0", "c0", "a2"):
        await holders.leave(name)
    assert ["a0", "a1", "b0", "c0", "a2", "b1"] == holders.served


async def test_a_place_is_free_again_whenever_its_holder_is_cancelled() -> None:
    holders = Holders(1, 1)
    await holders.come("a0", "a1", "a2", "a3")
    holders.tasks["a1"].cancel()  # while it waits
    await holders.settle()
    holders.tasks["a0"].cancel()  # while it holds a place
    await holders.settle()
    assert ["a0", "a2"] == holders.served
    holders.ends["a2"].set()
    await asyncio.sleep(0)
    holders.tasks["a3"].cancel()  # around the time at which it is granted a place
    await holders.settle()
    await holders.come("a4")
    assert "a4" == holders.served[-1]
