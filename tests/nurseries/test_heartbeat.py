import pytest
import trio

from pdserve.nurseries.heartbeat import Heartbeat, PeerSilent, pace


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (-1, 1)])
def test_times_must_be_positive(values):
    with pytest.raises(ValueError, match="positive"):
        Heartbeat(*values)


@pytest.mark.trio
async def test_pings_every_interval_while_the_peer_answers(autojump_clock):
    heartbeat = Heartbeat(2, 5)
    pings = []

    def ping():
        pings.append(trio.current_time())
        heartbeat.beat()

    start = trio.current_time()
    with trio.move_on_after(21) as scope:
        await heartbeat.run(ping)
    assert scope.cancelled_caught
    assert pings == pytest.approx([start + 2 * k for k in range(1, 11)])


@pytest.mark.trio
async def test_silence_is_found_exactly_at_the_deadline(autojump_clock):
    heartbeat = Heartbeat(2, 5)
    assert heartbeat.silence == 0
    pings = []
    start = trio.current_time()
    with pytest.raises(PeerSilent) as caught:
        await heartbeat.run(lambda: pings.append(trio.current_time()))
    assert trio.current_time() - start == pytest.approx(5)
    assert caught.value.seconds == pytest.approx(5)
    assert len(pings) == 2


@pytest.mark.trio
async def test_patience_shorter_than_the_interval(autojump_clock):
    start = trio.current_time()
    with pytest.raises(PeerSilent):
        await Heartbeat(10, 3).run(lambda: None)
    assert trio.current_time() - start == pytest.approx(3)


@pytest.mark.trio
async def test_a_message_moves_the_deadline(autojump_clock):
    heartbeat = Heartbeat(100, 5)
    start = trio.current_time()

    async def one_message():
        await trio.sleep(4)
        heartbeat.beat()
        await trio.sleep(1)
        assert heartbeat.silence == pytest.approx(1)

    with pytest.RaisesGroup(PeerSilent):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one_message)
            nursery.start_soon(heartbeat.run, lambda: None)
    assert trio.current_time() - start == pytest.approx(9)


@pytest.mark.trio
async def test_a_message_in_the_tick_of_the_deadline_counts_if_it_was_read_first(autojump_clock):
    heartbeat = Heartbeat(100, 5)

    async def message():
        await trio.sleep(4.999999)
        heartbeat.beat()

    with trio.move_on_after(7) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(message)
            nursery.start_soon(heartbeat.run, lambda: None)
    assert scope.cancelled_caught


@pytest.mark.trio
async def test_own_standstill_is_not_the_peers_silence(mock_clock):
    heartbeat = Heartbeat(2, 5)
    pings = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heartbeat.run, lambda: pings.append(trio.current_time()))
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(60)
        await trio.testing.wait_all_tasks_blocked()
        assert len(pings) == 1  # and not the thirty that were missed
        heartbeat.beat()
        mock_clock.jump(1.9)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("own", "peers", "interval"), [(2, 0, 2), (2, 10, 2), (10, 2, 2), (2, 1e-9, 0.05), (2, float("nan"), 2), (2, -1, 2)]
)
def test_a_peer_is_pinged_as_often_as_it_needs_to_trust_this_side(own, peers, interval):
    assert pace(own, peers) == interval
