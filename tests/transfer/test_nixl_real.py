"""Real NIXL between real processes: content, transports, death and return of a peer, and what idling costs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

pytestmark = [
    pytest.mark.trio,
    pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl is not installed"),
]

SCRIPT = Path(__file__).with_name("nixl_node.py")
TRANSPORTS = pytest.mark.parametrize("transport", [None, "tcp,self"], ids=["default", "tcp"])


class Remote:
    def __init__(self, process, name):
        self.process = process
        self.name = name
        self._buffer = b""

    async def answer(self):
        with trio.fail_after(15):
            while b"\n" not in self._buffer:
                data = await self.process.stdout.receive_some()
                assert data, f"{self.name} has ended"
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    async def ask(self, op, **args):
        await self.process.stdin.send_all(json.dumps({"op": op, **args}).encode() + b"\n")
        return await self.answer()

    async def pull(self, handle, skip=0):
        return await self.ask("wait", **await self.ask("start", handle=handle, skip=skip))


@asynccontextmanager
async def node(name, transport):
    env = dict(os.environ) | ({"UCX_TLS": transport} if transport else {})
    process = await trio.lowlevel.open_process(
        [sys.executable, str(SCRIPT), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    try:
        remote = Remote(process, name)
        assert await remote.answer() == {"ready": name}
        yield remote
    finally:
        process.kill()
        with trio.move_on_after(5, shield=True):
            await process.wait()
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            await process.stdout.aclose()


async def introduce(p, d):
    await d.ask("peer_up", node_id="p", **await p.ask("metadata"))
    await p.ask("peer_up", node_id="d", **await d.ask("metadata"))


@TRANSPORTS
async def test_content_arrives_and_everything_is_given_back(transport):
    async with node("p-1", transport) as p, node("d-1", transport) as d:
        await introduce(p, d)
        for count, skip, scattered in [(1, 0, False), (5, 2, False), (700, 3, True)]:  # the last one is 44 MiB
            hold = await p.ask("hold", count=count, scattered=scattered)
            result = await d.pull(**hold, skip=skip)
            assert (result["error"], result["correct"], result["kept"]) == (None, True, True), (count, result)
        replay = await d.pull(**hold)
        assert replay["error"] == "TransferError"
        for remote in (p, d):
            state = await remote.ask("state")
            assert (state["running"], state["quarantined"], state["holds"]) == (0, 0, 0)
            assert (state["available"], state["peers"]) == (2048, 1)
        assert (await p.ask("state"))["ends"] == ["pulled"] * 3

        # A Master's link was lost on one side and came back: both directions work again.
        await d.ask("link_lost")
        await d.ask("peer_up", node_id="p", **await p.ask("metadata"))
        result = await d.pull(**await p.ask("hold", count=3))
        assert (result["error"], result["correct"]) == (None, True)
        await p.ask("link_lost")
        await p.ask("peer_up", node_id="d", **await d.ask("metadata"))
        result = await d.pull(**await p.ask("hold", count=3))
        assert (result["error"], result["correct"]) == (None, True)


@TRANSPORTS
async def test_killed_peer_is_told_at_once_and_its_next_life_serves(transport):
    async with node("d-1", transport) as d:
        async with node("p-1", transport) as p:
            await introduce(p, d)
            assert (await d.pull(**await p.ask("hold", count=2)))["error"] is None
            hold = await p.ask("hold", count=1500)
            p.process.send_signal(signal.SIGSTOP)  # it cannot confirm any more, whether or not the bytes arrive
            pull = await d.ask("start", **hold)
            p.process.kill()
            result = await d.ask("wait", **pull)
            assert (result["error"], result["kept"]) == ("PeerDisconnectedError", True)
            assert result["elapsed"] < 1
            await p.process.wait()
            late = await d.pull(**hold)
            assert late["error"] in ("PeerDisconnectedError", "TransferError")  # not admitted again
            assert late["elapsed"] < 1
        async with node("p-2", transport) as p:
            await introduce(p, d)
            result = await d.pull(**await p.ask("hold", count=2))
            assert (result["error"], result["correct"]) == (None, True)
            state = await d.ask("state")
            assert (state["running"], state["quarantined"], state["available"]) == (0, 0, 2048)


async def test_idle_owner_costs_little():
    async with node("p-1", None) as p:
        before = (await p.ask("state"))["cpu"]
        await trio.sleep(2)
        assert (await p.ask("state"))["cpu"] - before < 0.04 * 2 + 0.02  # os.times counts in hundredths
