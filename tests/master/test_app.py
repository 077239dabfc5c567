"""What a Master needs before it can accept nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trustme

from pdserve.config import MasterConfig
from pdserve.errors import ConfigError
from pdserve.master.app import open_master
from pdserve.telemetry.listener import open_listener
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.wire.messages import ModelCard

if TYPE_CHECKING:
    from pathlib import Path

CARD = ModelCard("sim", "w", "v", max_len=64)


@pytest.mark.trio
async def test_a_link_certificate_that_cannot_be_used_names_its_flags(tmp_path: Path) -> None:
    for name in ("one", "other"):
        cert = trustme.CA().issue_cert("127.0.0.1")
        cert.private_key_and_cert_chain_pem.write_to_path(tmp_path / name)
    (tmp_path / "junk").write_text("nonsense")
    for cert_name, key_name in (("junk", "one"), ("one", "junk"), ("one", "other")):
        config = MasterConfig(link_tls_cert=tmp_path / cert_name, link_tls_key=tmp_path / key_name)
        listener = open_listener("127.0.0.1", 0, user_timeout=None)
        with pytest.raises(ConfigError, match=rf"--link-tls-cert .*{cert_name} with --link-tls-key .*{key_name}: "):
            async with open_master(config, CARD, MasterMetrics(), [listener]):
                pytest.fail("it accepts nodes")
        assert listener.fileno() == -1
