"""The bridge between scheduler and engine: virtual time, the engine's thread, failures and hangs."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import trio

from pdserve.engine.radix import KvCache
from pdserve.engine.scheduler import Scheduler, Sequence
from pdserve.engine.sim import SimEngine, expected_tokens
from pdserve.engine.slots import SlotPool
from pdserve.errors import FatalError
from pdserve.text.models import load_model_card, resolve_model
from pdserve.wire.messages import SamplingParams
from pdserve.worker.engine_loop import EngineLoop
from pdserve.worker.thread import OwnerThread

pytestmark = pytest.mark.trio

CARD = load_model_card(resolve_model("sim-bytes"), max_seq_len=256)
PARAMS = SamplingParams(max_tokens=5, temperature=0.0)


def make_loop(**options) -> EngineLoop:
    engine = SimEngine(
        card=CARD,
        vocab_size=259,
        eos_token_ids=frozenset({256}),
        num_pages=16,
        page_size=16,
        prefill_tokens_per_s=1000.0,
        decode_ms=10.0,
    )
    scheduler = Scheduler(KvCache(16, 16), SlotPool(4), eos=engine.eos_token_ids, max_seq_len=CARD.max_len)
    return EngineLoop(engine, scheduler, **{"thread": None, "step_timeout": 5.0, **options})


def sequence(name: str = "s") -> Sequence:
    prompt = [40, 41, 42, 43]
    return Sequence(name, prompt, len(prompt), PARAMS)


async def collect(loop: EngineLoop, seq: Sequence) -> list[int]:
    outputs, ids = loop.submit(seq), []
    while True:
        output = await outputs.receive()
        ids.append(output.token.token_id)
        if output.finish is not None:
            loop.scheduler.retire(seq)
            return ids


async def test_steps_take_their_simulated_time_and_outputs_reach_their_owners(autojump_clock):
    steps = []
    loop = make_loop(on_step=lambda seconds, tokens: steps.append(tokens))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        began = trio.current_time()
        with trio.fail_after(5):
            ids = await collect(loop, sequence())
        assert ids == expected_tokens([40, 41, 42, 43], PARAMS, eos=frozenset({256}), vocab_size=259)
        assert trio.current_time() - began == pytest.approx(0.004 + 4 * 0.010)
        await trio.sleep(100)
        assert steps == [1] * 5  # an idle loop takes no steps
        assert loop.scheduler.idle
        nursery.cancel_scope.cancel()


async def test_a_sequence_whose_outputs_nobody_took_is_gone_without_the_collector(autojump_clock):
    loop = make_loop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop.run)
        gc.collect()
        gc.disable()
        try:
            seq = sequence()
            outputs = loop.submit(seq)
            await trio.sleep(1)
            assert outputs.statistics().current_buffer_used == 5
            loop.scheduler.retire(seq)
            left = weakref.ref(seq)
            del seq, outputs
            await collect(loop, sequence())  # the loop is with another one
            assert left() is None
        finally:
            gc.enable()
            nursery.cancel_scope.cancel()


async def test_a_step_that_fails_is_fatal(autojump_clock):
    loop = make_loop()
    loop.engine.close()
    loop.submit(sequence())
    with pytest.raises(FatalError, match="failed in a step: RuntimeError"):
        await loop.run()


async def test_a_step_that_hangs_is_fatal_after_its_timeout(autojump_clock):
    loop = make_loop(hang_after=2)
    loop.submit(sequence())
    with pytest.raises(FatalError, match="hung for 5 s"):
        await loop.run()
    assert trio.current_time() == pytest.approx(0.014 + 5.0)


async def test_on_a_thread_every_step_runs_on_the_same_one():
    with OwnerThread("engine") as thread:
        loop = make_loop(thread=thread)
        threads, step = set(), loop.engine.step

        def spy(plan):
            threads.add(threading.current_thread().name)
            return step(plan)

        loop.engine.step = spy
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.run)
            with trio.fail_after(10):
                ids = await collect(loop, sequence())
            nursery.cancel_scope.cancel()
    assert len(ids) == 5
    assert threads == {"engine"}


async def test_a_hang_on_the_thread_is_fatal():
    with OwnerThread("engine") as thread:
        loop = make_loop(thread=thread, hang_after=1, step_timeout=0.1)
        loop.submit(sequence())
        with trio.fail_after(10), pytest.raises(FatalError, match=r"hung for 0\.1 s"):
            await loop.run()


async def test_calls_return_raise_and_run_in_order():
    with OwnerThread("owner") as thread, trio.fail_after(10):
        assert await thread.call(divmod, 7, 2, timeout=5) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await thread.call(divmod, 7, 0, timeout=5)
        seen = []
        async with trio.open_nursery() as nursery:
            for i in range(20):
                nursery.start_soon(partial(thread.call, seen.append, i, timeout=5))
        assert sorted(seen) == list(range(20))


async def test_a_cancelled_caller_waits_for_the_call_in_progress():
    running, proceed, finished = trio.Event(), threading.Event(), []
    token = trio.lowlevel.current_trio_token()

    def work():
        token.run_sync_soon(running.set)
        proceed.wait(5)
        finished.append(True)

    with OwnerThread("owner") as thread, trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(thread.call, work, timeout=5))
            await running.wait()
            nursery.cancel_scope.cancel()
            proceed.set()
    assert finished == [True]
