"""`up` with real processes and real signals; a small script stands in for the roles."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from pdserve import control
from pdserve.config import DecodeConfig, MasterConfig, PrefillConfig, UpConfig
from pdserve.errors import ConfigError
from pdserve.nurseries.groups import leaves
from pdserve.nurseries.supervisor import IntensityExceeded
from pdserve.ports import check_ports, hold_ports, with_usable_ports
from pdserve.process import ChildProcess, describe_exit
from pdserve.up import ChildRefusedError, plan, ready_line, run_up, url_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROLE = """
import http.server, json, os, signal, sys, threading, time
from pdserve.control import tie_to_parent
tie_to_parent()
role, folder = sys.argv[2], sys.argv[1]
flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[3:] if "=" in word)
name = role if role == "master" else flags["node-id"].split("up-")[1]

def note(event):
    with open(f"{folder}/events", "a") as file:
        file.write(f"{name} {event} {os.getpid()} {os.environ['PDSERVE_RESTARTS']}\\n")

def behaviour():
    try:
        return open(f"{folder}/{name}").read()
    except FileNotFoundError:
        return ""

def leave(*_):
    if behaviour() == "stubborn":
        return
    note("left")
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
note("started")
if behaviour().startswith("exit"):
    sys.exit(int(behaviour().split()[1]))

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        nodes = [line.split()[0] for line in open(f"{folder}/events")]
        whose = "other" if os.path.exists(f"{folder}/other") else "up"
        nodes = [{"node": f"{whose}-{node}"} for node in set(nodes) - {"master"}]
        body = json.dumps({"ready": True, "nodes": nodes, "model": "served"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

if role == "master":
    http.server.HTTPServer.allow_reuse_address = True
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["port"])), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
"""


class Up:
    """What `run_up` did, seen from outside: the notes of its children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "role.py").write_text(ROLE)
        self.command = (sys.executable, str(folder / "role.py"), str(folder))

    def events(self) -> list[tuple[str, str, int, int]]:
        try:
            lines = (self.folder / "events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(name, what, int(pid), int(lives)) for name, what, pid, lives in map(str.split, lines)]

    async def until(self, happened: Callable[[list[tuple[str, str, int, int]]], bool]) -> None:
        while not happened(self.events()):
            await trio.sleep(0.02)

    def alive(self) -> list[int]:
        return [pid for _, what, pid, _ in self.events() if what == "started" and is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.fixture
def up(tmp_path: Path) -> Any:
    found = Up(tmp_path)
    yield found
    assert found.alive() == []


def config(**changes: Any) -> UpConfig:
    return UpConfig(port=0, link_port=0, engine="sim", node_id="up", drain_timeout=1.0, **changes)


def started(count: int) -> Callable[[list[tuple[str, str, int, int]]], bool]:
    return lambda events: sum(what == "started" for _, what, _, _ in events) >= count


@pytest.mark.trio
async def test_ready_line_once_then_drain_front_to_back(up: Up, capfd: pytest.CaptureFixture[str]) -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_up, config(prefill=2), up.command)
            await up.until(started(4))
            while not (out := capfd.readouterr().out):
                await trio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)  # at once: the same stop, sent to the process and to its group
    assert out.startswith("pdserve is ready at http://127.0.0.1:")
    assert "curl -N" in out
    assert '"model": "served"' in out
    assert len(out.splitlines()) == 1
    left = [name for name, what, _, _ in up.events() if what == "left"]
    assert left == ["master", "prefill-2", "prefill-1", "decode-0"]


