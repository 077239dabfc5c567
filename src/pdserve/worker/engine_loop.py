"""The bridge between the scheduler and an engine: one step per hop, in the engine's thread or in (virtual) time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NoReturn

import trio

from pdserve.engine.scheduler import SequenceOutput
from pdserve.errors import FatalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.base import Engine, StepPlan, StepResult
    from pdserve.engine.scheduler import Scheduler, Sequence
    from pdserve.worker.thread import OwnerThread

_HANG = 1e6


class EngineLoop:
    """Runs steps while there is work. A failed or hung step is a FatalError: the engine is never restarted in-process.

    `hang_after` (test seam): the engine hangs in the step after so many.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        *,
        thread: OwnerThread | None,
        step_timeout: float,
        on_step: Callable[[float, int], None] = lambda seconds, tokens: None,
        hang_after: int = 0,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self._thread = thread
        self._step_timeout = step_timeout
        self._on_step = on_step
        self._hang_after = hang_after
        self._steps = 0
        self._wake = trio.Event()

    def submit(self, seq: Sequence) -> trio.MemoryReceiveChannel[SequenceOutput]:
        """Give a sequence to the scheduler; its outputs arrive on the channel, which holds all that can ever come."""
        room = max(len(seq.choices), seq.params.max_tokens)
        send, receive = trio.open_memory_channel[SequenceOutput](room)
        seq.owner = send
        self.scheduler.add(seq)
        self.kick()
        return receive

    def kick(self) -> None:
        """There may be work: pages came free, or a sequence arrived."""
        self._wake.set()

    async def run(self) -> NoReturn:
        while True:
            self._wake = trio.Event()
            plan = self.scheduler.plan()
            if plan is None:
                await self._wake.wait()
                continue
            started = time.monotonic()
            result = await self._step(plan)
            outputs = self.scheduler.apply(result)
            self._on_step(time.monotonic() - started, len(outputs))
            for seq, output in outputs:
                seq.owner.send_nowait(output)
            # Two rounds of the scheduler of tasks: after the first every consumer has been woken, after the second
            # each has run, so that a stop string found now keeps its sequence out of the next step.
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()

    async def _step(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        hang = 0 < self._hang_after < self._steps
        try:
            if self._thread is not None:
                if hang:
                    await self._thread.call(time.sleep, _HANG, timeout=self._step_timeout)
                return await self._thread.call(self.engine.step, plan, timeout=self._step_timeout)
            result = self.engine.step(plan)
        except FatalError:
            raise
        except Exception as error:
            raise FatalError(f"the engine failed in a step: {error!r}") from error
        with trio.move_on_after(self._step_timeout) as deadline:
            await trio.sleep(math.inf if hang else result.duration)
        if deadline.cancelled_caught:
            raise FatalError(f"engine: step hung for {self._step_timeout:g} s")
        return result
