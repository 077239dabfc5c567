from itertools import pairwise

import pytest
import trio

from pdserve.errors import FatalError
from pdserve.nurseries.supervisor import (
    Backoff,
    ChildFailed,
    ChildSpec,
    Intensity,
    IntensityExceeded,
    one_for_one,
)

STEADY = Backoff(first=1, most=8, jitter=0, factor=2, reset_after=100)


class Theatre:
    """Children that write what happens to them into one log."""

    def __init__(self):
        self.log = []
        self.starts = {}

    def child(self, name, script=None, **kwargs):
        """`script(life)` runs after start number `life` (from 1); without one the child runs for ever."""

        async def run(*, task_status):
            self.starts.setdefault(name, []).append(trio.current_time())
            self.log.append(f"{name} up")
            task_status.started()
            try:
                if script is not None:
                    return await script(len(self.starts[name]))
                await trio.sleep_forever()
            finally:
                self.log.append(f"{name} down")

        return ChildSpec(name, run, **kwargs)


@pytest.fixture
def theatre():
    return Theatre()


async def fail(life):
    raise ValueError(f"life {life}")


async def fail_once(life):
    if life == 1:
        raise ValueError("first life")
    await trio.sleep_forever()


async def done(life):
    await trio.lowlevel.checkpoint()


def gaps(times):
    return [b - a for a, b in pairwise(times)]


@pytest.mark.trio
async def test_ordered_start_and_reverse_stop(theatre, autojump_clock):
    async def slow(*, task_status):
        await trio.sleep(3)
        theatre.log.append("slow up")
        task_status.started("some value")
        try:
            await trio.sleep_forever()
        finally:
            theatre.log.append("slow down")

    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        specs = [theatre.child("a"), ChildSpec("slow", slow), theatre.child("c")]
        start = trio.current_time()
        await nursery.start(lambda task_status: one_for_one(specs, stop=stop, task_status=task_status))
        assert trio.current_time() - start == pytest.approx(3)
        assert theatre.log == ["a up", "slow up", "c up"]
        stop.set()
    assert theatre.log[3:] == ["c down", "slow down", "a down"]


@pytest.mark.trio
async def test_each_child_stops_completely_before_the_next_one_is_cancelled(theatre, autojump_clock):
    async def tidy(*, task_status):
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(2, shield=True):
                theatre.log.append("tidying")
                await trio.sleep(1)
            theatre.log.append("tidy down")

    with trio.move_on_after(5) as scope:
        await one_for_one([theatre.child("a"), ChildSpec("tidy", tidy)])
    assert scope.cancelled_caught  # not swallowed
    assert theatre.log == ["a up", "tidying", "tidy down", "a down"]


@pytest.mark.trio
async def test_one_that_overruns_its_grace_does_not_hold_up_the_others(theatre, autojump_clock):
    events = []

    async def stubborn(*, task_status):
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(10)
            theatre.log.append("stubborn down")

    start = trio.current_time()
    with trio.move_on_after(1):
        await one_for_one(
            [theatre.child("a"), ChildSpec("stubborn", stubborn, grace=2)],
            on_event=lambda event: events.append((event.child, event.kind, trio.current_time() - start)),
        )
    assert theatre.log == ["a up", "a down", "stubborn down"]
    assert [(child, kind, pytest.approx(at)) for child, kind, at in events[2:]] == [
        ("stubborn", "overran", 3),
        ("a", "stopped", 3),
        ("stubborn", "stopped", 11),
    ]


@pytest.mark.trio
async def test_a_failing_child_restarts_alone(theatre, autojump_clock):
    events = []
    with trio.move_on_after(10):
        await one_for_one([theatre.child("a"), theatre.child("b", fail_once)], backoff=STEADY, on_event=events.append)
    assert len(theatre.starts["a"]) == 1
    assert gaps(theatre.starts["b"]) == pytest.approx([1])
    assert [(e.child, e.kind) for e in events] == [
        ("a", "started"),
        ("b", "started"),
        ("b", "failed"),
        ("b", "restarting"),
        ("b", "started"),
        ("b", "stopped"),
        ("a", "stopped"),
    ]
    assert isinstance(events[2].error, ValueError)
    assert events[3].delay == 1


@pytest.mark.trio
async def test_backoff_grows_to_its_limit(theatre, autojump_clock):
    with trio.move_on_after(32):
        await one_for_one([theatre.child("a", fail)], intensity=None, backoff=STEADY)
    assert gaps(theatre.starts["a"]) == pytest.approx([1, 2, 4, 8, 8, 8])