@pytest.fixture
def terminal() -> Iterator[None]:
    """SIGHUP means something here, even where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.trio
async def test_child_that_dies_is_restarted_alone_and_knows_it(up: Up, terminal: None) -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_up, config(), up.command)
            await up.until(started(3))
            victim = next(pid for name, _, pid, _ in up.events() if name == "decode-0")
            os.kill(victim, signal.SIGKILL)
            await up.until(started(4))
            os.kill(os.getpid(), signal.SIGHUP)  # the terminal goes
    assert [what for _, what, _, _ in up.events()].count("left") == 3
    lives = [(name, life) for name, what, _, life in up.events() if what == "started"]
    assert lives[-1] == ("decode-0", 1)
    assert sorted(lives[:3]) == [("decode-0", 0), ("master", 0), ("prefill-1", 0)]


@pytest.mark.trio
async def test_too_many_restarts_stop_everything_with_the_cause(up: Up, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "pdserve.up")
    (up.folder / "prefill-1").write_text("exit 9")
    (up.folder / "decode-0").write_text("stubborn")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up, up)
            while "giving up" not in caplog.text:
                await trio.sleep(0.02)
            assert any(name == "decode-0" for name, *_ in up.events())
            assert up.alive()  # it is said before the drain
            os.kill(next(pid for name, _, pid, _ in up.events() if name == "decode-0"), signal.SIGKILL)
    failed = "prefill-1 exited with code 9"
    said = [record.getMessage() for record in caplog.records]
    assert said[:3] == [failed, failed, "giving up: draining the others"]
    assert said[3:] in ([], ["decode-0 was killed by SIGKILL"])  # it may die before its own drain has begun


async def give_up(up: Up) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await run_up(config(restart_intensity=1), up.command)
    (error,) = leaves(caught.value)
    assert isinstance(error, IntensityExceeded)
    assert "more than 1 restarts in 60 s, last: prefill-1: prefill-1 exited with code 9" in str(error)
    assert str(error.__cause__) == "prefill-1 exited with code 9"
    assert sum(name == "prefill-1" for name, _, _, _ in up.events()) == 2


@pytest.mark.trio
async def test_child_that_cannot_run_here_is_not_restarted(up: Up) -> None:
    (up.folder / "decode-0").write_text("exit 3")
    with trio.fail_after(20), pytest.raises(ExceptionGroup) as caught:
        await run_up(config(), up.command)
    (error,) = leaves(caught.value)
    assert isinstance(error, ChildRefusedError)
    assert error.status == 3
    assert sum(name == "decode-0" for name, _, _, _ in up.events()) == 1


@pytest.mark.trio
async def test_second_signal_kills_at_once(up: Up) -> None:
    (up.folder / "master").write_text("stubborn")
    begun = trio.current_time()

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            patient = UpConfig(port=0, link_port=0, node_id="up", engine="sim", restart_intensity=0)
            nursery.start_soon(run_up, patient, up.command)
            await up.until(started(3))
            os.kill(os.getpid(), signal.SIGTERM)
            await trio.sleep(0.6)
            os.kill(os.getpid(), signal.SIGTERM)

    with trio.fail_after(20), pytest.raises(BaseExceptionGroup) as caught:
        await scenario()
    assert [type(error) for error in leaves(caught.value)] == [KeyboardInterrupt]
    assert trio.current_time() - begun < 15  # the drain alone would have been given 30 s


@pytest.mark.trio
async def test_child_that_does_not_drain_is_killed(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.up._MARGIN", 0.2)
    monkeypatch.setattr("pdserve.up._LEAVE", 0.2)
    (up.folder / "decode-0").write_text("stubborn")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_up, config(), up.command)
            await up.until(started(3))
            os.kill(os.getpid(), signal.SIGTERM)
    assert [name for name, what, _, _ in up.events() if what == "left"] == ["master", "prefill-1"]


def test_nothing_is_left_when_up_is_killed(up: Up) -> None:
    program = (
        "import trio, sys; from pdserve.up import run_up; from pdserve.config import UpConfig\n"
        "trio.run(run_up, UpConfig(port=0, link_port=0, node_id='up', engine='sim'), tuple(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, *up.command])
    try:
        end = time.monotonic() + 20
        while not started(3)(up.events()):
            assert time.monotonic() < end
            time.sleep(0.02)
        assert len(up.alive()) == 3
    finally:
        process.kill()
        process.wait()
    while up.alive():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.trio
async def test_taken_port_is_named_before_anything_starts(up: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen on 127.0.0.1"):
            await run_up(UpConfig(port=port), up.command)
        with pytest.raises(ConfigError, match="--link-port"):
            with_usable_ports(UpConfig(port=0, link_port=port))
        with pytest.raises(ConfigError, match=f"--status-port {port}: cannot listen on 127.0.0.1"):
            check_ports(DecodeConfig(status_port=port))
    for field in ("host", "link_host"):
        with pytest.raises(ConfigError) as caught:
            check_ports(
                MasterConfig(**{"port": 0, "link_port": 0, "cluster_token": "s", field: "no.such.host.invalid"})
            )
        assert str(caught.value).startswith(f"--{field.replace('_', '-')} no.such.host.invalid: ")
        assert "port" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: "):
        with_usable_ports(UpConfig(host="192.0.2.1"))
    assert up.events() == []


@pytest.mark.trio
async def test_another_up_that_starts_on_the_same_ports_is_refused_before_anything_starts(up: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, link_port = one.getsockname()[1], two.getsockname()[1]
    for taken, name in (UpConfig(port=port), "--port"), (UpConfig(port=0, link_port=link_port), "--link-port"):
        with hold_ports(taken), pytest.raises(ConfigError, match=f"{name} .*: another pdserve"):
            await run_up(UpConfig(port=port, link_port=link_port), up.command)
    with hold_ports(UpConfig(port=port, link_port=link_port)):
        pass
    assert up.events() == []


@pytest.mark.trio
async def test_the_nodes_of_others_do_not_make_it_ready(up: Up, capfd: pytest.CaptureFixture[str]) -> None:
    (up.folder / "other").touch()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_up, config(), up.command)
            await up.until(started(3))
            await trio.sleep(1)
            assert capfd.readouterr().out == ""
            (up.folder / "other").unlink()
            while not capfd.readouterr().out:
                await trio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)


def test_ports_must_differ() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
    with pytest.raises(ConfigError, match="must differ"):
        with_usable_ports(UpConfig(port=port, link_port=port))


def test_plan() -> None:
    children = plan(
        UpConfig(
            prefill=2, decode=1, engine="sim", cluster_token="s", link_host="::", status_port=9000, masters="ws://b:1"
        ),
        cores=7,
    )
    assert [child.name for child in children] == ["decode-0", "prefill-1", "prefill-2", "master"]
    decode, _, prefill, master = (child.config for child in children)
    assert isinstance(decode, DecodeConfig)
    assert isinstance(prefill, PrefillConfig)
    assert decode.master_urls == ("ws://[::1]:8100", "ws://b:1")
    assert decode.threads == 2
    assert (decode.status_port, prefill.status_port) == (9000, 9002)
    assert decode.node_id != prefill.node_id
    assert isinstance(master, MasterConfig)
    assert {child.config.model for child in children} == {"sim-bytes"}
    assert {child.config.cluster_token for child in children} == {"s"}


def test_plan_on_few_cores() -> None:
    workers = plan(UpConfig(prefill=2, decode=2), cores=2)[:-1]
    assert [worker.config.threads for worker in workers if isinstance(worker.config, DecodeConfig)] == [1, 1]
    (decode, *_) = plan(UpConfig(threads=5), cores=2)
    assert isinstance(decode.config, DecodeConfig)
    assert decode.config.threads == 5


def test_ready_line(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.touch()
    line = ready_line(UpConfig(tls_cert=pem, tls_key=pem, api_key=("hush",), host="0.0.0.0"), "m")
    assert "https://127.0.0.1:8000" in line
    assert "curl -k -N" in line
    assert "hush" not in line
    assert "$PDSERVE_API_KEY" in line
    body = line.split(" -d '")[1].split("'")[0]
    assert json.loads(body)["stream"] is True
    assert url_host("[::1]") == "[::1]"


def test_describe_exit() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-64) in ("was killed by SIGRTMAX", "was killed by signal 64")
    assert describe_exit(-500) == "was killed by signal 500"


@pytest.mark.trio
async def test_left_process_is_dead_and_its_descriptors_are_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(10):
        with ChildProcess([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ)) as process:
            assert is_alive(process.pid)
        assert await process.wait() == -signal.SIGKILL
        process.terminate()
        process.kill()
        process.leave()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.trio
async def test_process_that_cannot_start_leaks_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/nowhere/python"], {})
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.trio
async def test_child_ignores_the_terminal_and_leaves_with_the_pipe() -> None:
    program = (
        "import os, signal, trio\n"
        "from pdserve.control import restarts, tie_to_parent, under_up, watch_control\n"
        "tie_to_parent()\n"
        "assert under_up() and restarts() == 4\n"
        "async def main():\n"
        "    async with trio.open_nursery() as nursery:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        await watch_control(lambda: os._exit(42))\n"
        "trio.run(main)\n"
    )
    with trio.fail_after(10), ChildProcess([sys.executable, "-c", program], dict(os.environ), restarts=4) as process:
        with trio.move_on_after(0.5):
            await process.wait()
            pytest.fail("left though nobody asked")
        process.leave()
        assert await process.wait() == 42


@pytest.mark.trio
async def test_control_without_up(monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock) -> None:
    monkeypatch.delenv(control.CONTROL_FD, raising=False)
    monkeypatch.delenv(control.UNDER_UP, raising=False)
    before = signal.getsignal(signal.SIGINT)  # a background job of a shell ignores it
    control.tie_to_parent()
    assert signal.getsignal(signal.SIGINT) == before
    assert not control.under_up()
    with trio.move_on_after(1000) as scope:
        await control.watch_control(lambda: None)
    assert scope.cancelled_caught
    monkeypatch.setenv(control.CONTROL_FD, "1000000")
    with pytest.raises(ConfigError, match=control.CONTROL_FD):
        await control.watch_control(lambda: None)
