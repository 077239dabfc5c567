from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from pdserve.config import (
    DEFAULT_MODEL,
    SIM_MODEL,
    DecodeConfig,
    Faults,
    MasterConfig,
    PrefillConfig,
    UpConfig,
    is_loopback,
    parse_faults,
)
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ROLES = (MasterConfig, PrefillConfig, DecodeConfig, UpConfig)


@pytest.mark.parametrize("kind", ROLES)
def test_defaults_are_usable_and_frozen(kind: Any) -> None:
    config = kind()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.model = "other"


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (MasterConfig, "request_timeout", 0),
        (MasterConfig, "request_timeout", math.nan),
        (MasterConfig, "port", 65536),
        (MasterConfig, "port", -1),
        (MasterConfig, "host", " "),
        (MasterConfig, "model", ""),
        (MasterConfig, "admission_timeout", -0.1),
        (MasterConfig, "max_body_bytes", 0),
        (MasterConfig, "reservation_ttl", 0),
        (MasterConfig, "api_key", [""]),
        (MasterConfig, "api_key", [" ", ","]),
        (MasterConfig, "cluster_token", " "),
        (DecodeConfig, "cluster_token", "\t"),
        (DecodeConfig, "admission_timeout", -1),
        (DecodeConfig, "admission_timeout", math.inf),
        (DecodeConfig, "admission_queue_size", -2),
        (DecodeConfig, "max_running_requests", 0),
        (DecodeConfig, "kv_tokens", 15),
        (DecodeConfig, "page_size", 0),
        (DecodeConfig, "heartbeat_interval", 0),
        (DecodeConfig, "step_timeout", math.nan),
        (DecodeConfig, "masters", ""),
        (DecodeConfig, "masters", "http://a:1"),
        (DecodeConfig, "masters", "ws://a"),
        (DecodeConfig, "masters", "ws://a:port"),
        (DecodeConfig, "masters", "ws://a:1,b:2"),
        (DecodeConfig, "resolve_interval", 0),
        (DecodeConfig, "faults", "explode"),
        (PrefillConfig, "hold_share", 0),
        (PrefillConfig, "hold_share", 1.01),
        (PrefillConfig, "prefill_queue_tokens", 0),
        (UpConfig, "prefill", 0),
        (UpConfig, "restart_intensity", -1),
    ],
)
def test_unusable_value_names_its_flag(kind: Any, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        kind(**{field: value})


def test_edges_that_are_allowed() -> None:
    assert DecodeConfig(admission_timeout=0, admission_queue_size=0).queue_size == 0
    assert DecodeConfig(max_running_requests=7).queue_size == 7
    assert PrefillConfig(hold_share=1.0).hold_share == 1.0
    assert MasterConfig(request_timeout=-1).total_deadline == math.inf
    assert MasterConfig(request_timeout=1.5).total_deadline == 1.5


def test_link_open_to_the_network_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "master.example"):
        with pytest.raises(ConfigError, match="--cluster-token"):
            MasterConfig(link_host=host)
        assert MasterConfig(link_host=host, cluster_token="s").link_host == host
    with pytest.raises(ConfigError, match="--link-host"):
        UpConfig(link_host="0.0.0.0")


def test_tls_files(tmp_path: Path) -> None:
    here = tmp_path / "cert.pem"
    with pytest.raises(ConfigError, match="--tls-cert: there is no file"):
        MasterConfig(tls_cert=here, tls_key=here)
    here.touch()
    with pytest.raises(ConfigError, match="--link-tls-cert and --link-tls-key belong together"):
        MasterConfig(link_tls_cert=here)
    assert MasterConfig(tls_cert=here, tls_key=here).tls_cert == here


def test_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "example.com", "192.168.0.1")))


def test_addresses_have_no_brackets() -> None:
    config = UpConfig(host="[::1]", link_host="[::1]", status_host="[::1]")
    assert (config.host, config.link_host, config.status_host) == ("::1", "::1", "::1")
    with pytest.raises(ConfigError, match="--host"):
        UpConfig(host="[]")


def test_masters() -> None:
    config = DecodeConfig(masters=" ws://a:1, wss://[::1]:2,,ws://a:1")
    assert config.master_urls == ("ws://a:1", "wss://[::1]:2")


def test_ucx_stays_on_loopback_only_while_all_masters_are_local() -> None:
    assert DecodeConfig(masters="ws://127.0.0.1:1,ws://localhost:2").ucx_net_devices == "lo"
    assert DecodeConfig(masters="ws://127.0.0.1:1,ws://far:2").ucx_net_devices == ""
    for name in ("masters.prod.svc", "localhost.example", "127.0.0.1.example"):  # wherever they lead today
        assert DecodeConfig(masters=f"ws://{name}:1").ucx_net_devices == ""
    assert DecodeConfig(nixl_device="eth1").ucx_net_devices == "eth1"


def test_node_name() -> None:
    assert DecodeConfig(node_id="d0").node_name("decode") == "d0"
    name = DecodeConfig().node_name("decode")
    assert name.startswith(f"decode-{socket.gethostname()}-{os.getpid()}-")
    assert DecodeConfig().node_name("decode") == name


def test_nodes_with_the_same_host_and_pid_have_different_names() -> None:
    program = (
        "import os, socket; os.getpid = lambda: 1; socket.gethostname = lambda: 'host'\n"
        "from pdserve.config import *; from pdserve.up import plan\n"
        "print(PrefillConfig().node_name('prefill'), *(one.config.node_id for one in plan(UpConfig(), 1)[:2]))"
    )
    one, other = (subprocess.check_output([sys.executable, "-c", program], text=True).split() for _ in range(2))
    assert len({*one, *other}) == 6
    assert one[0].startswith("prefill-host-1-")
    assert [name.split("-")[-2:] for name in one[1:]] == [["decode", "0"], ["prefill", "1"]]


def test_model_of_up() -> None:
    assert UpConfig().model_name == DEFAULT_MODEL
    assert UpConfig(engine="sim").model_name == SIM_MODEL
    assert UpConfig(engine="sim", model=DEFAULT_MODEL).model_name == DEFAULT_MODEL


def test_secrets_do_not_show() -> None:
    assert "hush" not in repr(UpConfig(cluster_token="hush", api_key=("hush",)))


def test_faults() -> None:
    assert parse_faults("") == Faults()
    text = "omit-first-token, transfer-delay=0.5,transfer-fail=-1,step-hang-after=20,protocol-bump"
    assert parse_faults(text) == Faults(
        omit_first_token=True, transfer_delay=0.5, transfer_fail=-1, step_hang_after=20, protocol_bump=True
    )


@pytest.mark.parametrize("text", ["transfer-delay", "omit-first-token=1", "transfer-fail=x", "transfer-delay=", "=1"])
def test_bad_faults(text: str) -> None:
    with pytest.raises(ConfigError, match="--faults"):
        parse_faults(text)
