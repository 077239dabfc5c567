import socket

import pytest

from pdserve.errors import ConfigError
from pdserve.telemetry.serving import open_listener


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
