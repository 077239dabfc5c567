import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.base import Sampled, StepResult
from pdserve.engine.pages import PageCounts
from pdserve.engine.radix import KvCache
from pdserve.engine.scheduler import Scheduler, Sequence, State
from pdserve.engine.sim import SimEngine, expected_tokens
from pdserve.engine.slots import SlotPool
from pdserve.wire.messages import ModelCard, SamplingParams

EOS = frozenset({2})


class Node:
    """Scheduler and simulator with their pages and slots, stepped by hand."""

    def __init__(self, pages=16, page_size=4, slots=4, max_seq_len=64, **options):
        self.cache = KvCache(pages, page_size)
        self.slots = SlotPool(slots)
        self.scheduler = Scheduler(self.cache, self.slots, eos=EOS, max_seq_len=max_seq_len, **options)
        self.engine = SimEngine(
            card=ModelCard("sim", "w", "v", max_len=max_seq_len),
            vocab_size=1000,
            eos_token_ids=EOS,
            num_pages=pages,
            page_size=page_size,
            prefill_tokens_per_s=1e6,
            decode_ms=1.0,
        )

    def seq(self, prompt, *, add=True, **options):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **options.pop("params", {})})
        seq = Sequence("s", list(prompt), len(prompt), params, **options)
        if add:
            self.scheduler.add(seq)
        return seq

    def step_all(self):
        plan = self.scheduler.plan()
        if plan is None:
            return None
        outputs = self.scheduler.apply(self.engine.step(plan))
        self.scheduler.check_integrity()
        return outputs

    def step(self):
        outputs = self.step_all()
        return None if outputs is None else [output for _, output in outputs]

    def run(self):
        outputs = []
        while (more := self.step()) is not None:
            outputs.extend(more)
        return outputs

    def assert_back_to_zero(self):
        self.scheduler.check_integrity()
        assert self.scheduler.idle
        assert self.slots.used == 0
        counts = self.cache.counts()
        assert (counts.pinned, counts.quarantined) == (0, 0)
        assert self.cache.available == self.cache.num_pages