@pytest.mark.trio
async def test_backoff_begins_again_after_a_long_life(theatre, autojump_clock):
    async def life(number):
        await trio.sleep(100 if number == 3 else 0)
        raise ValueError

    with trio.move_on_after(107):
        await one_for_one([theatre.child("a", life)], intensity=None, backoff=STEADY)
    assert gaps(theatre.starts["a"]) == pytest.approx([1, 2, 101, 2])


def test_jitter_stays_within_its_share():
    delays = {Backoff(jitter=0.2).jittered(10) for _ in range(200)}
    assert len(delays) > 100
    assert 8 <= min(delays) < 9 < 11 < max(delays) <= 12


def test_backoff_never_overflows():
    backoff, delay = Backoff(first=0.1, most=5), None
    for _ in range(5000):
        delay = backoff.following(delay)
    assert delay == 5


@pytest.mark.trio
async def test_intensity_exceeded_stops_everything_in_reverse(theatre, autojump_clock):
    specs = [theatre.child("a"), theatre.child("b", fail), theatre.child("c")]
    with pytest.raises(IntensityExceeded, match="more than 2 restarts in 30 s") as caught:
        await one_for_one(specs, intensity=Intensity(2, 30), backoff=STEADY)
    assert len(theatre.starts["b"]) == 3
    assert str(caught.value.__cause__) == "life 3"
    assert theatre.log[-2:] == ["c down", "a down"]


@pytest.mark.trio
async def test_intensity_counts_all_children_but_only_in_its_window(theatre, autojump_clock):
    async def fail_slowly(life):
        await trio.sleep(20)
        raise ValueError

    specs = [theatre.child("a", fail_slowly), theatre.child("b", fail_slowly)]
    with trio.move_on_after(200) as scope:
        await one_for_one(specs, intensity=Intensity(2, 20), backoff=STEADY)
    assert scope.cancelled_caught
    with pytest.raises(IntensityExceeded):
        await one_for_one(specs, intensity=Intensity(1, 20), backoff=STEADY)


@pytest.mark.trio
async def test_intensity_exceeded_reaches_the_starter(theatre, autojump_clock):
    async def never_up(*, task_status):
        raise ValueError("no port")

    with pytest.RaisesGroup(IntensityExceeded):
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: one_for_one(
                    [ChildSpec("a", never_up), theatre.child("b")], intensity=Intensity(1, 30), task_status=task_status
                )
            )
    assert theatre.log == []  # b was never begun


@pytest.mark.trio
async def test_permanent_child_that_returns_has_failed(theatre, autojump_clock):
    with pytest.raises(IntensityExceeded) as caught:
        await one_for_one([theatre.child("a", done)], intensity=Intensity(0, 1))
    assert isinstance(caught.value.__cause__, ChildFailed)
    assert "returned" in str(caught.value.__cause__)


@pytest.mark.trio
async def test_ends_when_no_child_is_left(theatre, autojump_clock):
    events = []
    specs = [
        theatre.child("transient", done, restart="transient"),
        theatre.child("temporary", fail, restart="temporary"),
        theatre.child("again", lambda life: fail(life) if life == 1 else done(life), restart="transient"),
    ]
    with trio.fail_after(5):
        await one_for_one(specs, backoff=STEADY, on_event=events.append)
    assert {name: len(times) for name, times in theatre.starts.items()} == {"transient": 1, "temporary": 1, "again": 2}
    assert [e.child for e in events if e.kind == "ended"] == ["transient", "again"]


@pytest.mark.trio
async def test_no_children(autojump_clock):
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: one_for_one([], task_status=task_status))


@pytest.mark.trio
async def test_a_temporary_child_that_never_starts_does_not_hold_up_the_next(theatre, autojump_clock):
    async def never_up(*, task_status):
        raise ValueError

    with trio.move_on_after(1):
        await one_for_one([ChildSpec("t", never_up, restart="temporary"), theatre.child("b")])
    assert theatre.log[0] == "b up"


@pytest.mark.trio
async def test_start_timeout_is_a_failure_and_ends_with_the_start(theatre, autojump_clock):
    events = []
    lives = []

    async def run(*, task_status):
        lives.append(trio.current_time())
        if len(lives) == 1:
            await trio.sleep_forever()
        task_status.started()
        await trio.sleep_forever()

    with trio.move_on_after(100) as scope:
        await one_for_one([ChildSpec("a", run, start_timeout=7)], backoff=STEADY, on_event=events.append)
    assert scope.cancelled_caught
    assert gaps(lives) == pytest.approx([8])
    assert isinstance(events[0].error, ChildFailed)
    assert "within 7 s" in str(events[0].error)


@pytest.mark.trio
async def test_started_too_late_does_not_count(autojump_clock):
    events = []

    async def run(*, task_status):
        try:
            await trio.sleep_forever()
        finally:
            task_status.started()

    with pytest.raises(IntensityExceeded):
        await one_for_one([ChildSpec("a", run, start_timeout=1)], intensity=Intensity(0, 1), on_event=events.append)
    assert [e.kind for e in events] == ["failed"]


