"""D's READs, from the wait for their peer to the moment from which nothing can land any more.

No I/O: what there is to do is given to the owner as calls, whose results come back here.
"""

from __future__ import annotations

import secrets
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Protocol

import trio

from pdserve.errors import PeerDisconnectedError, TransferError
from pdserve.transfer.calls import Call, ignore
from pdserve.transfer.pull import Note, Pull, Stage, encode_note
from pdserve.transfer.quarantine import Quarantine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.transfer.agent import KvHandle, TransferAgent
    from pdserve.transfer.confirm import Confirmations
    from pdserve.transfer.peers import PeerTable


class Destination(Protocol):
    """What reads need of the `KvCache` whose pages they write to."""

    def quarantine(self, pages: Sequence[int]) -> None: ...
    def unquarantine(self, pages: Sequence[int]) -> None: ...


class Reads:
    """Pulls that wait for their peer or may still write. The rest of their life is in `Confirmations`."""

    def __init__(
        self,
        agent: TransferAgent,
        peers: PeerTable,
        confirmations: Confirmations,
        cache: Destination,
        limits: dict[Stage, float],
        *,
        delay: float,
        fail: Callable[[], bool],
        on_disconnect: Callable[[str, PeerDisconnectedError], None],
        on_progress: Callable[[], None],
    ) -> None:
        """`on_disconnect` is told of a peer that a read did not find; `on_progress`: another round may have work."""
        self._agent = agent
        self._peers = peers
        self._confirmations = confirmations
        self._cache = cache
        self._limits = limits
        self._delay = delay
        self._fail = fail
        self._on_disconnect = on_disconnect
        self._on_progress = on_progress
        self._ids = count(1)
        self._queued: list[Pull] = []
        self._due: list[tuple[float, Pull]] = []
        """Reads to post, each at its time."""
        self._running: dict[int, Pull] = {}
        """By id, all in stage READING: due, being posted, or under way."""
        self._handles: dict[int, int] = {}
        """The agent's handles of those under way."""
        self._terminal: list[int] = []
        """Handles to release."""
        self.quarantine = Quarantine()
        """Pages of running reads that their request has left."""

    def __len__(self) -> int:
        """Reads that are not terminal, abandoned ones included."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._queued)

    def start(self, handle: KvHandle, remote: Sequence[int], local: Sequence[int]) -> Pull:
        """Queue a read of the `remote` pages of `handle` into the `local` ones. Without any it is over at once."""
        pull = Pull(next(self._ids), handle, remote, local, secrets.randbits(63), self._limits, self._abandon)
        if local:
            self._queued.append(pull)
            self._peers.want(handle.agent)
        else:
            pull.enter(Stage.ENDED)
        return pull

    def calls(self, now: float) -> list[Call]:
        """What the agent has to do for the reads now."""
        release = [Call("release", self._agent.release, (handle,), ignore) for handle in self._terminal]
        self._terminal.clear()
        self._admit_queued(now)
        posts = self._posts(now)
        polls = [
            Call("poll", self._agent.poll, (handle,), partial(self._polled, self._running[id_]))
            for id_, handle in self._handles.items()
        ]
        return [*release, *posts, *polls]

    def next_due(self) -> float:
        """When the next read has to be posted; infinity when none waits for its time."""
        return min((at for at, _ in self._due), default=inf)

    def fail_queued(self, error: TransferError, agent: str | None = None) -> None:
        """Those that wait for the peer `agent` (None: for any) will not be read."""
        for pull in [pull for pull in self._queued if agent in (None, pull.handle.agent)]:
            self._queued.remove(pull)
            pull.fail(error)
            pull.enter(Stage.ENDED)

    def fail_all(self, error: TransferError, agent: str | None = None) -> None:
        """Tell everyone who waits. Reads that are running stay so until the agent ends them."""
        self.fail_queued(error, agent)
        for pull in self._running.values():
            if agent in (None, pull.handle.agent):
                pull.fail(error)

    def agent_destroyed(self) -> None:
        """Nothing can land any more: all pages leave the quarantine."""
        for pull in self._running.values():
            self._leave_quarantine(pull)
            pull.enter(Stage.ENDED)
        self._running.clear()

    def _abandon(self, pull: Pull) -> bool:
        if pull.stage is Stage.READING:
            self._cache.quarantine(pull.local)
            self.quarantine.add(pull.id, pull.local, trio.current_time())
            pull.fail(TransferError(f"abandoned: {pull}"))
            return True
        if pull.stage is Stage.QUEUED:
            self._queued.remove(pull)
        self._confirmations.forget(pull)
        if pull.stage is not Stage.ENDED:
            pull.fail(TransferError(f"abandoned: {pull}"))
            pull.enter(Stage.ENDED)
        return False

    def _admit_queued(self, now: float) -> None:
        """Reads whose peer is admitted become due. From here on they count as running."""
        for pull in [pull for pull in self._queued if self._peers.usable(pull.handle.agent)]:
            self._queued.remove(pull)
            self._peers.begin(pull.handle.agent)
            self._running[pull.id] = pull
            self._due.append((now + self._delay, pull))
            pull.enter(Stage.READING)

    def _posts(self, now: float) -> list[Call]:
        due = [pull for at, pull in self._due if at <= now]
        self._due = [(at, pull) for at, pull in self._due if at > now]
        calls = []
        for pull in due:
            if pull.error is None and self._fail():
                pull.fail(TransferError(f"failed on purpose: {pull}"))
            if pull.error is not None:
                self._ended(pull, pull.error)
                continue
            note = encode_note(Note("done", pull.handle.hold, pull.nonce))
            handle = pull.handle
            args = (handle.agent, handle.address, handle.page_bytes, pull.remote, pull.local, note)
            calls.append(Call("post_read", self._agent.post_read, args, partial(self._posted, pull)))
        return calls

    def _posted(self, pull: Pull, result: int | TransferError) -> None:
        self._on_progress()
        if isinstance(result, TransferError):
            self._ended(pull, result)
        else:
            self._handles[pull.id] = result

    def _polled(self, pull: Pull, result: bool | TransferError) -> None:
        if result is False:
            return
        self._on_progress()
        self._terminal.append(self._handles.pop(pull.id))
        self._ended(pull, result if isinstance(result, TransferError) else None)

    def _ended(self, pull: Pull, error: TransferError | None) -> None:
        """The read is terminal: nothing can land any more."""
        del self._running[pull.id]
        self._peers.end(pull.handle.agent)
        abandoned = self._leave_quarantine(pull)
        if error is not None:
            pull.fail(error)
        if error is None and pull.error is None and not abandoned:
            self._confirmations.expect(pull, trio.current_time())
        else:
            pull.enter(Stage.ENDED)
        if isinstance(error, PeerDisconnectedError):
            self._on_disconnect(pull.handle.agent, error)

    def _leave_quarantine(self, pull: Pull) -> bool:
        pages = self.quarantine.terminal(pull.id)
        if pages:
            self._cache.unquarantine(pages)
        return bool(pages)
