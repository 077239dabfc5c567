"""Whether what D has read is what P held: D asks once all bytes are there, P answers. No I/O: the owner sends.

P's pages are protected by this alone, not by a lock: a hold that ended before the question makes the read stale.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import attrs

from pdserve.errors import TransferError
from pdserve.transfer.pull import Note, Pull, Stage, decode_note

if TYPE_CHECKING:
    from pdserve.transfer.holds import HoldTable
    from pdserve.transfer.peers import PeerTable

logger = logging.getLogger(__name__)

_MAX_LETTERS = 4096
"""Letters that wait, in or out; the oldest goes first, and the pull it belongs to ends by its own timeout."""
_PROBE_INTERVAL = 0.25
"""Seconds. NIXL finds out that a peer died only by sending to it, and a pull that waits for an answer sends nothing."""


@attrs.define
class Letter:
    """A note that waits until the peer it came from is known, or the peer it goes to is usable."""

    peer: str
    note: Note
    deadline: float
    retried: bool = False


class Confirmations:
    """Both sides of the exchange. Times are seconds of any one clock; `patience` bounds how long a letter waits."""

    def __init__(self, holds: HoldTable, peers: PeerTable, patience: float) -> None:
        self._holds = holds
        self._peers = peers
        self._patience = patience
        self._asked: dict[int, Pull] = {}
        """Pulls that wait for an answer, by nonce."""
        self._inbox: deque[Letter] = deque(maxlen=_MAX_LETTERS)
        self._outbox: deque[Letter] = deque(maxlen=_MAX_LETTERS)
        self._probe_at = 0.0

    def __bool__(self) -> bool:
        """Something waits for a note."""
        return bool(self._asked or self._inbox or self._outbox)

    # --- D's side

    def expect(self, pull: Pull, now: float) -> None:
        """All bytes of `pull` have landed, and the agent has sent its `done` note."""
        if not self._asked:
            self._probe_at = now + _PROBE_INTERVAL
        self._asked[pull.nonce] = pull
        pull.enter(Stage.CONFIRMING)

    def forget(self, pull: Pull) -> None:
        """Nobody is interested in the answer any more."""
        self._asked.pop(pull.nonce, None)

    def fail(self, error: TransferError, agent: str | None = None) -> None:
        """The peer `agent` (None: every peer) will not answer."""
        for pull in [pull for pull in self._asked.values() if agent in (None, pull.handle.agent)]:
            self.forget(pull)
            pull.fail(error)
            pull.enter(Stage.ENDED)

    def _answered(self, sender: str, note: Note) -> None:
        pull = self._asked.get(note.nonce)
        if pull is None or (pull.handle.agent, pull.handle.hold) != (sender, note.hold):
            return  # abandoned meanwhile, timed out, or not theirs to answer
        self.forget(pull)
        if note.kind != "valid":
            pull.fail(TransferError(f"stale: {pull}"))
        pull.enter(Stage.ENDED)

    # --- P's side

    def _answer(self, sender: str, note: Note, now: float) -> None:
        valid = self._holds.end(note.hold, "pulled")
        answer = Note("valid" if valid else "stale", note.hold, note.nonce)
        self._outbox.append(Letter(sender, answer, now + self._patience))

    # --- letters

    def receive(self, sender: str, data: bytes, now: float) -> None:
        """A notification has arrived; anything but a note is logged and ignored."""
        note = decode_note(data)
        if note is None:
            logger.warning("garbage of %d bytes from transfer peer %s", len(data), sender)
        elif note.kind == "done":
            # The report of its Master may be behind the note. Only an authenticated peer ends a hold.
            self._inbox.append(Letter(sender, note, now + self._patience))
        elif note.kind != "probe":
            self._answered(sender, note)

    def outgoing(self, now: float) -> list[Letter]:
        """Letters to be sent now; each is to be `returned` if that failed."""
        self._sort_inbox(now)
        letters, waiting = [], list(self._outbox)
        self._outbox.clear()
        for letter in waiting:
            if self._peers.usable(letter.peer):
                letters.append(letter)
            elif letter.deadline > now:
                self._peers.want(letter.peer)
                self._outbox.append(letter)
        return letters + self._probes(now)

    def returned(self, letter: Letter, error: TransferError, *, disconnected: bool) -> None:
        """The letter could not be sent. A peer that lost its connection may live on behind a new one: try that once."""
        if disconnected and not letter.retried and letter.note.kind != "probe":
            letter.retried = True
            self._outbox.append(letter)
        else:
            logger.warning("note %s to %s was not sent: %s", letter.note.kind, letter.peer, error)

    def unreachable(self, agent: str) -> None:
        """The agent refuses to admit that peer: letters to it are pointless."""
        kept = [letter for letter in self._outbox if letter.peer != agent]
        self._outbox.clear()
        self._outbox.extend(kept)

    def _sort_inbox(self, now: float) -> None:
        waiting = list(self._inbox)
        self._inbox.clear()
        for letter in waiting:
            if self._peers.known(letter.peer):
                self._answer(letter.peer, letter.note, now)
            elif letter.deadline > now:
                self._inbox.append(letter)
            else:
                logger.warning("note of %s, which no Master has reported, is dropped", letter.peer)

    def _probes(self, now: float) -> list[Letter]:
        if not self._asked or now < self._probe_at:
            return []
        self._probe_at = now + _PROBE_INTERVAL
        peers = {pull.handle.agent for pull in self._asked.values()}
        return [Letter(peer, Note("probe", 0, 0), now) for peer in sorted(peers) if self._peers.usable(peer)]
