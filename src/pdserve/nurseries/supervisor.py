"""one_for_one supervision, after Erlang/OTP: ordered start, restarts with back-off, restart intensity, reverse stop."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio

from pdserve.errors import FatalError
from pdserve.nurseries.groups import leaves

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


class IntensityExceeded(Exception):
    """Children failed too often; the last failure is the `__cause__`."""


class ChildFailed(Exception):
    """A child ended in a way that is a failure though it raised nothing: returned, or did not start in time."""


@attrs.frozen
class ChildSpec:
    """One child: `run(task_status=…)` calls `task_status.started()` when it is up, and is then left to run.

    permanent: always restarted, returning is a failure. transient: restarted when it fails. temporary: never restarted.
    `start_timeout`: seconds until `started()`, else it is cancelled and counts as failed. `grace`: seconds that its end
    may take on a stop; after them the next child is stopped without waiting any longer.
    """

    name: str
    run: Callable[..., Awaitable[object]]
    restart: Literal["permanent", "transient", "temporary"] = "permanent"
    grace: float = 5.0
    start_timeout: float = 60.0


@attrs.frozen
class Intensity:
    """At most `restarts` restarts, of all children together, in any `seconds`."""

    restarts: int = 5
    seconds: float = 30.0


@attrs.frozen
class Backoff:
    """Seconds before a restart: `first`, then `factor` times the previous one up to `most`, each times 1 ± `jitter`.

    A child that was up for `reset_after` seconds begins again at `first`.
    """

    first: float = 0.1
    most: float = 5.0
    jitter: float = 0.2
    factor: float = 2.0
    reset_after: float = 10.0

    def following(self, previous: float | None) -> float:
        """The delay after `previous`, without jitter."""
        return self.first if previous is None else min(self.most, previous * self.factor)

    def jittered(self, delay: float) -> float:
        return delay * random.uniform(1 - self.jitter, 1 + self.jitter)


DEFAULT_INTENSITY = Intensity()
DEFAULT_BACKOFF = Backoff()


@attrs.frozen
class ChildEvent:
    """What happened to a child.

    started: it is up. failed: with `error`. ended: a transient or temporary child is done. restarting: in `delay`
    seconds. stopped: by the supervisor. overran: it did not stop within its grace.
    """

    child: str
    kind: Literal["started", "failed", "ended", "restarting", "stopped", "overran"]
    error: Exception | None = None
    delay: float = 0.0


async def one_for_one(
    children: Sequence[ChildSpec],
    *,
    intensity: Intensity | None = DEFAULT_INTENSITY,
    backoff: Backoff = DEFAULT_BACKOFF,
    on_event: Callable[[ChildEvent], None] | None = None,
    stop: trio.Event | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep the children running; each fails and restarts on its own.

    They start in order, each one when the one before is up (or is done for good); then `task_status.started()`. On
    `stop`, cancellation from outside, exceeded intensity or a FatalError they are stopped in reverse order, one at a
    time, and no child is cancelled before its turn. Returns after `stop`, or when no child is left. Raises
    IntensityExceeded (with `intensity=None` never), or a child's FatalError: that one is not restarted.
    """
    await _Supervisor(children, intensity, backoff, on_event or (lambda event: None)).run(stop, task_status)


class _Supervisor:
    def __init__(
        self,
        children: Sequence[ChildSpec],
        intensity: Intensity | None,
        backoff: Backoff,
        emit: Callable[[ChildEvent], None],
    ) -> None:
        self._intensity = intensity
        self._restarts: deque[float] = deque()
        self._running = trio.CancelScope()  # cancelled to begin the stop
        self._keepers = [_Keeper(spec, self) for spec in children]
        self.backoff = backoff
        self.emit = emit
        self.failure: Exception | None = None  # what this supervisor itself ends with

    async def run(self, stop: trio.Event | None, task_status: trio.TaskStatus[None]) -> None:
        announced = False
        async with trio.open_nursery() as nursery:
            launched: list[_Keeper] = []
            try:
                with self._running:
                    if stop is not None:
                        nursery.start_soon(self._stop_on, stop, name="supervisor.stop")
                    for keeper in self._keepers:
                        nursery.start_soon(keeper.run, name=keeper.spec.name)
                        launched.append(keeper)
                        await keeper.ready.wait()
                    task_status.started()
                    announced = True
                    for keeper in self._keepers:
                        await keeper.done.wait()
            finally:
                with trio.CancelScope(shield=True):  # bounded by the graces
                    for keeper in reversed(launched):
                        await keeper.stop()
                nursery.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure
        if not announced:  # stopped while it was starting: no error for the one who waits
            task_status.started()

    async def _stop_on(self, stop: trio.Event) -> None:
        await stop.wait()
        self._running.cancel()

    def escalate(self, failure: Exception) -> None:
        if self.failure is None:
            self.failure = failure
        self._running.cancel()

    def may_restart(self, child: str, error: Exception) -> bool:
        """Count a restart; False when it is one too many, and everything stops."""
        if self._intensity is None:
            return True
        now = trio.current_time()
        self._restarts.append(now)
        while self._restarts[0] <= now - self._intensity.seconds:
            self._restarts.popleft()
        if len(self._restarts) <= self._intensity.restarts:
            return True
        exceeded = IntensityExceeded(
            f"more than {self._intensity.restarts} restarts in {self._intensity.seconds:g} s, last: {child}: {error!r}"
        )
        exceeded.__cause__ = error
        self.escalate(exceeded)
        return False


