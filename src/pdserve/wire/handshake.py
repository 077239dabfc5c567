"""Who may register: versions, capabilities, and the proof of the cluster token. Decisions only, no I/O.

Master → Challenge{nonce}; node → Hello{…, nonce, proof}; Master → Welcome{…, proof} or Reject{code, reason}. The proof
is HMAC-SHA256 under the cluster token over the other side's nonce and the own identity; the token is never sent. With
an empty token proofs are still made and checked, they then prove nothing but an intact frame.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

import msgspec

from pdserve.wire.messages import Hello, Reject
from pdserve.wire.metadata import authentic

if TYPE_CHECKING:
    from pdserve.wire.messages import ModelCard

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
DECODE_ADMISSION = "decode_admission"
REPLACED = 4001
"""Close code, of the range for private use: another connection has registered under this node's id."""

_NONCE_BYTES = 16


def new_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def _mac(token: str, *parts: bytes) -> bytes:
    mac = hmac.new(token.encode(), digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.digest()


def node_proof(token: str, nonce: bytes, hello: Hello) -> bytes:
    """A node's answer to the Master's nonce; binds everything that identifies the node."""
    agent = hello.transfer.agent.encode() + hello.transfer.mac
    return _mac(token, b"node", nonce, hello.role.encode(), hello.node_id.encode(), hello.incarnation.encode(), agent)


def master_proof(token: str, nonce: bytes, master: str) -> bytes:
    """A Master's answer to the node's nonce."""
    return _mac(token, b"master", nonce, master.encode())


def signed(hello: Hello, token: str, challenge: bytes) -> Hello:
    """The Hello with a fresh nonce and the proof for `challenge`."""
    return msgspec.structs.replace(hello, nonce=new_nonce(), proof=node_proof(token, challenge, hello))


def verify_master(token: str, nonce: bytes, master: str, proof: bytes) -> bool:
    return hmac.compare_digest(master_proof(token, nonce, master), proof)


def common_version(hello: Hello) -> int | None:
    """The highest protocol version that both sides speak."""
    version = min(PROTOCOL_MAX, hello.protocol_max)
    return version if version >= max(PROTOCOL_MIN, hello.protocol_min) else None


def judge(hello: Hello, *, token: str, challenge: bytes, card: ModelCard, need_admission: bool) -> int | Reject:
    """The version to speak with this node, or why it is refused."""
    if not hmac.compare_digest(node_proof(token, challenge, hello), hello.proof):
        return Reject("unauthorised", "wrong cluster token: give Master and workers the same --cluster-token")
    version = common_version(hello)
    if version is None:
        return Reject(
            "version",
            f"no common protocol version: node speaks {hello.protocol_min}..{hello.protocol_max}, "
            f"Master {PROTOCOL_MIN}..{PROTOCOL_MAX}",
        )
    if not authentic(hello.transfer, token):
        return Reject("transfer", "the node's transfer metadata is damaged or signed with another cluster token")
    theirs, ours = hello.model, card
    if (theirs.name, theirs.weights_hash, theirs.vocab_hash) != (ours.name, ours.weights_hash, ours.vocab_hash):
        what = f"{theirs.name} (weights {theirs.weights_hash[:12]}), not {ours.name} (weights {ours.weights_hash[:12]})"
        return Reject("model", f"the node serves {what}: check --model")
    if hello.role == "decode" and need_admission and DECODE_ADMISSION not in hello.capabilities:
        return Reject(
            "capability",
            f"the node lacks the capability {DECODE_ADMISSION}: upgrade Decode nodes first, or start the Master with "
            "--disable-admission",
        )
    return version
