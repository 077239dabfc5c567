"""Metadata of transfer agents, signed under the cluster token: checked by the Master and by every peer."""

from __future__ import annotations

import hashlib
import hmac

from pdserve.wire.messages import TransferMetadata


def sign(agent: str, blob: bytes, token: str) -> TransferMetadata:
    """Metadata that is `authentic` under the same cluster token."""
    return TransferMetadata(agent=agent, blob=blob, mac=_mac(agent, blob, token))


def authentic(metadata: TransferMetadata, token: str) -> bool:
    """Whether `metadata` was signed with `token`, bit for bit.

    Asked with an empty token as well: one flipped bit of a NIXL blob can abort the process that loads it.
    """
    return hmac.compare_digest(metadata.mac, _mac(metadata.agent, metadata.blob, token))


def _mac(agent: str, blob: bytes, token: str) -> bytes:
    name = agent.encode("utf-8", "surrogatepass")
    return hmac.new(token.encode(), len(name).to_bytes(4, "big") + name + blob, hashlib.sha256).digest()
