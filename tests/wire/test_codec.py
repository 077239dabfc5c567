"""Frames on the wire: round trips, unknown fields, older and newer peers, garbage."""

from __future__ import annotations

import contextlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from pdserve.wire import messages
from pdserve.wire.codec import decode_from_master, decode_from_node, encode
from pdserve.wire.messages import (
    Admitted,
    Busy,
    Cancel,
    Challenge,
    Decode,
    Delta,
    Draining,
    Failed,
    FirstToken,
    Hello,
    KvLayout,
    ModelCard,
    NodeStats,
    PeerDown,
    PeerUp,
    Ping,
    Prefill,
    Prefilled,
    Reject,
    Release,
    Renew,
    Reserve,
    Reserved,
    SamplingParams,
    Settled,
    TokenLogprob,
    TransferMetadata,
    Welcome,
)

LOGPROB = TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.25)))
FIRST = FirstToken(7, LOGPROB, 1)
PARAMS = SamplingParams(
    max_tokens=9, temperature=0.25, seed=2**63 + 5, stop=("a", "é\u4e2d"), stop_token_ids=(1, 2), logprobs=2
)
TRANSFER = TransferMetadata("agent", b"\x00\xff", b"mac")
FROM_MASTER = [
    Challenge(b"nonce"),
    Challenge(b"nonce", "incarnation"),
    Welcome(3, 1, "master", b"proof", ("x",)),
    Reject("version", "no"),
    Ping(),
    PeerUp("p0", "inc", TRANSFER),
    PeerDown("p0", "inc"),
    Prefill("r", 1, (1, 2, 3), PARAMS, 2),
    Reserve("r", 2, 3, 100, 16, 5.0, 2.5),
    Decode("r", 2, (1, 2, 3), PARAMS, b"\x00handle", FIRST, 1, 2.5, 3, True),
    Decode("r", 2, (1,), SamplingParams(), b""),
    Cancel("r", 1),
    Cancel("r", 1, 2),
    Release("r", 1),
    Renew("r", 1),
]
FROM_NODE = [
    Hello(
        protocol_min=1,
        protocol_max=2,
        role="decode",
        node_id="d0",
        incarnation="inc",
        model=ModelCard("m", "w", "v", 100),
        layout=KvLayout(16, 128, 1, 1, 1, "sim"),
        transfer=TRANSFER,
        capacity=4,
        capabilities=("decode_admission",),
        nonce=b"n",
        proof=b"p",
        status_url="http://x",
    ),
    Ping(),
    NodeStats(capacity=4, active=1, queued=2, reserved=1, pages_free=3, draining=True),
    Prefilled("r", 1, b"handle", (FIRST, FirstToken(8)), 64),
    Reserved("r", 1, 0.25),
    Admitted("r", 1, 0, 0.25),
    Busy("r", 1, "queue_full", 2.0, 1),
    Delta("r", 1, 5, (1, 2), "a\u4e2d\U0001f600", (LOGPROB, LOGPROB), "stop", "END", 1),
    Delta("r", 1, 0, (1,), "", (), "length", 17),
    Settled("r", 1, 4),
    Failed("r", 1, "invalid_request", "why", "prompt", 1),
    Draining(),
]


@pytest.mark.parametrize("frame", FROM_MASTER, ids=lambda frame: type(frame).__name__)
def test_every_frame_of_a_master_comes_back_as_it_was(frame):
    assert decode_from_master(encode(frame)) == frame


@pytest.mark.parametrize("frame", FROM_NODE, ids=lambda frame: type(frame).__name__)
def test_every_frame_of_a_node_comes_back_as_it_was(frame):
    assert decode_from_node(encode(frame)) == frame


def test_the_lists_above_name_every_frame():
    assert {type(frame) for frame in FROM_MASTER} == set(get_args(messages.FromMaster))
    assert {type(frame) for frame in FROM_NODE} == set(get_args(messages.FromNode))


@pytest.mark.parametrize(("decode", "frames"), [(decode_from_master, FROM_MASTER), (decode_from_node, FROM_NODE)])
def test_fields_of_a_newer_peer_are_ignored(decode, frames):
    for frame in frames:
        raw = msgspec.msgpack.decode(encode(frame))
        raw |= {"invented_later": [1, {"a": None}], "another": b"\x00"}
        for value in list(raw.values()):
            if isinstance(value, dict):
                value["nested_later"] = 1
        assert decode(msgspec.msgpack.encode(raw)) == frame


def test_an_older_peer_reads_what_it_knows_of_a_newer_frame():
    class OlderDelta(msgspec.Struct, tag="delta"):
        id: str
        epoch: int
        start_index: int
        token_ids: tuple[int, ...] = ()

    seen = msgspec.msgpack.decode(encode(Delta("r", 1, 5, (1, 2), "text", (LOGPROB,), "stop")), type=OlderDelta)
    assert seen == OlderDelta("r", 1, 5, (1, 2))


def test_what_is_missing_has_its_default():
    raw = {"type": "decode", "id": "r", "epoch": 1, "token_ids": [5], "params": {}, "handle": b""}
    assert decode_from_master(msgspec.msgpack.encode(raw)) == Decode("r", 1, (5,), SamplingParams(), b"")


@pytest.mark.parametrize("decode", [decode_from_master, decode_from_node])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        encode(Cancel("r", 1))[:-1],
        encode(Ping()) + b"\x00",
        msgspec.msgpack.encode({"type": "of_the_future", "id": "r"}),
        msgspec.msgpack.encode({"id": "r", "epoch": 1}),
        msgspec.msgpack.encode({"type": 5}),
        msgspec.msgpack.encode({"type": "cancel", "id": 7, "epoch": 1}),
        msgspec.msgpack.encode({"type": "admitted", "id": "r", "epoch": "one"}),
        msgspec.msgpack.encode({"type": "cancel", "id": "XY", "epoch": 1}).replace(b"XY", b"\xff\xfe"),
        msgspec.msgpack.encode({"type": "admitted", "id": "XY", "epoch": 1}).replace(b"XY", b"\xff\xfe"),
        "text",
        '{"type":"ping"}',
    ],
)
def test_anything_malformed_is_a_protocol_error(decode, data):
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize("frame", [Hello, Delta, Admitted])
def test_a_master_never_sends_what_a_node_sends(frame):
    (sample,) = [known for known in FROM_NODE if type(known) is frame][:1]
    with pytest.raises(ProtocolError):
        decode_from_master(encode(sample))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60), frame=st.sampled_from(FROM_NODE + FROM_MASTER), cut=st.integers(0, 200))
def test_random_bytes_are_a_frame_or_a_protocol_error(data, frame, cut):
    good = encode(frame)
    for candidate in (data, good[: cut % len(good)] + data + good[(cut % len(good)) + len(data) :]):
        for decode in (decode_from_master, decode_from_node):
            with contextlib.suppress(ProtocolError):
                decode(candidate)
