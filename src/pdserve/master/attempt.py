"""One try of a request on one Prefill and one Decode node: prefill, admission, relay of all choices' output."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import trio

from pdserve.errors import InvalidRequestError, RequestError, ServerBusyError, WorkerFailedError
from pdserve.master.mailbox import AttemptMailbox, NodeLost
from pdserve.master.placement import Placement
from pdserve.wire.messages import (
    GROUP,
    Admitted,
    Busy,
    Cancel,
    Decode,
    Delta,
    Failed,
    Prefill,
    Prefilled,
    Release,
    Renew,
    Reserve,
    Reserved,
    Settled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pdserve.master.output import GenerationOutput
    from pdserve.master.registry import Node, Registry
    from pdserve.master.selector import Selector
    from pdserve.master.service import GenerationRequest

_RENEW_INTERVAL = 1.0
"""Seconds between renewals of P's hold: the Master does not know P's `--hold-timeout`, which may be a few seconds."""
_LAST_WORD = 1.0
"""Seconds that D has to say how the transfer ended once a draining P has left."""


class AttemptLostError(Exception):
    """A node of the attempt was lost; before any output another attempt may follow."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.role} node {node.node_id}: {reason}")
        self.node = node


class Attempt:
    """Leaving the context, however, tells both nodes to give everything back.

    `avoid`: nodes that are passed over where there are others. `admission_timeout` bounds the wait for Decode, over all
    nodes that are asked; None: Decode is not asked to admit, several choices go out without a reservation.
    """

    def __init__(
        self,
        key: tuple[str, int],
        spec: GenerationRequest,
        output: GenerationOutput,
        registry: Registry,
        selector: Selector,
        *,
        avoid: Collection[str],
        admission_timeout: float | None,
        reservation_ttl: float,
        on_phase: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        """`key`: (request id, epoch). `on_phase` is told each phase and the nodes that serve it."""
        self._key = key
        self._spec = spec
        self._output = output
        self._registry = registry
        self._placement = Placement(registry, selector, spec, avoid=avoid)
        self._admission_timeout = admission_timeout
        self._reservation_ttl = reservation_ttl
        self._on_phase = on_phase
        self._mailbox = AttemptMailbox()
        self._prefill: Node | None = None
        self._decode: Node | None = None
        self.admission_seconds = 0.0
        """How long it has waited for Decode."""
        self._open = set(range(spec.n))
        """Choices that have not ended."""
        self._left: AttemptLostError | None = None
        """P drained and has left, and D has not said yet that it needs P no more."""
        self._last_word_at = math.inf

    async def __aenter__(self) -> Attempt:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Synchronous sends into the links' outboxes: nothing to wait for, so no shield is needed.
        if self._decode is not None:
            self._part(self._decode, Cancel(*self._key))
        if self._prefill is not None:
            self._part(self._prefill, Cancel(*self._key))

    async def run(self) -> None:
        """To the end of the last choice. Raises RequestError, and AttemptLostError when a node was lost."""
        prefilled = await self._prefilled()
        self._output.cached_tokens = prefilled.cached_tokens
        started = trio.current_time()
        try:
            await self._admitted(prefilled, started)
        finally:
            self.admission_seconds = trio.current_time() - started
        self._enter("decode")
        while self._open:
            await self._relay()
        self._leave(self._decode)
        self._decode = None

    def _enter(self, phase: str) -> None:
        self._on_phase(phase, tuple(node.node_id for node in (self._prefill, self._decode) if node is not None))

    async def _prefilled(self) -> Prefilled:
        """Ask P; one that has begun to drain is passed over, and when its queue is full, one other P is asked."""
        spec = self._spec
        refusal: Busy | None = None
        full: set[str] = set()
        while True:
            prefill = self._placement.prefill(full)
            if prefill is None:
                assert refusal is not None
                raise _busy_error("the prefill queue is full, try again later", refusal)
            self._prefill = self._join(prefill)
            self._enter("prefill")
            prefill.assigned_tokens += len(spec.prompt_ids)
            prefill.send(Prefill(*self._key, spec.prompt_ids, spec.params, spec.n))
            match await self._next():
                case Prefilled() as frame:
                    return frame
                case Busy() as busy:
                    self._leave(prefill)
                    self._prefill = None
                    if busy.reason == "draining":
                        _drains(prefill)
                        continue
                    if full:
                        raise _busy_error("the prefill queue is full, try again later", busy)
                    refusal = busy
                    full.add(prefill.node_id)
                case Failed() as failed:  # of the one prompt, whatever the number of choices
                    raise _error_of(failed)
                case frame:
                    raise WorkerFailedError(f"unexpected {type(frame).__name__} before the prompt was computed")

    async def _admitted(self, prefilled: Prefilled, started: float) -> None:
        """Ask D; when its queue is full, one other D within what is left of the admission deadline."""
        refusal: Busy | None = None
        full: set[str] = set()
        while True:
            if self._prefill is None:
                assert self._left is not None
                raise self._left
            decode = self._placement.decode(self._prefill, full)
            if decode is None:
                assert refusal is not None
                raise _busy_error("Decode is full, try again later", refusal)
            self._decode = self._join(decode)
            self._enter("admission")
            timeout = self._admission_timeout
            left = None if timeout is None else max(0.0, timeout - (trio.current_time() - started))
            match await self._ask(decode, prefilled, left):
                case Admitted():
                    return
                case Busy() as busy:
                    self._leave(decode)
                    self._decode = None
                    if busy.reason == "draining":
                        _drains(decode)
                        continue
                    if full or busy.reason != "queue_full":
                        raise _busy_error("Decode is full, try again later", busy)
                    refusal = busy
                    full.add(decode.node_id)
                case Failed() as failed:
                    raise _error_of(failed)
                case frame:
                    raise WorkerFailedError(f"unexpected {type(frame).__name__} before admission")

    async def _ask(self, decode: Node, prefilled: Prefilled, left: float | None) -> msgspec.Struct:
        """Send one choice, or reserve for several and send them as one batch. D's answer: admitted, or why not."""
        spec = self._spec
        reserve = spec.n > 1 and self._admission_timeout is not None
        if reserve:
            lengths = (len(spec.prompt_ids), spec.params.max_tokens)
            decode.send(Reserve(*self._key, spec.n, *lengths, self._reservation_ttl, left))
            answer = await self._next()
            if not isinstance(answer, Reserved):
                return answer
        first = {token.choice: token for token in prefilled.first}
        for choice in range(spec.n):
            decode.send(
                Decode(
                    *self._key,
                    spec.prompt_ids,
                    spec.params,
                    prefilled.handle,
                    first.get(choice),
                    choice,
                    admission_timeout=left,
                    n=spec.n,
                    reserved=reserve,
                )
            )
        return await self._next()

    async def _relay(self) -> None:
        """Handle one frame of the running generation. What comes of a choice that has ended changes nothing."""
        match await self._next():
            case Delta() as delta if delta.choice in self._open:
                try:
                    self._output.put(delta)
                except WorkerFailedError as error:
                    self._fail_choice(delta.choice, error)
                    if self._decode is not None:
                        self._decode.send(Cancel(*self._key, delta.choice))
                else:
                    if delta.finish is not None:
                        self._open.remove(delta.choice)
            case Failed() as failed if failed.choice in self._open:
                self._fail_choice(failed.choice, _error_of(failed))
            case Settled():
                if self._prefill is not None:
                    self._part(self._prefill, Release(*self._key))
                    self._prefill = None
                self._left, self._last_word_at = None, math.inf

    def _fail_choice(self, choice: int, error: RequestError) -> None:
        """The others go on. Where there are none, the request has failed."""
        if self._spec.n == 1:
            raise error
        self._output.fail_choice(choice, error)
        self._open.remove(choice)

    async def _next(self) -> msgspec.Struct:
        """The next frame of this attempt; renews P's hold while nothing comes. Raises what fails the whole request."""
        while True:
            frame = self._mailbox.take()
            if frame is None:
                await self._arrival()
            elif isinstance(frame, NodeLost):
                self._lost(frame.node, frame.reason)
            elif isinstance(frame, Failed) and (self._spec.n == 1 or frame.choice == GROUP):
                raise _error_of(frame)
            else:
                return frame

    async def _arrival(self) -> None:
        """Wait for the next frame until something is due: P's hold to be renewed, or D's last word on the transfer."""
        with trio.move_on_at(min(trio.current_time() + _RENEW_INTERVAL, self._last_word_at)) as pause:
            await self._mailbox.arrival()
        if pause.cancelled_caught:
            if self._left is not None and trio.current_time() >= self._last_word_at:
                raise self._left
            if self._prefill is not None:
                self._prefill.send(Renew(*self._key))

    def _lost(self, node: Node, reason: str) -> None:
        """Raises where this attempt cannot go on. A node that it no longer needs may go."""
        error = AttemptLostError(node, reason)
        if node is self._prefill and self._decode is not None and node.stats.draining:
            # A drain ends with the last hold, and that with the transfer: the news from D may still be on its way.
            self._prefill = None
            self._left, self._last_word_at = error, trio.current_time() + _LAST_WORD
        elif node in (self._prefill, self._decode):
            raise error

    def _join(self, node: Node) -> Node:
        if not self._registry.is_current(node):
            raise AttemptLostError(node, "lost")
        node.mailboxes[self._key] = self._mailbox
        return node

    def _leave(self, node: Node | None) -> None:
        if node is not None:
            node.mailboxes.pop(self._key, None)

    def _part(self, node: Node, farewell: msgspec.Struct) -> None:
        self._leave(node)
        node.send(farewell)


def _drains(node: Node) -> None:
    """The node has said so in an answer, ahead of its next report: nothing is sent there any more."""
    node.stats = msgspec.structs.replace(node.stats, draining=True)


def _busy_error(message: str, busy: Busy) -> ServerBusyError:
    return ServerBusyError(message, reason=busy.reason, retry_after=busy.retry_after)


def _error_of(frame: Failed) -> RequestError:
    if frame.code == InvalidRequestError.code:
        return InvalidRequestError(frame.message, param=frame.param)
    return WorkerFailedError(frame.message)
