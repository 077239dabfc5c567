"""The transfer agent of production: NIXL with UCX, through its bindings.

Not through NIXL's Python wrapper, which fixes the progress thread's delay at 0, so that it burns a core. Not
thread-safe: the owner makes every call, serially.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from pdserve.errors import ConfigError, MissingDependencyError, PeerDisconnectedError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_PART_BYTES = 8 * 1024 * 1024
"""What one NIXL request carries: throughput is flat from here on, and no post blocks other calls for long."""
_PARTS_IN_FLIGHT = 4
"""NIXL requests that one read keeps in flight; the next are posted by `poll`."""
_MAX_DEVICES = 16


def prepare_environment(loopback: bool) -> None:
    """Set what UCX and NIXL read when they are imported; what the operator has set stays.

    `loopback`: all peers are on this machine, so UCX need not listen on any other interface.
    """
    if loopback:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # none: by default UCX takes SIGHUP from the process


@attrs.define
class _Read:
    peer: str
    segment: tuple[Any, int]
    """NIXL memory type and device of the peer's pages."""
    address: int
    page_bytes: int
    parts: deque[tuple[NDArray[np.int64], NDArray[np.int64]]]
    """(remote, local) pages that have not been posted yet."""
    note: bytes
    active: list[int] = attrs.field(factory=list)
    """NIXL requests that have been posted and are not terminal."""
    error: TransferError | None = None


