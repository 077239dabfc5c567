"""Prefill and Decode nodes around MemoryAgents."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import trio

from pdserve.engine.base import KvMemory
from pdserve.engine.radix import KvCache
from pdserve.transfer.agent import KvHandle
from pdserve.transfer.memory_agent import MemoryAgent, MemoryNetwork
from pdserve.transfer.owner import TransferOwner

PAGE_BYTES = 64
PAGES = 16


class Node:
    """One owner with its memory and page pool."""

    def __init__(self, name, network, **options):
        self.name = name
        self.array = np.zeros(PAGES * PAGE_BYTES, dtype=np.uint8)
        self.memory = KvMemory(self.array.ctypes.data, self.array.nbytes, PAGE_BYTES, "cpu", self.array)
        self.cache = KvCache(PAGES, 4)
        self.agent = MemoryAgent(f"{name}-life1", network)
        self.owner = TransferOwner(
            self.agent, self.memory, **({"threaded": False, "cache": self.cache, "token": "secret"} | options)
        )
        self.ends = []

    def page(self, index):
        return self.array[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]

    def hold(self, count=3, timeout=30.0):
        """Pages filled with 1, 2, 3, … and a hold of them, which releases them when it ends."""
        pages = self.cache.allocate(count)
        for value, page in enumerate(pages, 1):
            self.page(page)[:] = value

        def on_end(reason):
            self.ends.append(reason)
            self.cache.release(pages)

        return self.owner.hold(pages, count * 4, on_end, timeout)

    def pull(self, hold, skip=0, count=None):
        handle = msgspec.msgpack.decode(hold.handle, type=KvHandle)
        local = self.cache.allocate(len(handle.pages) - skip if count is None else count)
        return self.owner.start_pull(handle, skip, local)


class Pair:
    def __init__(self, nursery, **options):
        """`options`: of the Decode node's owner."""
        self.network = MemoryNetwork()
        self.nursery = nursery
        self.p = Node("p", self.network)
        self.d = Node("d", self.network, **options)

    async def start(self):
        await self.nursery.start(self.p.owner.run)
        await self.nursery.start(self.d.owner.run)
        return self

    def introduce(self, link="link"):
        self.p.owner.peer_up(link, "d", self.d.owner.metadata)
        self.d.owner.peer_up(link, "p", self.p.owner.metadata)

    async def quiescent(self):
        """After a while nothing is in use any more, on either side."""
        await trio.sleep(1)
        for node in (self.p, self.d):
            stats = node.owner.stats()
            assert (stats.running, stats.quarantined, stats.holds) == (0, 0, 0)
            node.cache.check_integrity()
            assert node.cache.available == PAGES


@pytest.fixture
def new_node():
    """The class of nodes: pages of 64 bytes, 16 of them."""
    return Node


@pytest.fixture
def new_pair(nursery):
    """Two nodes that do not know each other yet, to be started; the test itself has to ask for `autojump_clock`."""
    return lambda **options: Pair(nursery, **options)


@pytest.fixture
async def pair(new_pair):
    """A started pair whose nodes know each other."""
    started = await new_pair().start()
    started.introduce()
    return started
