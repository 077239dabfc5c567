"""A process with a real NIXL agent and its owner; obeys one JSON command a line, answers each with one JSON line."""

from __future__ import annotations

import base64
import json
import os
import sys

import msgspec
import numpy as np
import trio

from pdserve.engine.base import KvMemory
from pdserve.engine.radix import KvCache
from pdserve.errors import TransferError
from pdserve.transfer.agent import KvHandle
from pdserve.transfer.nixl_agent import NixlAgent, prepare_environment
from pdserve.transfer.owner import TransferOwner
from pdserve.wire.messages import TransferMetadata

PAGE_BYTES = 64 * 1024
PAGES = 2048


class Node:
    def __init__(self, name):
        self.array = np.zeros(PAGES * PAGE_BYTES, dtype=np.uint8)
        self.pages = self.array.reshape(PAGES, PAGE_BYTES)
        self.cache = KvCache(PAGES, 4)
        memory = KvMemory(self.array.ctypes.data, self.array.nbytes, PAGE_BYTES, "cpu", self.array)
        self.owner = TransferOwner(
            NixlAgent(name), memory, token="secret", threaded=True, cache=self.cache, confirm_timeout=2.0
        )
        self.ends = []
        self.pulls = {}

    async def obey(self, op, **args):
        return await getattr(self, f"do_{op}")(**args)

    async def do_metadata(self):
        return {"metadata": base64.b64encode(msgspec.msgpack.encode(self.owner.metadata)).decode()}

    async def do_peer_up(self, metadata, node_id):
        blob = base64.b64decode(metadata)
        self.owner.peer_up("link", node_id, msgspec.msgpack.decode(blob, type=TransferMetadata))
        return {}

    async def do_link_lost(self):
        self.owner.link_lost("link")
        for _ in range(500):
            if not self.owner.stats().peers:
                return {}
            await trio.sleep(0.01)
        raise AssertionError("the peer was not removed")

    async def do_hold(self, count, scattered=False):
        pages = self.cache.allocate(count)
        if scattered:
            pages = pages[::2] + pages[1::2]
        for index, page in enumerate(pages):
            self.pages[page] = (index * 7 + 1) % 251

        def on_end(reason):
            self.ends.append(reason)
            self.cache.release(pages)

        return {"handle": base64.b64encode(self.owner.hold(pages, 1, on_end, 30.0).handle).decode()}

    async def do_start(self, handle, skip=0):
        """Start a pull and return at once."""
        decoded = msgspec.msgpack.decode(base64.b64decode(handle), type=KvHandle)
        local = self.cache.allocate(len(decoded.pages) - skip)
        self.pulls[decoded.hold] = (self.owner.start_pull(decoded, skip, local), skip)
        return {"pull": decoded.hold}

    async def do_wait(self, pull):
        started = trio.current_time()
        read, skip = self.pulls.pop(pull)
        error = None
        try:
            await read.wait()
        except TransferError as exc:
            error = type(exc).__name__
        correct = all(
            (self.pages[page] == ((index + skip) * 7 + 1) % 251).all() for index, page in enumerate(read.local)
        )
        kept = not read.abandon()
        if kept:
            self.cache.release(read.local)
        return {"error": error, "correct": correct, "kept": kept, "elapsed": trio.current_time() - started}

    async def do_state(self):
        stats, times = self.owner.stats(), os.times()
        return {
            "running": stats.running,
            "quarantined": stats.quarantined,
            "peers": stats.peers,
            "holds": stats.holds,
            "available": self.cache.available,
            "ends": self.ends,
            "cpu": times.user + times.system,
        }


async def main(name):
    node = Node(name)
    async with trio.open_nursery() as nursery, trio.lowlevel.FdStream(os.dup(0)) as stdin:
        await nursery.start(node.owner.run)
        print(json.dumps({"ready": name}), flush=True)
        buffer = b""
        async for data in stdin:
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                print(json.dumps(await node.obey(**json.loads(line))), flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    prepare_environment(loopback=True)
    trio.run(main, sys.argv[1])