class NixlAgent:
    """One NIXL agent with the UCX backend and a progress thread that wakes every `progress_delay_us` microseconds.

    Raises MissingDependencyError when NIXL is not installed, ConfigError when it cannot start for want of a network
    device that does not exist, TransferError when it cannot start otherwise.
    """

    def __init__(self, name: str, *, progress_delay_us: int = 1000) -> None:
        try:
            from nixl_cu12 import _bindings as bindings
        except ImportError as error:
            raise MissingDependencyError("NIXL is missing: pip install nixl-cu12==1.5.1") from error
        self._name = name
        self._nixl: Any = bindings
        self._errors: tuple[type[Exception], ...] = tuple(
            value for key, value in vars(bindings).items() if key.startswith("nixl") and key.endswith("Error")
        )
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = progress_delay_us
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        self._agent: Any = self._try(bindings.nixlAgent, name, config)
        try:
            self._try(self._agent.createBackend, "UCX", {})
        except TransferError as error:
            devices = os.environ.get("UCX_NET_DEVICES", "")
            if missing := _missing_devices(devices):
                raise ConfigError(
                    f"--nixl-device (UCX_NET_DEVICES) {devices}: no network device {', '.join(missing)}"
                ) from error
            raise
        self._base = 0
        self._segment: tuple[Any, int] = (bindings.DRAM_SEG, 0)
        self._registered: Any = None
        self._remote_segments: dict[tuple[str, int], tuple[Any, int]] = {}
        self._handles = count(1)
        self._reads: dict[int, _Read] = {}

    @property
    def name(self) -> str:
        return self._name

    def register(self, address: int, nbytes: int, device: str) -> None:
        kind, _, index = device.partition(":")
        if kind == "cuda":
            self._segment = (self._nixl.VRAM_SEG, int(index or 0))
        elif kind != "cpu":
            raise TransferError(f"memory of device {device} cannot be registered")
        memory_type, device_id = self._segment
        self._base = address
        self._registered = self._nixl.nixlRegDList(memory_type, [(address, nbytes, device_id, "")])
        self._try(self._agent.registerMem, self._registered, [])

    def metadata(self) -> bytes:
        return bytes(self._try(self._agent.getLocalMD))

    def add_peer(self, metadata: bytes) -> str:
        return bytes(self._try(self._agent.loadRemoteMD, metadata)).decode()

    def remove_peer(self, name: str) -> None:
        for key in [key for key in self._remote_segments if key[0] == name]:
            del self._remote_segments[key]
        with suppress(self._nixl.nixlNotFoundError, self._nixl.nixlInvalidParamError):
            self._agent.invalidateRemoteMD(name)

    def post_read(
        self, peer: str, address: int, page_bytes: int, remote: Sequence[int], local: Sequence[int], note: bytes
    ) -> int:
        if len(remote) != len(local) or not remote:
            raise TransferError(f"{len(remote)} remote pages, {len(local)} local ones")
        theirs, ours = np.asarray(remote, dtype=np.int64), np.asarray(local, dtype=np.int64)
        step = max(1, _PART_BYTES // page_bytes)
        parts = deque((theirs[i : i + step], ours[i : i + step]) for i in range(0, len(theirs), step))
        segment = self._find(peer, address + remote[0] * page_bytes, page_bytes, address)
        read = _Read(peer, segment, address, page_bytes, parts, note)
        self._fill(read)
        if read.error is not None and not read.active:
            raise read.error
        handle = next(self._handles)
        self._reads[handle] = read
        return handle

    def poll(self, handle: int) -> bool:
        read = self._reads[handle]
        read.active = [request for request in read.active if not self._terminal(read, request)]
        self._fill(read)
        if read.active:
            return False
        if read.error is not None:
            raise read.error
        self.notify(read.peer, read.note)
        return True

    def release(self, handle: int) -> None:
        read = self._reads.pop(handle)
        for request in read.active:
            self._discard(request)

    def notify(self, peer: str, note: bytes) -> None:
        self._try(self._agent.genNotif, peer, note, [])

    def notifications(self) -> list[tuple[str, bytes]]:
        arrived = self._try(self._agent.getNotifs, {}, [])
        return [(sender, bytes(note)) for sender, notes in arrived.items() for note in notes]

    def close(self) -> None:
        self._reads.clear()
        self._agent = self._registered = None

    def _fill(self, read: _Read) -> None:
        """Post parts up to the window. A failure is kept: it ends the read once what is in flight is terminal."""
        while read.parts and read.error is None and len(read.active) < _PARTS_IN_FLIGHT:
            theirs, ours = read.parts.popleft()
            try:
                request = self._try(
                    self._agent.createXferReq,
                    self._nixl.NIXL_READ,
                    self._descriptors(self._segment, self._base, read.page_bytes, *_runs(ours, theirs)),
                    self._descriptors(read.segment, read.address, read.page_bytes, *_runs(theirs, ours)),
                    read.peer,
                    b"",
                    [],
                )
            except TransferError as error:
                read.error = error
                return
            # Whatever the post says (done at once with CMA, failed, in progress), `poll` reads how the request ends.
            read.active.append(request)
            try:
                self._try(self._agent.postXferReq, request, b"")
            except TransferError as error:
                read.error = error

    def _terminal(self, read: _Read, request: int) -> bool:
        try:
            status = self._try(self._agent.getXferStatus, request)
            if status == self._nixl.NIXL_IN_PROG:
                return False
            if status != self._nixl.NIXL_SUCCESS:
                raise TransferError(f"a read from {read.peer} ended with {status}")
        except TransferError as error:
            if read.error is None or isinstance(error, PeerDisconnectedError):
                read.error = error
        self._discard(request)
        return True

    def _discard(self, request: int) -> None:
        with suppress(*self._errors):
            self._agent.releaseXferReq(request)

    def _find(self, peer: str, address: int, nbytes: int, key: int) -> tuple[Any, int]:
        """Memory type and device under which the peer has registered that range: its metadata knows."""
        found = self._remote_segments.get((peer, key))
        if found is not None:
            return found
        nixl = self._nixl
        candidates = [self._segment, (nixl.DRAM_SEG, 0), *((nixl.VRAM_SEG, i) for i in range(_MAX_DEVICES))]
        for segment in candidates:
            page = self._descriptors(segment, address, nbytes, np.zeros(1, np.int64), np.ones(1, np.int64))
            with suppress(*self._errors):
                if self._agent.checkRemoteMD(peer, page) == nixl.NIXL_SUCCESS:
                    self._remote_segments[peer, key] = segment
                    return segment
        raise TransferError(f"{peer} is not known or has not registered {address:#x}")

    def _descriptors(
        self, segment: tuple[Any, int], base: int, page_bytes: int, first: NDArray[np.int64], pages: NDArray[np.int64]
    ) -> Any:  # noqa: ANN401
        memory_type, device_id = segment
        rows = np.empty((len(first), 3), dtype=np.uint64)
        rows[:, 0] = base + first * page_bytes
        rows[:, 1] = pages * page_bytes
        rows[:, 2] = device_id
        return self._nixl.nixlXferDList(memory_type, rows)

    def _try(self, fn: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        try:
            return fn(*args)
        except self._nixl.nixlRemoteDisconnectError as error:
            raise PeerDisconnectedError(f"NIXL: the peer is disconnected ({error})") from error
        except self._errors as error:
            raise TransferError(f"NIXL: {type(error).__name__} ({error})") from error


def _missing_devices(choice: str) -> list[str]:
    """Which names of a UCX_NET_DEVICES the system does not have; UCX itself says so only in its log, and goes on."""
    if choice == "all" or choice.startswith("^"):
        return []
    names = [word.strip().partition(":")[0] for word in choice.split(",")]
    classes = [Path("/sys/class/net"), Path("/sys/class/infiniband")]
    # A bracket is a range of devices in UCX.
    return [name for name in names if name and "[" not in name and not any((kind / name).exists() for kind in classes)]


def _runs(pages: NDArray[np.int64], others: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First page and length of each run that is contiguous in both lists; the same cuts whichever comes first."""
    cuts = np.flatnonzero((np.diff(pages) != 1) | (np.diff(others) != 1)) + 1
    starts = np.concatenate((np.zeros(1, np.int64), cuts))
    return pages[starts], np.diff(np.append(starts, len(pages)))