class _Keeper:
    """Runs one child again and again, in one task that carries the child's name."""

    def __init__(self, spec: ChildSpec, supervisor: _Supervisor) -> None:
        self.spec = spec
        self.ready = trio.Event()  # up for the first time, or done for good
        self.done = trio.Event()  # done for good
        self._supervisor = supervisor
        self._stopping = trio.Event()
        self._scope = trio.CancelScope()  # of what it does now: the child, or the pause before a restart
        self._up_since: float | None = None

    async def run(self) -> None:
        emit, backoff = self._supervisor.emit, self._supervisor.backoff
        delay: float | None = None
        try:
            while not self._stopping.is_set():
                error = await self._live()
                if isinstance(error, FatalError):
                    emit(ChildEvent(self.spec.name, "failed", error))
                    self._supervisor.escalate(error)
                    return
                if self._stopping.is_set():
                    emit(ChildEvent(self.spec.name, "stopped", error))
                    return
                if error is None:
                    emit(ChildEvent(self.spec.name, "ended"))
                    return
                emit(ChildEvent(self.spec.name, "failed", error))
                if self.spec.restart == "temporary" or not self._supervisor.may_restart(self.spec.name, error):
                    return
                if self._up_since is not None and trio.current_time() - self._up_since >= backoff.reset_after:
                    delay = None
                delay = backoff.following(delay)
                pause = backoff.jittered(delay)
                emit(ChildEvent(self.spec.name, "restarting", error, pause))
                with trio.CancelScope() as self._scope:
                    await trio.sleep(pause)
        finally:
            self.ready.set()
            self.done.set()

    async def _live(self) -> Exception | None:
        """One life of the child: what it failed with, None if it ended well."""
        self._up_since = None
        # Shielded: a cancel from outside must not hit a child before its turn. `stop` is its end, and the supervisor
        # calls that whatever happens.
        deadline = trio.current_time() + self.spec.start_timeout
        self._scope = trio.CancelScope(deadline=deadline, shield=True)
        try:
            with self._scope:
                await self.spec.run(task_status=_Started(self, self._scope))
        except Exception as exc:
            return next((leaf for leaf in leaves(exc) if isinstance(leaf, FatalError)), exc)
        if self._stopping.is_set():
            return None
        if self._scope.cancelled_caught:
            return ChildFailed(f"{self.spec.name} did not start within {self.spec.start_timeout:g} s")
        if self.spec.restart == "permanent":
            return ChildFailed(f"{self.spec.name} returned, but it is permanent")
        return None

    def started(self) -> None:
        self._up_since = trio.current_time()
        self._supervisor.emit(ChildEvent(self.spec.name, "started"))
        self.ready.set()

    async def stop(self) -> None:
        """Cancel the child and wait for its end, as long as its grace lasts."""
        self._stopping.set()
        self._scope.cancel()
        with trio.move_on_after(self.spec.grace):
            await self.done.wait()
        if not self.done.is_set():
            self._supervisor.emit(ChildEvent(self.spec.name, "overran"))


class _Started(trio.TaskStatus[Any]):
    """The child's `task_status`."""

    def __init__(self, keeper: _Keeper, scope: trio.CancelScope) -> None:
        self._keeper = keeper
        self._scope = scope
        self._called = False

    def started(self, value: object = None) -> None:
        if self._called:
            raise RuntimeError("called 'started' twice on the same task status")
        self._called = True
        if not self._scope.cancel_called:  # too late: it is already on its way out
            self._scope.deadline = float("inf")
            self._keeper.started()
