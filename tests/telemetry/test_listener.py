import os
import resource
import socket
from contextlib import contextmanager

import pytest
import trio

from pdserve.errors import ConfigError
from pdserve.telemetry.listener import Listener, address_of, open_listener


def test_a_listener_that_cannot_be_opened_names_its_address():
    with open_listener("127.0.0.1", 0, user_timeout=2.5) as taken:
        port = taken.getsockname()[1]
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            open_listener("127.0.0.1", port, user_timeout=None)
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        open_listener("no.such.host.invalid", 0, user_timeout=None)
    with pytest.raises(ConfigError, match="99999"):
        open_listener("127.0.0.1", 99999, user_timeout=None)


def test_ipv6_has_brackets_in_every_line():
    with pytest.raises(ConfigError, match=r"\[::1\]:99999: no such port"):
        open_listener("::1", 99999, user_timeout=None)
    try:
        listener = open_listener("::1", 0, user_timeout=None)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"[::1]:{port}"
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{port}: "):
            open_listener("::1", port, user_timeout=None)


@contextmanager
def no_descriptor_left():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), before[1]))
    taken = []
    try:
        while True:  # the gaps below the limit
            taken.append(os.dup(0))
    except OSError:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in taken:
            os.close(number)


@pytest.mark.trio
async def test_connections_wait_while_no_descriptor_is_left(caplog):
    with trio.fail_after(10), socket.socket() as client:
        sock = open_listener("127.0.0.1", 0, user_timeout=None)
        async with Listener(sock) as listener:
            client.connect(sock.getsockname())
            with no_descriptor_left(), trio.move_on_after(0.35) as waiting:
                await listener.accept()
            assert waiting.cancelled_caught
            async with await listener.accept() as stream:
                client.sendall(b"x")
                assert await stream.receive_some() == b"x"
    (warning,) = caplog.records
    assert (warning.levelname, warning.exc_info) == ("WARNING", None)
    assert "Too many open files" in warning.message
