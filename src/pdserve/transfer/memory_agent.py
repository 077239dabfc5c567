"""A transfer agent within one process: real bytes, any clock, and the failures of the real one on demand."""

from __future__ import annotations

import ctypes
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

import attrs
import msgspec
import trio

from pdserve.errors import PeerDisconnectedError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    address: int
    nbytes: int


class MemoryNetwork:
    """What connects MemoryAgents, and where tests break it."""

    def __init__(self, delay: float = 0.0, *, land_early: bool = False) -> None:
        """`delay`: seconds that a read takes; 0: done at its first poll. `land_early`: pages land one after the other
        during the read, not all at its end."""
        self.delay = delay
        self.land_early = land_early
        self.drop: Callable[[str, str, bytes], bool] | None = None
        """Called with sender, receiver and note: True loses the note."""
        self._agents: dict[str, MemoryAgent] = {}
        self._gone: set[str] = set()
        self._failures: deque[TransferError] = deque()

    def fail_next(self, error: TransferError) -> None:
        """The next read to be posted ends with `error` instead of success; nothing of it lands, no note is sent."""
        self._failures.append(error)

    def disconnect(self, name: str) -> None:
        """The agent is gone for all others: their operations with it raise PeerDisconnectedError, nothing lands."""
        self._gone.add(name)

    def reconnect(self, name: str) -> None:
        self._gone.discard(name)

    def attach(self, agent: MemoryAgent) -> None:
        self._agents[agent.name] = agent

    def detach(self, agent: MemoryAgent) -> None:
        self._agents.pop(agent.name, None)

    def reach(self, name: str) -> MemoryAgent:
        """The living agent of that name. Raises PeerDisconnectedError."""
        agent = self._agents.get(name)
        if agent is None or name in self._gone:
            raise PeerDisconnectedError(f"{name} is gone")
        return agent

    def next_failure(self) -> TransferError | None:
        return self._failures.popleft() if self._failures else None

    def send(self, sender: str, receiver: str, note: bytes) -> None:
        agent = self.reach(receiver)
        if self.drop is None or not self.drop(sender, receiver, note):
            agent.inbox.append((sender, note))
            if agent.on_note is not None:
                agent.on_note()


@attrs.define
class _Read:
    peer: str
    copies: deque[tuple[int, int]]
    """(own address, peer's address) of the pages that have not landed yet."""
    total: int
    page_bytes: int
    note: bytes
    start: float
    duration: float
    failure: TransferError | None
    error: TransferError | None = None
    done: bool = False
    released: bool = False


class MemoryAgent:
    """As NixlAgent, within `network`. A released read runs on, like an aborted one of NIXL over TCP."""

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        *,
        delay: Callable[[], float] | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """`delay`: seconds that the next read takes; by default the network's."""
        self.inbox: list[tuple[str, bytes]] = []
        self.on_note: Callable[[], None] | None = None
        """Called when a notification has arrived in `inbox`."""
        self._name = name
        self._network = network
        self._delay = delay
        self._clock = clock
        self._range = (0, 0)
        self._peers: dict[str, _Metadata] = {}
        self._handles = count(1)
        self._reads: dict[int, _Read] = {}

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Metadata(self._name, *self._range))

    def register(self, address: int, nbytes: int, device: str) -> None:
        if device != "cpu":
            raise TransferError(f"only host memory can be copied within a process, not {device}")
        self._range = (address, nbytes)
        self._network.attach(self)

    def add_peer(self, metadata: bytes) -> str:
        try:
            peer = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise TransferError(f"unreadable metadata: {error}") from error
        self._peers[peer.agent] = peer
        return peer.agent

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)

    def post_read(
        self, peer: str, address: int, page_bytes: int, remote: Sequence[int], local: Sequence[int], note: bytes
    ) -> int:
        known = self._peer(peer)
        self._network.reach(peer)
        if len(remote) != len(local):
            raise TransferError(f"{len(remote)} remote pages, {len(local)} local ones")
        copies: deque[tuple[int, int]] = deque()
        for theirs, ours in zip(remote, local, strict=True):
            source, target = address + theirs * page_bytes, self._range[0] + ours * page_bytes
            _check(source, page_bytes, known.address, known.nbytes)
            _check(target, page_bytes, *self._range)
            copies.append((target, source))
        duration = self._network.delay if self._delay is None else self._delay()
        failure = self._network.next_failure()
        handle = next(self._handles)
        self._reads[handle] = _Read(peer, copies, len(copies), page_bytes, note, self._clock(), duration, failure)
        return handle

    def poll(self, handle: int) -> bool:
        self._advance()
        read = self._reads[handle]
        if read.error is not None:
            raise read.error
        return read.done

    def release(self, handle: int) -> None:
        read = self._reads[handle]
        read.released = True
        if read.done or read.error is not None:
            del self._reads[handle]

    def notify(self, peer: str, note: bytes) -> None:
        self._peer(peer)
        self._network.send(self._name, peer, note)

    def notifications(self) -> list[tuple[str, bytes]]:
        self._advance()
        notes, self.inbox = self.inbox, []
        return notes

    def close(self) -> None:
        self._reads.clear()
        self._network.detach(self)

    def _peer(self, name: str) -> _Metadata:
        if name not in self._peers:
            raise TransferError(f"peer {name} has not been added")
        return self._peers[name]

    def _advance(self) -> None:
        for handle, read in list(self._reads.items()):
            if not read.done and read.error is None:
                self._step(read)
            if read.released and (read.done or read.error is not None):
                del self._reads[handle]

    def _step(self, read: _Read) -> None:
        elapsed = self._clock() - read.start
        try:
            self._network.reach(read.peer)
            if elapsed >= read.duration:
                if read.failure is not None:
                    raise read.failure
                self._land(read, len(read.copies))
                read.done = True
                self._network.send(self._name, read.peer, read.note)
            elif self._network.land_early and read.failure is None:
                landed = read.total - len(read.copies)
                self._land(read, int(read.total * elapsed / read.duration) - landed)
        except TransferError as error:
            read.error = error

    def _land(self, read: _Read, pages: int) -> None:
        for _ in range(pages):
            target, source = read.copies.popleft()
            ctypes.memmove(target, source, read.page_bytes)


def _check(address: int, size: int, base: int, nbytes: int) -> None:
    if not base <= address <= base + nbytes - size:
        raise TransferError(f"{size} bytes at {address:#x} are not registered")
