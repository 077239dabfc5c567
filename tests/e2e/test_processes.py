"""The processes of one `up`: what they are made of, what they cost when idle, and that none is ever left behind."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROLES = ("master", "prefill", "decode")


def test_one_process_a_role_and_the_master_has_neither_torch_nor_nixl(service):
    assert service.children() == {service.pid(role) for role in ROLES}
    loaded = {role: Path(f"/proc/{service.pid(role)}/maps").read_text() for role in ROLES}
    assert not re.search("libtorch|nixl|libucp", loaded["master"])
    assert re.search("libtorch", loaded["prefill"])  # the pattern is able to find it
    assert re.search("nixl", loaded["decode"])


def test_idle_processes_are_idle(service):
    """The targets are 2 % of a core for the Master and 4 % for a worker; the limits leave room for a busy machine."""
    service.wait_quiet()
    time.sleep(1)
    before = {role: service.cpu_seconds(role) for role in ROLES}
    time.sleep(5)
    share = {role: (service.cpu_seconds(role) - seconds) / 5 for role, seconds in before.items()}
    print("idle share of a core:", share)
    assert share["master"] < 0.05
    assert share["prefill"] < 0.10
    assert share["decode"] < 0.10


def test_when_up_is_killed_no_child_is_left(sim, await_true, is_alive):
    with sim("--sim-decode-ms", "20") as it, ThreadPoolExecutor(1) as pool:
        running = pool.submit(it.stream, "orphans", max_tokens=2000, ignore_eos=True)
        it.wait_leases(1)
        pids = it.children()
        assert len(pids) == 3
        it.process.kill()
        took = await_true(lambda: not any(map(is_alive, pids)), 40, "children were left behind")
        print(f"all children had gone {took:.2f} s after the kill of up")
        running.exception()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_drain_lets_a_running_stream_finish_and_takes_nothing_new(sim, number, await_true):
    with sim("--sim-decode-ms", "20") as it, ThreadPoolExecutor(1) as pool:
        running = pool.submit(it.stream, "drain", max_tokens=150, ignore_eos=True)
        it.wait_leases(1)
        it.process.send_signal(number)
        await_true(lambda: "draining" in it.log, 10, "no drain began")
        stream = running.result()
        assert (len(stream.ids), stream.errors, stream.done) == (150, [], True)
        assert it.process.wait(60) == 0


def test_what_does_not_finish_within_the_drain_is_told_and_the_master_leaves_in_time(sim, await_true):
    with sim("--sim-decode-ms", "20", "--drain-timeout", "4") as it, ThreadPoolExecutor(2) as pool:
        running = pool.submit(it.stream, "for ever", max_tokens=4000, ignore_eos=True)
        whole = pool.submit(it.client.post, "/v1/completions", json=it.body("whole", max_tokens=4000, ignore_eos=True))
        it.wait_leases(2)
        master = it.pid("master")
        began = time.monotonic()
        os.kill(master, signal.SIGTERM)
        stream = running.result()
        stream.assert_failed()
        assert "stopped before" in stream.errors[0]["message"]
        assert whole.result().status_code == 503
        await_true(lambda: it.pid("master") != master, 20, "the Master was not started again")
        assert 4 <= time.monotonic() - began < 8
        await_true(it.ready, 30, "not ready again")
        it.wait_quiet()


def test_a_second_signal_ends_everything_at_once(sim, await_true, is_alive):
    with sim("--sim-decode-ms", "20") as it, ThreadPoolExecutor(1) as pool:
        running = pool.submit(it.stream, "at once", max_tokens=4000, ignore_eos=True)
        it.wait_leases(1)
        pids = it.children()
        it.process.send_signal(signal.SIGINT)
        time.sleep(1)  # within half a second it would count as the same signal
        began = time.monotonic()
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(10) == 130
        print(f"gone {time.monotonic() - began:.2f} s after the second signal")
        assert not any(map(is_alive, pids))
        running.exception()
