"""A network device that does not exist, with the real NIXL, in a process of its own: UCX reads its variables once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl is not installed")

PROGRAM = """
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


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("nope0,nope1:1", "--nixl-device (UCX_NET_DEVICES) nope0,nope1:1: no network device nope0, nope1"),
        ("lo,nope0", "made"),
    ],
)
def test_a_device_that_does_not_exist_names_its_flag(devices: str, said: str) -> None:
    env = os.environ | {"UCX_NET_DEVICES": devices}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, text=True, timeout=30)
    assert done.stdout.strip() == said
