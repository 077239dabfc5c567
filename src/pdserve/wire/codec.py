"""MessagePack bytes ↔ frames. Never pickle."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdserve.errors import ProtocolError
from pdserve.wire.messages import FromMaster, FromNode

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Largest frame either side accepts: a prompt of a million tokens fits with room to spare."""
RECEIVE_BYTES = 4096
"""Most that is read from a link at once. Python allocates so much for every read, before it knows what comes, and what
is kept meanwhile breaks the room up: with 64 KiB the heap of a Decode node grew by some 300 bytes a request, for good.
"""

_encoder = msgspec.msgpack.Encoder()
_from_master = msgspec.msgpack.Decoder(FromMaster)
_from_node = msgspec.msgpack.Decoder(FromNode)


def encode(frame: msgspec.Struct) -> bytes:
    """The frame's bytes, tag included."""
    return _encoder.encode(frame)


def decode_from_master(data: bytes | str) -> FromMaster:
    """Decode a frame that a Master sent. Raises ProtocolError on anything malformed."""
    return _decode(_from_master, data)


def decode_from_node(data: bytes | str) -> FromNode:
    """Decode a frame that a node sent. Raises ProtocolError on anything malformed."""
    return _decode(_from_node, data)


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | str) -> _T:
    if isinstance(data, str):
        raise ProtocolError("text frame on a binary link")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed frame: {error}") from error