def prompt_of(length, first=40):
    return [first + i % 50 for i in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("chunk", [1, 3, 4, 512])
def test_prompts_of_every_length_give_the_expected_output(length, chunk):
    node = Node(chunk_tokens=chunk)
    for cached in (0, (length - 1) // 4 * 4):
        seq = node.seq(prompt_of(length))
        outputs = node.run()
        assert [o.token.token_id for o in outputs] == expected_tokens(prompt_of(length), seq.params)
        assert [o.index for o in outputs] == [0, 1, 2, 3]
        assert [o.finish for o in outputs] == [None, None, None, "length"]
        assert (seq.cached_tokens, seq.computed, len(seq.tokens)) == (cached, length + 3, length + 4)
        node.scheduler.retire(seq)
    node.assert_back_to_zero()


def test_prefill_chunks_are_first_in_first_out_within_one_budget():
    node = Node(chunk_tokens=6)
    first, second, third = node.seq(prompt_of(8, 40)), node.seq(prompt_of(8, 41)), node.seq(prompt_of(3, 42))
    assert node.scheduler.queued_tokens == 19
    plan = node.scheduler.plan()
    assert [(list(w.tokens), w.start, len(w.samples)) for w in plan.work] == [(first.tokens[:6], 0, 0)]
    assert (node.scheduler.running, node.scheduler.waiting) == (1, 2)
    node.scheduler.apply(node.engine.step(plan))
    assert node.scheduler.queued_tokens == 13
    plan = node.scheduler.plan()
    assert [(len(w.tokens), w.start, len(w.samples)) for w in plan.work] == [(2, 6, 1), (4, 0, 0)]
    node.scheduler.apply(node.engine.step(plan))
    assert node.scheduler.queued_tokens == 7
    plan = node.scheduler.plan()
    assert [(len(w.tokens), w.start, len(w.samples)) for w in plan.work] == [(1, 8, 1), (4, 4, 1), (2, 0, 0)]
    assert second.state is third.state is State.RUNNING
    node.scheduler.apply(node.engine.step(plan))
    node.run()
    for seq in (first, second, third):
        assert seq.tokens[seq.prompt_len :] == expected_tokens(seq.tokens[: seq.prompt_len], seq.params)
        node.scheduler.retire(seq)
    node.assert_back_to_zero()


def test_a_head_that_waits_for_pages_is_not_overtaken():
    node = Node(pages=4, slots=4)
    running = node.seq(prompt_of(8), params={"max_tokens": 5})
    node.step()
    big, small = node.seq(prompt_of(8, 41), one_shot=True), node.seq(prompt_of(2, 42), one_shot=True)
    node.step()
    assert (node.scheduler.running, node.scheduler.waiting) == (1, 2)
    node.run()
    assert big.state is small.state is State.WAITING
    node.scheduler.retire(running)
    node.run()
    assert big.state is small.state is State.FINISHED
    for seq in (big, small):
        node.scheduler.retire(seq)
    node.assert_back_to_zero()


def test_a_head_that_waits_for_a_slot_is_first_when_one_comes():
    node = Node(slots=1)
    first, second, third = (node.seq(prompt_of(5, 40 + i), one_shot=True) for i in range(3))
    node.run()
    assert (first.state, second.state) == (State.FINISHED, State.WAITING)
    node.scheduler.retire(first)
    node.run()
    assert (second.state, third.state, second.slot) == (State.FINISHED, State.WAITING, 0)
    node.scheduler.retire(third)
    node.scheduler.retire(second)
    node.assert_back_to_zero()


def test_a_waiting_head_does_not_tell_itself_that_pages_are_available():
    node = Node(pages=4)
    cached = node.seq(prompt_of(4), one_shot=True)
    node.run()
    node.scheduler.retire(cached)
    hold = node.cache.allocate(3)
    calls = []
    node.cache.on_available = lambda: calls.append(1)
    waiting = node.seq(prompt_of(8), one_shot=True)
    assert node.scheduler.plan() is None
    assert calls == []
    node.cache.release(hold)
    assert calls == [1]
    node.scheduler.retire(waiting)
    node.assert_back_to_zero()


def test_held_pages_are_bounded_to_their_share():
    node = Node(pages=8, pinned_share=0.5)
    first, second = node.seq(prompt_of(12), one_shot=True), node.seq(prompt_of(8, 41), one_shot=True)
    node.run()
    node.scheduler.retire(first, keep_pages=True)
    assert (first.state, len(first.pages), first.slot) == (State.RETIRED, 3, None)
    node.run()
    assert second.state is State.WAITING
    node.cache.release(first.pages)
    node.run()
    assert second.state is State.FINISHED
    node.scheduler.retire(second)
    huge = node.seq(prompt_of(32, 42), one_shot=True)
    node.run()
    assert huge.state is State.FINISHED, "alone it may exceed the share"
    node.scheduler.retire(huge)
    node.assert_back_to_zero()


def test_kept_pages_are_findable_and_the_callers():
    node = Node()
    seq = node.seq(prompt_of(9), one_shot=True)
    node.run()
    node.scheduler.retire(seq, keep_pages=True)
    node.scheduler.retire(seq)
    assert node.cache.counts().pinned == 3
    other = node.seq(prompt_of(9), one_shot=True)
    node.step()
    assert (other.cached_tokens, other.pages[:2]) == (8, seq.pages[:2])
    node.scheduler.retire(other)
    node.cache.release(seq.pages)
    assert node.cache.counts() == PageCounts(free=14, cached=2, pinned=0, quarantined=0)
    node.assert_back_to_zero()


def test_one_shot_samples_once_per_choice_and_appends_nothing():
    node = Node()
    prompt = prompt_of(6)
    seq = node.seq(prompt, one_shot=True, choices=(0, 1, 2), params={"temperature": 1.0, "seed": 3})
    outputs = node.run()
    expected = [expected_tokens(prompt, seq.params, choice)[0] for choice in range(3)]
    assert [(o.index, o.choice, o.token.token_id, o.finish) for o in outputs] == [
        (0, choice, expected[choice], None) for choice in range(3)
    ]
    assert (seq.tokens, seq.computed, seq.state) == (prompt, 6, State.FINISHED)
    assert node.scheduler.plan() is None
    assert not node.scheduler.idle
    node.scheduler.retire(seq)
    node.assert_back_to_zero()


@pytest.mark.parametrize(
    ("prompt", "params", "finish", "reason"),
    [
        ([40, 4], {}, "stop", None),
        ([40, 4], {"ignore_eos": True}, None, None),
        ([40, 4], {"max_tokens": 1}, "stop", None),
        ([40, 4], {"max_tokens": 1, "ignore_eos": True}, "length", None),
        ([40, 4], {"ignore_eos": True, "stop_token_ids": (2,)}, "stop", 2),
        ([40, 4], {"stop_token_ids": (2,)}, "stop", None),
        ([40, 41], {"max_tokens": 1}, "length", None),
    ],
)
@pytest.mark.parametrize("one_shot", [True, False])
def test_how_a_first_token_is_judged(prompt, params, finish, reason, one_shot):
    node = Node()
    seq = node.seq(prompt, one_shot=one_shot, params=params)
    (output,) = node.step()
    assert (output.finish, output.stop_reason) == (finish, reason)
    assert (seq.state is State.FINISHED) == (one_shot or finish is not None)
    node.scheduler.retire(seq)
    node.assert_back_to_zero()


def test_a_stop_token_ends_a_sequence_and_is_part_of_it():
    node = Node()
    free = expected_tokens(prompt_of(5), SamplingParams(temperature=0.0, max_tokens=8))
    assert free[3] not in free[:3]
    seq = node.seq(prompt_of(5), params={"max_tokens": 8, "stop_token_ids": (free[3],)})
    outputs = node.run()
    assert seq.tokens[5:] == free[:4]
    assert (outputs[-1].finish, outputs[-1].stop_reason) == ("stop", free[3])


def test_the_longest_sequence_ends_with_length():
    node = Node(max_seq_len=8)
    seq = node.seq(prompt_of(5), params={"max_tokens": 99})
    assert [o.finish for o in node.run()] == [None, None, "length"]
    assert (len(seq.tokens), len(seq.pages)) == (8, 2)
    last = node.seq(prompt_of(7, 41), one_shot=True, params={"max_tokens": 99})
    assert [o.finish for o in node.run()] == ["length"]
    assert last.state is State.FINISHED


def test_what_is_banned_below_min_tokens():
    node = Node()
    seq = node.seq([40, 4], params={"min_tokens": 1, "stop_token_ids": (77,)})
    plan = node.scheduler.plan()
    assert plan.work[0].samples[0].banned == (2, 77)
    node.scheduler.apply(node.engine.step(plan))
    assert seq.tokens[2] != 2
    assert node.scheduler.plan().work[0].samples[0].banned == ()
    node = Node()
    node.seq([40, 4], params={"min_tokens": 1, "stop_token_ids": (77,), "ignore_eos": True})
    assert node.scheduler.plan().work[0].samples[0].banned == (77,)


class TestDecodeNode:
    """Sequences that come with their own slot and pages."""

    def add(self, node, prompt, computed, first=None, **options):
        seq = node.seq(prompt, add=False, **options)
        (seq.slot,) = node.slots.allocate()
        seq.pages = node.cache.allocate(-(-(len(prompt) + seq.params.max_tokens) // node.cache.page_size))
        seq.computed = computed
        seq.tokens += [first] if first is not None else []
        node.scheduler.add(seq)
        return seq

    def prefilled(self, node, prompt, **options):
        """As after a pull: the KV of the prompt is on its pages, token #1 is known."""
        seq = node.seq(prompt, one_shot=True, **options)
        (output,) = node.run()
        node.scheduler.retire(seq)
        return output.token.token_id

    def test_continues_after_the_first_token(self):
        node = Node()
        prompt = prompt_of(8)
        first = self.prefilled(node, prompt)
        matched = node.cache.match(prompt, 8)
        seq = node.seq(prompt, add=False)
        (seq.slot,) = node.slots.allocate()
        seq.pages = matched + node.cache.allocate(1)
        seq.tokens.append(first)
        seq.computed = 8
        node.scheduler.add(seq)
        assert (node.scheduler.running, node.scheduler.waiting, node.scheduler.queued_tokens) == (1, 0, 0)
        outputs = node.run()
        assert [o.index for o in outputs] == [1, 2, 3]
        assert seq.tokens[8:] == expected_tokens(prompt, seq.params)
        node.scheduler.retire(seq)
        node.assert_back_to_zero()

    def test_decode_goes_first_and_beside_the_prefill_budget(self):
        node = Node(chunk_tokens=2)
        repair = self.add(node, prompt_of(7), 0)
        self.add(node, prompt_of(7, 41), 0)
        decode = self.add(node, [40], 0)
        assert node.scheduler.queued_tokens == 14
        work = node.scheduler.plan().work
        assert [(len(w.tokens), len(w.samples)) for w in work] == [(1, 1), (2, 0)]
        assert work[0].pages is decode.pages
        assert work[1].pages is repair.pages

    def test_a_missing_first_token_is_computed_from_the_last_prompt_position(self):
        node = Node()
        seq = self.add(node, [40], 0)
        (output,) = node.step()
        assert (output.index, output.token.token_id) == (0, expected_tokens([40], seq.params)[0])

    def test_incomplete_sequences_are_refused(self):
        node = Node()
        for broken in ({"slot": None}, {"computed": 6}, {"computed": -1}, {"pages": [0]}):
            seq = Sequence("s", prompt_of(5), 5, SamplingParams(max_tokens=4), slot=0, pages=[0, 1])
            for name, value in broken.items():
                setattr(seq, name, value)
            with pytest.raises(ValueError, match="lacks a slot or pages"):
                node.scheduler.add(seq)
        assert node.scheduler.idle

    def test_retired_before_it_was_added(self):
        node = Node()
        seq = node.seq(prompt_of(5), add=False)
        (seq.slot,) = node.slots.allocate()
        seq.pages = node.cache.allocate(3)
        node.scheduler.retire(seq)
        node.assert_back_to_zero()
        with pytest.raises(ValueError, match="added before"):
            node.scheduler.add(seq)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "leave nothing to generate"),
        (prompt_of(64), {}, "leave nothing to generate"),
        (prompt_of(3), {"choices": ()}, "0 choices"),
        (prompt_of(3), {"choices": (0, 1)}, "2 choices"),
        (prompt_of(3), {"computed": 1}, "but no pages"),
        (prompt_of(3), {"slot": 1}, "but no pages"),
        (prompt_of(60), {"params": {"max_tokens": 4}}, "needs 16 pages, there are 15"),
    ],
)
def test_what_can_never_run_is_refused(prompt, options, message):
    node = Node(pages=15)
    with pytest.raises(ValueError, match=message):
        node.seq(prompt, **options)
    node.assert_back_to_zero()


def test_misuse_raises():
    node = Node()
    with pytest.raises(RuntimeError, match="no plan"):
        node.scheduler.apply(StepResult(()))
    assert node.scheduler.plan() is None
    seq = node.seq(prompt_of(3))
    with pytest.raises(ValueError, match="added before"):
        node.scheduler.add(seq)
    node.scheduler.plan()
    with pytest.raises(RuntimeError, match="not been applied"):
        node.scheduler.plan()
    for wrong in ((), ((),), ((Sampled(1), Sampled(2)),)):
        with pytest.raises(RuntimeError, match="does not fit"):
            node.scheduler.apply(StepResult(wrong))
    node.scheduler.apply(StepResult(((Sampled(50),),)))
    with pytest.raises(ValueError, match="at least one token"):
        Node(chunk_tokens=0)


def test_retired_in_flight_gives_back_in_apply_and_says_nothing():
    node = Node()
    calls = []
    seq = node.seq(prompt_of(9), on_retired=lambda: calls.append((node.slots.used, node.cache.counts().pinned)))
    plan = node.scheduler.plan()
    node.scheduler.retire(seq)
    node.scheduler.retire(seq)
    node.scheduler.check_integrity()
    assert (calls, node.slots.used, node.cache.counts().pinned) == ([], 1, 3)
    assert node.scheduler.running == 0
    assert not node.scheduler.idle
    assert node.scheduler.apply(node.engine.step(plan)) == []
    assert calls == [(0, 0)]
    node.scheduler.retire(seq)
    assert len(calls) == 1
    assert node.cache.counts().cached == 2, "what was computed can be used by the next"
    node.assert_back_to_zero()


def test_retired_in_flight_with_pages_kept():
    node = Node()
    seq = node.seq(prompt_of(9), one_shot=True)
    plan = node.scheduler.plan()
    node.scheduler.retire(seq, keep_pages=True)
    node.scheduler.retire(seq, keep_pages=False)
    node.scheduler.apply(node.engine.step(plan))
    assert (node.slots.used, len(seq.pages)) == (0, 3)
    node.cache.release(seq.pages)
    node.assert_back_to_zero()


def test_callbacks_may_use_the_scheduler():
    """Retiring others of the same step, adding and planning from on_retired and on_available."""
    node = Node(pages=6, slots=2)
    called, added = [], []
    first, second = node.seq(prompt_of(5, 40)), node.seq(prompt_of(5, 41))

    def on_retired():
        called.append("first")
        node.scheduler.retire(second)

    def on_available():
        if not added:
            added.append(node.seq(prompt_of(5, 42), one_shot=True))

    first.on_retired = on_retired
    second.on_retired = lambda: called.append("second")
    node.cache.on_available = on_available
    plan = node.scheduler.plan()
    assert len(plan.work) == 2
    node.scheduler.retire(first)
    assert [seq for seq, _ in node.scheduler.apply(node.engine.step(plan))] == [second]
    assert called == ["first", "second"]
    node.run()
    assert added[0].state is State.FINISHED
    node.scheduler.retire(added[0])
    node.assert_back_to_zero()


def test_broken_books_are_noticed():
    node = Node()
    seq = node.seq(prompt_of(5))
    node.step()
    node.slots.release((seq.slot,))
    with pytest.raises(AssertionError, match="slot 0, which is free"):
        node.scheduler.check_integrity()
    node.slots.allocate()
    seq.computed = 99
    with pytest.raises(AssertionError, match="KV of tokens"):
        node.scheduler.check_integrity()


PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 6),
        "min_tokens": st.integers(0, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), tuple(range(32, 60)), (2,)]),
    }
)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    pages=st.integers(5, 14),
    page_size=st.integers(1, 4),
    slots=st.integers(1, 4),
    chunk=st.integers(1, 12),
    share=st.sampled_from([0.4, 1.0]),
)
def test_random_runs_end_as_expected_or_retired_and_leave_nothing(data, pages, page_size, slots, chunk, share):
    max_seq_len = 18
    node = Node(pages, page_size, slots, max_seq_len, chunk_tokens=chunk, pinned_share=share)
    retired, live, outputs, holds, arrival = [], [], {}, [], []

    def retire(seq, keep=False):
        live.remove(seq)
        node.scheduler.retire(seq, keep_pages=keep)
        if keep:
            holds.append(seq)

    def check(seq):
        got = [o.token.token_id for o in outputs[seq]]
        prompt = seq.tokens[: seq.prompt_len]
        for i, choice in enumerate(seq.choices):
            want = expected_tokens(prompt, seq.params, choice, EOS, max_seq_len=max_seq_len)
            if seq.one_shot:
                assert got[i : i + 1] in ([], want[:1])
            else:
                assert got == want[: len(got)]
                assert [o.index for o in outputs[seq]] == list(range(len(got)))
                assert (seq.state is State.FINISHED) == (len(got) == len(want))

    def take(pairs):
        for seq, output in pairs:
            assert seq in live, "output after the end"
            outputs[seq].append(output)
            check(seq)

    def maybe_retire():
        if live and data.draw(st.integers(0, 3)) == 0:
            retire(data.draw(st.sampled_from(live)), keep=data.draw(st.booleans()))

    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, 2))):
            prompt = data.draw(st.lists(st.sampled_from([4, 40]), min_size=1, max_size=10))
            one_shot = data.draw(st.booleans())
            seq = Sequence(
                str(len(outputs)), prompt, len(prompt), SamplingParams(**data.draw(PARAMS)),
                one_shot=one_shot, choices=(0, 1) if one_shot else (0,),
            )  # fmt: skip
            seq.on_retired = lambda seq=seq: retired.append(seq)
            try:
                node.scheduler.add(seq)
            except ValueError:
                continue
            outputs[seq] = []
            live.append(seq)
            arrival.append(seq)
        maybe_retire()
        plan = node.scheduler.plan()
        started = [seq.state is not State.WAITING for seq in arrival if seq.state is not State.RETIRED]
        assert started == sorted(started, reverse=True), "somebody has overtaken"
        if plan is not None:
            assert sum(len(w.tokens) for w in plan.work if len(w.tokens) > 1) <= chunk
            result = node.engine.step(plan)
            maybe_retire()
            node.scheduler.check_integrity()
            take(node.scheduler.apply(result))
        node.scheduler.check_integrity()
        if holds and data.draw(st.booleans()):
            hold = holds.pop()
            node.cache.release(hold.pages)
            hold.pages = []
        for seq in [seq for seq in live if seq.state is State.FINISHED]:
            if data.draw(st.booleans()):
                retire(seq)
    for hold in holds:
        node.cache.release(hold.pages)
    while live:
        take(node.step_all() or ())
        done = [seq for seq in live if seq.state is State.FINISHED]
        assert done or node.scheduler.running, "nothing can go on"
        for seq in done:
            retire(seq)
    assert len(retired) == len(outputs) == len(set(retired))
    node.assert_back_to_zero()
