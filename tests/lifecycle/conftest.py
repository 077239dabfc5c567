"""Clusters in virtual time for the tests of this folder."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from lifecycle.cluster import BASE, Cluster
from pdserve.config import DecodeConfig, PrefillConfig


@asynccontextmanager
async def _cluster(prefill=None, decode=None, decodes=1, **master):
    async with trio.open_nursery() as nursery:
        it = Cluster(nursery, **master)
        await it.start(PrefillConfig(**{**BASE, "node_id": "p0", **(prefill or {})}))
        for i in range(decodes):
            await it.start(DecodeConfig(**{**BASE, "node_id": f"d{i}", **(decode or {})}))
        yield it
        await it.quiet()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _two_masters(decode=None, **master):
    async with trio.open_nursery() as nursery:
        first = Cluster(nursery, **master)
        second = Cluster(nursery, network=first.network, **master)
        await first.start(PrefillConfig(**{**BASE, "node_id": "p0"}), [second])
        await first.start(DecodeConfig(**{**BASE, "node_id": "d0", **(decode or {})}), [second])
        yield first, second
        await first.quiet()
        nursery.cancel_scope.cancel()


@pytest.fixture
def two_masters():
    """`async with two_masters(decode=…, **master) as (first, second)`: two Masters over p0 and d0; quiet at the end."""
    return _two_masters


@pytest.fixture
def cluster():
    """`async with cluster(prefill=…, decode=…, decodes=1, **master) as it`: a Master, p0, d0, …; quiet at the end."""
    return _cluster
