"""Ping under a deadline: a peer that has gone silent is found without any traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Callable


class PeerSilent(Exception):
    """Nothing was received for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"peer silent for {seconds:.1f} s")
        self.seconds = seconds


_SHORTEST = 0.05
"""Seconds. A peer does not make this side send more often."""


def pace(own: float, peers: float) -> float:
    """How often to ping a peer that takes this side for lost after three of its own intervals; 0: it did not say."""
    return min(own, max(peers, _SHORTEST)) if peers > 0 else own


class Heartbeat:
    """Pings every `interval` seconds; gives the peer up after `patience` seconds without a message, of any kind."""

    def __init__(self, interval: float, patience: float) -> None:
        if not (interval > 0 and patience > 0):
            raise ValueError(f"interval and patience must be positive, not {interval} and {patience}")
        self.interval = interval
        self.patience = patience
        self._heard: float | None = None

    def beat(self) -> None:
        """A message was received now."""
        self._heard = trio.current_time()

    @property
    def silence(self) -> float:
        """Seconds since the last message, or since `run` began; 0 before that."""
        return 0.0 if self._heard is None else max(0.0, trio.current_time() - self._heard)

    async def run(self, send_ping: Callable[[], None]) -> NoReturn:
        """Call `send_ping` every interval. Raises `PeerSilent` at the moment the patience is over."""
        self.beat()
        next_ping = trio.current_time() + self.interval
        while True:
            assert self._heard is not None
            due = min(next_ping, self._heard + self.patience)
            await trio.sleep_until(due)
            now = trio.current_time()
            # When this process itself has stood still (a stopped container, a long step), the peer's messages wait
            # unread: that time is not the peer's silence.
            late = now - due
            if late > self.interval and self._heard <= due:
                self._heard += late
            if now >= self._heard + self.patience:
                raise PeerSilent(now - self._heard)
            if now >= next_ping:
                send_ping()
                next_ping += self.interval * (1 + (now - next_ping) // self.interval)  # missed ones are skipped
