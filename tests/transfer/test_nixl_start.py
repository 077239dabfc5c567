"""How the real NIXL starts, each time in a process of its own: UCX reads its variables once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl is not installed")

DEVICES = """
from pdserve.errors import ConfigError
from pdserve.transfer.nixl_agent import NixlAgent, prepare_environment
prepare_environment(loopback=False)
try:
    NixlAgent("it")
except ConfigError as error:
    print(error)
else:
    print("made")
"""

SIGNALS = """
import os, signal
from pdserve.transfer.nixl_agent import NixlAgent, prepare_environment
signal.signal(signal.SIGHUP, lambda *_: print("heard"))
prepare_environment(loopback=True)
agent = NixlAgent("it")
os.kill(os.getpid(), signal.SIGHUP)
"""


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("nope0,nope1:1", "--nixl-device (UCX_NET_DEVICES) nope0,nope1:1: no network device nope0, nope1"),
        ("lo,nope0", "made"),
    ],
)
def test_a_device_that_does_not_exist_names_its_flag(devices: str, said: str) -> None:
    assert run(DEVICES, UCX_NET_DEVICES=devices) == said


def test_sighup_stays_what_it_was() -> None:
    """UCX would take it, to begin to debug itself."""
    assert run(SIGNALS) == "heard"


def run(program: str, **variables: str) -> str:
    words = [sys.executable, "-c", program]
    return subprocess.run(
        words, env=os.environ | variables, stdout=subprocess.PIPE, text=True, timeout=30
    ).stdout.strip()
