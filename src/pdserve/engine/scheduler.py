"""Continuous batching with chunked prefill: which tokens the next engine step computes, and what came out of it.

A pure state machine. One cycle: `plan` → the engine runs the step → `apply`. `add` and `retire` may be called at any
time, also while a step is running and from the callbacks.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import attrs

from pdserve.engine.base import Sample, StepPlan, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.base import Sampled, StepResult
    from pdserve.engine.radix import KvCache
    from pdserve.engine.slots import SlotPool
    from pdserve.wire.messages import FinishReason, SamplingParams


class State(Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    """Computes nothing any more; keeps its pages and its slot until it is retired."""
    RETIRED = "retired"


@attrs.define(eq=False)
class Sequence:
    """One choice of one request (on P: one prompt, whatever the number of choices)."""

    id: str
    tokens: list[int]
    """Prompt and output so far. Appended to by `apply` only."""
    prompt_len: int
    params: SamplingParams
    choices: tuple[int, ...] = (0,)
    """A first token is sampled for each; more than one only with `one_shot`."""
    one_shot: bool = False
    """True on P: over after its first sampled tokens, which are not appended."""
    slot: int | None = None
    pages: list[int] = attrs.field(factory=list)
    """The page table. Page references belong to the sequence until it is retired."""
    computed: int = 0
    """Positions whose KV is in the pages."""
    copy: tuple[int, int] | None = None
    """(source, destination): a page to copy before the first step. A reference on the source is the sequence's until
    then."""
    owner: Any = None
    on_retired: Callable[[], None] | None = None
    """Called once, when pages and slot have been given back."""
    cached_tokens: int = 0
    """Positions that came from the prefix cache when the scheduler started the sequence."""
    state: State = State.NEW
    prefilling: bool = False
    keep_pages: bool = False

    @property
    def pending(self) -> int:
        """Known tokens whose KV has not been computed."""
        return len(self.tokens) - self.computed


@attrs.frozen
class SequenceOutput:
    """A token of a sequence, which it does not refer to: one that nobody takes any more would keep it in a ring."""

    index: int
    """Output position of the token."""
    choice: int
    token: Sampled
    finish: FinishReason | None
    stop_reason: int | None
    """The stop token id; None for EOS and length."""


class Scheduler:
    """Runs sequences over one engine's pages and slots; strictly first in, first out (invariant I2).

    `chunk_tokens` bounds the prompt tokens of one step. A new prompt waits while its pages would bring the pinned ones
    over `pinned_share` of the pool; where nothing else is pinned it may. Misuse raises ValueError or RuntimeError.
    """

    def __init__(
        self,
        cache: KvCache,
        slots: SlotPool,
        *,
        eos: frozenset[int],
        chunk_tokens: int = 512,
        max_seq_len: int,
        pinned_share: float = 1.0,
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"a step has to compute at least one token, not {chunk_tokens}")
        self._cache = cache
        self._slots = slots
        self._eos = eos
        self._chunk_tokens = chunk_tokens
        self._max_seq_len = max_seq_len
        self._max_pinned = int(pinned_share * cache.num_pages)
        self._waiting: dict[Sequence, None] = {}
        self._waiting_tokens = 0
        self._running: dict[Sequence, None] = {}
        self._finished: dict[Sequence, None] = {}
        self._flight: list[tuple[Sequence, int]] | None = None
        """Per work item of the outstanding plan: the sequence and how many tokens are computed."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of waiting sequences, and of started ones what is not computed yet."""
        return self._waiting_tokens + sum(seq.pending for seq in self._running if seq.prefilling)

    @property
    def idle(self) -> bool:
        """No sequence is in the scheduler's hands and no step is outstanding."""
        return not (self._waiting or self._running or self._finished or self._flight)

    def add(self, seq: Sequence) -> None:
        """Take a new sequence: with pages (and a slot) it runs at once, without it queues for both.

        Raises ValueError, and has taken nothing, when it can never run.
        """
        self._validate(seq)
        if seq.pages:
            self._start(seq)
        else:
            seq.state = State.WAITING
            self._waiting[seq] = None
            self._waiting_tokens += len(seq.tokens)

    def plan(self) -> StepPlan | None:
        """The next step: every sequence in decode, then prefill chunks in order of arrival. None: nothing can be done.

        The plan refers to the live token lists and page tables: they stay as they are until `apply`.
        """
        if self._flight is not None:
            raise RuntimeError("the previous plan has not been applied")
        items = [(seq, 1) for seq in self._running if not seq.prefilling]
        budget = self._chunk_tokens
        for seq in [seq for seq in self._running if seq.prefilling]:
            if budget == 0:
                break
            items.append((seq, min(budget, seq.pending)))
            budget -= items[-1][1]
        while budget > 0 and (head := self._start_head()) is not None:
            items.append((head, min(budget, head.pending)))
            budget -= items[-1][1]
        if not items:
            return None
        self._flight = items
        copies = tuple(seq.copy for seq, _ in items if seq.copy is not None)
        return StepPlan(tuple(self._work(seq, n) for seq, n in items), copies)

    def apply(self, result: StepResult) -> list[tuple[Sequence, SequenceOutput]]:
        """Take in the outstanding plan's result. What was retired meanwhile gives no output and is freed here."""
        if self._flight is None:
            raise RuntimeError("there is no plan to apply a result to")
        items = self._flight
        if [len(drawn) for drawn in result.tokens] != [self._draws(seq, n) for seq, n in items]:
            raise RuntimeError("the result does not fit the plan")
        self._flight = None
        outputs: list[tuple[Sequence, SequenceOutput]] = []
        for (seq, n), drawn in zip(items, result.tokens, strict=True):
            seq.computed += n
            if seq.state is State.RUNNING and drawn:
                seq.prefilling = False
                outputs.extend((seq, output) for output in self._advance(seq, drawn))
        # Decided before the first callback, which may retire others that this step has computed.
        copied = [seq for seq, _ in items if seq.copy is not None]
        for seq in [seq for seq, _ in items if seq.state is State.RETIRED]:
            self._give_back(seq)
        for seq in copied:
            self._drop_copy(seq)
        return outputs

    def retire(self, seq: Sequence, *, keep_pages: bool = False) -> None:
        """End a sequence, wherever it is: its full pages become findable, its slot is recycled, `on_retired` is called.

        At once, or in `apply` when it is part of the outstanding plan. With `keep_pages` the page references stay in
        `seq.pages` and are the caller's. Idempotent: only the first call counts.
        """
        if seq.state is State.RETIRED:
            return
        if seq.state is State.WAITING:
            del self._waiting[seq]
            self._waiting_tokens -= len(seq.tokens)
        self._running.pop(seq, None)
        self._finished.pop(seq, None)
        seq.state = State.RETIRED
        seq.keep_pages = keep_pages
        if not self._in_flight(seq):
            self._give_back(seq)

    def judge(
        self, params: SamplingParams, token_id: int, output_len: int, seq_len: int
    ) -> tuple[FinishReason | None, int | None]:
        """Does a token end its sequence, which then has `output_len` output and `seq_len` tokens? (finish, stop id)"""
        if token_id in self._eos and not params.ignore_eos:
            return "stop", None
        if token_id in params.stop_token_ids:
            return "stop", token_id
        if output_len >= params.max_tokens or seq_len >= self._max_seq_len:
            return "length", None
        return None, None

    def check_integrity(self) -> None:
        """Raises AssertionError, saying what, when sequences, slots and pages disagree."""
        self._cache.check_integrity()
        assert self._waiting_tokens == sum(len(seq.tokens) for seq in self._waiting), "waiting tokens are miscounted"
        for seq in self._waiting:
            assert seq.state is State.WAITING, f"{seq.id} waits and is {seq.state}"
            assert seq.slot is None, f"{seq.id} waits with a slot"
            assert not seq.pages, f"{seq.id} waits with pages"
        flying = [seq for seq, _ in self._flight or ()]
        for seq in flying:
            assert seq.state in (State.RUNNING, State.RETIRED), f"{seq.id} is computed and is {seq.state}"
        holders = [*self._running, *self._finished, *(seq for seq in flying if seq.state is State.RETIRED)]
        assert all(seq.state is State.RUNNING for seq in self._running), "a running sequence is in another state"
        assert all(seq.state is State.FINISHED for seq in self._finished), "a finished sequence is in another state"
        slots = [seq.slot for seq in holders]
        assert len(set(slots)) == len(slots), f"two sequences share a slot: {slots}"
        for seq in holders:
            assert seq.slot in self._slots, f"{seq.id} is in slot {seq.slot}, which is free"
            assert seq.computed <= len(seq.tokens), f"{seq.id} has KV of tokens that it does not have"
            assert seq.computed <= len(seq.pages) * self._cache.page_size, f"{seq.id} has more KV than pages"
        assert all(seq.pending > 0 for seq in self._running), "a running sequence has nothing to compute"

    def _validate(self, seq: Sequence) -> None:
        if seq.state is not State.NEW:
            raise ValueError(f"{seq.id} has been added before")
        length = len(seq.tokens)
        if not 0 < seq.prompt_len <= length or length >= self._max_seq_len:
            raise ValueError(f"{seq.id}: {length} tokens leave nothing to generate within {self._max_seq_len}")
        if not seq.choices or (len(seq.choices) > 1 and not seq.one_shot):
            raise ValueError(f"{seq.id}: {len(seq.choices)} choices")
        if not seq.pages:
            if seq.computed or seq.slot is not None:
                raise ValueError(f"{seq.id} has KV or a slot, but no pages")
            if self._pages_for(seq) > self._cache.num_pages:
                raise ValueError(f"{seq.id} needs {self._pages_for(seq)} pages, there are {self._cache.num_pages}")
        elif seq.slot is None or not 0 <= seq.computed < length or len(seq.pages) < self._pages_for(seq):
            raise ValueError(f"{seq.id} lacks a slot or pages, or has nothing to compute")

    def _pages_for(self, seq: Sequence) -> int:
        """For all that the sequence will ever compute; the last token of an output never is."""
        positions = len(seq.tokens)
        if not seq.one_shot:
            last = min(seq.prompt_len + seq.params.max_tokens, self._max_seq_len) - 1
            positions = max(positions, last)
        return -(-positions // self._cache.page_size)

    def _start_head(self) -> Sequence | None:
        head = next(iter(self._waiting), None)
        if head is None or not self._slots.free:
            return None
        # The last token is computed in any case: its logits are what the prefill is for.
        claim = self._cache.claim(head.tokens, len(head.tokens) - 1, self._pages_for(head), self._max_pinned)
        if claim is None:
            return None
        slots = self._slots.allocate()
        assert slots is not None
        head.pages, cached_pages = claim
        head.slot = slots[0]
        head.computed = head.cached_tokens = cached_pages * self._cache.page_size
        del self._waiting[head]
        self._waiting_tokens -= len(head.tokens)
        self._start(head)
        return head

    def _start(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        seq.prefilling = seq.one_shot or seq.pending > 1
        self._running[seq] = None

    def _work(self, seq: Sequence, n: int) -> Work:
        samples: tuple[Sample, ...] = ()
        if self._draws(seq, n):
            banned = self._banned(seq)
            samples = tuple(Sample(seq.params, seq.tokens, seq.prompt_len, choice, banned) for choice in seq.choices)
        return Work(seq.tokens[seq.computed : seq.computed + n], seq.computed, seq.pages, samples)

    def _draws(self, seq: Sequence, n: int) -> int:
        """How many tokens a step over the next `n` positions samples."""
        return len(seq.choices) if seq.computed + n == len(seq.tokens) else 0

    def _banned(self, seq: Sequence) -> tuple[int, ...]:
        params = seq.params
        if len(seq.tokens) - seq.prompt_len >= params.min_tokens:
            return ()
        eos = () if params.ignore_eos else sorted(self._eos)
        return (*eos, *params.stop_token_ids)

    def _advance(self, seq: Sequence, drawn: tuple[Sampled, ...]) -> list[SequenceOutput]:
        index = len(seq.tokens) - seq.prompt_len
        outputs = []
        for choice, token in zip(seq.choices, drawn, strict=True):
            finish, stop_reason = self.judge(seq.params, token.token_id, index + 1, len(seq.tokens) + 1)
            outputs.append(SequenceOutput(index, choice, token, finish, stop_reason))
        if not seq.one_shot:
            seq.tokens.append(drawn[0].token_id)
        if seq.one_shot or outputs[0].finish is not None:
            del self._running[seq]
            self._finished[seq] = None
            seq.state = State.FINISHED
        return outputs

    def _in_flight(self, seq: Sequence) -> bool:
        return any(item is seq for item, _ in self._flight or ())

    def _drop_copy(self, seq: Sequence) -> None:
        if seq.copy is not None:
            source, _ = seq.copy
            seq.copy = None
            self._cache.release((source,))

    def _give_back(self, seq: Sequence) -> None:
        # Slot first: whoever is told that pages are available may want one too.
        if seq.slot is not None:
            self._slots.release((seq.slot,))
            seq.slot = None
        self._cache.insert(seq.tokens[: seq.computed], seq.pages)
        self._drop_copy(seq)
        if not seq.keep_pages:
            pages, seq.pages = seq.pages, []
            self._cache.release(pages)
        if seq.on_retired is not None:
            seq.on_retired()
