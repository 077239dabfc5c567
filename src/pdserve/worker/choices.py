"""Running the choices of an admitted request: their sequences, the one transfer they share, their output."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from pdserve.engine.scheduler import Sequence
from pdserve.errors import TransferError, WorkerFailedError
from pdserve.wire.footprint import Footprint
from pdserve.worker.output import ChoiceOutput
from pdserve.worker.prompt_kv import PromptKv
from pdserve.worker.room import Wish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.engine.radix import KvCache
    from pdserve.engine.scheduler import SequenceOutput
    from pdserve.telemetry.metrics import WorkerMetrics
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.transfer.owner import TransferOwner
    from pdserve.wire.messages import Decode
    from pdserve.worker.engine_loop import EngineLoop
    from pdserve.worker.group import Group
    from pdserve.worker.requests import LinkRequests, Request
    from pdserve.worker.room import Room


class Choices:
    """What happens to a request between its admission and its last recycled slot."""

    def __init__(
        self,
        loop: EngineLoop,
        cache: KvCache,
        owner: TransferOwner,
        tokenizer: Tokenizer,
        metrics: WorkerMetrics,
        first_token_timeout: float,
        *,
        fail_choice: int,
    ) -> None:
        """`fail_choice` (test seam): this choice of every request fails after its first token; -1: none."""
        self._first_token_timeout = first_token_timeout
        self._loop = loop
        self._cache = cache
        self._owner = owner
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._fail_choice = fail_choice

    def wish(self, frame: Decode) -> Wish:
        """The room that all choices of the request take together."""
        computed = _computed(frame)
        wants = Footprint(len(frame.token_ids), frame.params.max_tokens, frame.n)
        return Wish(frame.n, frame.token_ids, computed, wants.pages(self._cache.page_size, computed))

    def allot(self, frame: Decode, room: Room, on_retired: list[Callable[[], None]]) -> list[Sequence]:
        """One sequence a choice. Full prompt pages are shared by count; the partial one is filled in choice 0's table
        and copied for the others. The room belongs to the sequences from here on.
        """
        cache, computed = self._cache, _computed(frame)
        shared = computed // cache.page_size
        each = (len(room.pages) - shared) // len(room.slots)
        seqs = []
        for choice, slot in enumerate(room.slots):
            start = shared + choice * each
            pages = room.pages[:shared] + room.pages[start : start + each]
            copy = None
            if choice > 0:
                cache.pin(room.pages[:shared])
                if computed % cache.page_size:
                    copy = (room.pages[shared], pages[shared])
                    cache.pin(copy[:1])
            seqs.append(
                Sequence(
                    frame.id,
                    list(frame.token_ids),
                    len(frame.token_ids),
                    frame.params,
                    choices=(choice,),
                    slot=slot,
                    pages=pages,
                    computed=room.cached * cache.page_size,
                    cached_tokens=room.cached * cache.page_size,
                    copy=copy,
                    on_retired=on_retired[choice],
                )
            )
        return seqs

    async def serve(self, request: Request, group: Group, seqs: list[Sequence], link: LinkRequests) -> None:
        """Run all choices to their end. Retires every sequence, however it is left.

        Raises TransferError and RequestError of the whole group; the failure of one choice among several is told to
        the Master and ends nothing else.
        """
        frame = group.first
        kv = PromptKv(self._owner, self._cache, self._metrics, frame, seqs, _computed(frame))
        try:
            if group.n == 1:
                await self._generate(request, frame, seqs[0], partial(kv.pull, link), link)
            else:
                await self._serve_all(group, seqs, kv, link)
            kv.settle(link)
        finally:
            for seq in seqs:
                self._loop.scheduler.retire(seq)

    async def _serve_all(self, group: Group, seqs: list[Sequence], kv: PromptKv, link: LinkRequests) -> None:
        """Each choice is a task of its own, ended by itself; the transfer is nobody's but the group's."""
        failure: TransferError | None = None
        left, pulling = group.n, trio.CancelScope()

        def end(seq: Sequence) -> None:
            nonlocal left
            self._loop.scheduler.retire(seq)
            left -= 1
            if not left:
                pulling.cancel()  # nobody needs the KV any more

        async def run(request: Request, frame: Decode, seq: Sequence) -> None:
            try:
                await self._generate(request, frame, seq, kv.wait, link)
            finally:
                end(seq)

        async def start_claimed() -> None:
            for index in range(group.n):
                choice = await group.arrival(index)
                frame = group.frame(choice)
                if frame is None:
                    end(seqs[choice])
                else:
                    link.start((*group.key, choice), run, frame, seqs[choice], nursery=nursery)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(start_claimed, name=f"claims {group.id}/{group.epoch}")
            with pulling:
                await kv.wanted.wait()
                try:
                    await kv.pull(link)
                except TransferError as error:
                    failure = error
                    nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _generate(
        self,
        request: Request,
        frame: Decode,
        seq: Sequence,
        fetch: Callable[[], Awaitable[None]],
        link: LinkRequests,
    ) -> None:
        """One choice: emit token #1 at once, `fetch` the prompt's KV, generate the rest."""
        output = ChoiceOutput(frame, self._tokenizer, link)
        if frame.first is not None:
            token = frame.first.token_id
            finish, stop_reason = self._loop.scheduler.judge(frame.params, token, 1, seq.prompt_len + 1)
            if output.push(token, frame.first.logprob, finish, stop_reason):
                return
            seq.tokens.append(token)
        request.enter("transfer")
        await fetch()
        if frame.choice == self._fail_choice:
            raise WorkerFailedError("failed on purpose")
        request.enter("decode")
        outputs = self._loop.submit(seq)
        if frame.first is None:
            with trio.move_on_after(self._first_token_timeout) as deadline:
                if _take(await outputs.receive(), output):
                    return
            if deadline.cancelled_caught:
                raise WorkerFailedError(f"no first token within {self._first_token_timeout:g} s")
        while not _take(await outputs.receive(), output):
            pass


def _computed(frame: Decode) -> int:
    """Prompt positions whose KV comes from P or the cache; a missing first token is drawn from the last one here."""
    return len(frame.token_ids) - (frame.first is None)


def _take(out: SequenceOutput, output: ChoiceOutput) -> bool:
    return output.push(out.token.token_id, out.token.logprob, out.finish, out.stop_reason)