@pytest.mark.trio
async def test_started_twice_is_a_failure(autojump_clock):
    async def run(*, task_status):
        task_status.started()
        task_status.started()

    with pytest.raises(IntensityExceeded) as caught:
        await one_for_one([ChildSpec("a", run)], intensity=Intensity(0, 1))
    assert "twice" in str(caught.value.__cause__)


@pytest.mark.trio
async def test_stop_while_starting_is_no_error_for_the_starter(theatre, autojump_clock):
    async def slow(*, task_status):
        await trio.sleep_forever()

    stop = trio.Event()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def later():
            await trio.sleep(1)
            stop.set()

        specs = [theatre.child("a"), ChildSpec("slow", slow), theatre.child("c")]
        with trio.fail_after(5):
            await nursery.start(lambda task_status: one_for_one(specs, stop=stop, task_status=task_status))
    assert theatre.log == ["a up", "a down"]


@pytest.mark.parametrize("how", ["stop", "cancel"])
@pytest.mark.trio
async def test_stopped_during_a_backoff(theatre, autojump_clock, how):
    stop = trio.Event()
    start = trio.current_time()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: one_for_one([theatre.child("a", fail)], backoff=Backoff(first=60), stop=stop))
            await trio.testing.wait_all_tasks_blocked()
            if how == "stop":
                stop.set()
            else:
                scope.cancel()
    assert scope.cancelled_caught is (how == "cancel")
    assert trio.current_time() == start
    assert len(theatre.starts["a"]) == 1


@pytest.mark.trio
async def test_stop_and_failure_in_the_same_tick(theatre, autojump_clock):
    stop = trio.Event()

    async def fail_with_stop(life):
        await trio.lowlevel.checkpoint()
        stop.set()
        raise ValueError

    await one_for_one([theatre.child("a"), theatre.child("b", fail_with_stop)], backoff=STEADY, stop=stop)
    assert len(theatre.starts["b"]) == 1
    assert theatre.log[-1] == "a down"


@pytest.mark.trio
async def test_stop_set_before_the_start(theatre, autojump_clock):
    stop = trio.Event()
    stop.set()
    with trio.fail_after(1):
        await one_for_one([theatre.child("a")], stop=stop)
    assert theatre.log in ([], ["a up", "a down"])


@pytest.mark.trio
async def test_stop_and_cancel_in_the_same_tick(theatre, autojump_clock):
    stop = trio.Event()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: one_for_one([theatre.child("a"), theatre.child("b")], stop=stop))
            await trio.testing.wait_all_tasks_blocked()
            stop.set()
            scope.cancel()
    assert theatre.log == ["a up", "b up", "b down", "a down"]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.trio
async def test_fatal_error_is_never_restarted(theatre, autojump_clock, grouped):
    fatal = FatalError("hung")

    async def die(life):
        await trio.sleep(1)
        raise ExceptionGroup("", [ValueError(), fatal]) if grouped else fatal

    with pytest.raises(FatalError) as caught:
        await one_for_one([theatre.child("a"), theatre.child("b", die), theatre.child("c")], intensity=None)
    assert caught.value is fatal
    assert theatre.log[3:] == ["b down", "c down", "a down"]


@pytest.mark.trio
async def test_system_exit_of_a_child_still_stops_the_others_in_order(theatre, autojump_clock):
    async def leave(life):
        await trio.sleep(1)
        raise SystemExit(3)

    with pytest.RaisesGroup(SystemExit):
        await one_for_one([theatre.child("a"), theatre.child("b"), theatre.child("c", leave)])
    assert theatre.log[-2:] == ["b down", "a down"]


@pytest.mark.trio
async def test_an_error_during_the_stop_is_told_not_restarted(theatre, autojump_clock):
    events = []

    async def bad_cleanup(life):
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("in the clean-up")

    with trio.move_on_after(1) as scope:
        await one_for_one([theatre.child("a", bad_cleanup)], on_event=events.append)
    assert scope.cancelled_caught
    assert events[-1].kind == "stopped"
    assert "in the clean-up" in repr(events[-1].error)


@pytest.mark.trio
async def test_supervisors_nest(theatre, autojump_clock):
    async def subtree(*, task_status):
        await one_for_one([theatre.child("x"), theatre.child("y")], task_status=task_status)

    with trio.move_on_after(1) as scope:
        await one_for_one([theatre.child("a"), ChildSpec("subtree", subtree), theatre.child("c")])
    assert scope.cancelled_caught
    assert theatre.log == [f"{n} up" for n in "axyc"] + [f"{n} down" for n in "cyxa"]
