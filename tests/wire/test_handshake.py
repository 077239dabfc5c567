"""Who is let in, at which version, and why not."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.errors import ProtocolError
from pdserve.wire import handshake
from pdserve.wire.codec import decode_from_node, encode
from pdserve.wire.handshake import DECODE_ADMISSION, judge, master_proof, new_nonce, signed, verify_master
from pdserve.wire.messages import Hello, KvLayout, ModelCard, NodeStats, Reject
from pdserve.wire.metadata import sign

CARD = ModelCard("m", "w" * 64, "v" * 64, 100)
CHALLENGE = b"challenge"
TOKEN = "secret"


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "protocol_min": 1,
        "protocol_max": 1,
        "role": "decode",
        "node_id": "d0",
        "incarnation": "inc",
        "model": CARD,
        "layout": KvLayout(16, 128, 1, 1, 1, "sim"),
        "transfer": sign("a", b"blob", TOKEN),
        "capacity": 4,
        "capabilities": (DECODE_ADMISSION,),
        **changes,
    }
    return signed(Hello(**fields), TOKEN, CHALLENGE)


def verdict(said: Hello, *, token: str = TOKEN, challenge: bytes = CHALLENGE, need_admission: bool = True):
    return judge(said, token=token, challenge=challenge, card=CARD, need_admission=need_admission)


def code(said: Hello, **how) -> str:
    refused = verdict(said, **how)
    assert isinstance(refused, Reject)
    return refused.code


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((1, 1), (1, 99), 1),
        ((1, 3), (2, 2), 2),
        ((2, 3), (1, 2), 2),
        ((1, 1), (2, 3), None),
        ((2, 3), (1, 1), None),
        ((1, 1), (2, 1), None),
        ((1, 1), (0, 0), None),
    ],
)
def test_the_highest_common_version_is_spoken(monkeypatch, ours, theirs, spoken):
    monkeypatch.setattr(handshake, "PROTOCOL_MIN", ours[0])
    monkeypatch.setattr(handshake, "PROTOCOL_MAX", ours[1])
    said = hello(protocol_min=theirs[0], protocol_max=theirs[1])
    if spoken is None:
        refused = verdict(said)
        assert isinstance(refused, Reject)
        assert refused.code == "version"
        assert f"{theirs[0]}..{theirs[1]}" in refused.reason
    else:
        assert verdict(said) == spoken


def test_another_token_is_refused_before_anything_is_said_about_the_model():
    other = msgspec.structs.replace(CARD, name="other")
    assert code(hello(model=other), token="wrong") == "unauthorised"
    assert code(hello(), token="") == "unauthorised"


def test_a_proof_is_good_for_one_challenge_and_one_identity_only():
    said = hello()
    assert verdict(said) == 1
    assert code(said, challenge=b"a later challenge") == "unauthorised"
    for changed in (
        {"node_id": "d1"},
        {"role": "prefill"},
        {"incarnation": "other"},
        {"transfer": sign("other", b"blob", TOKEN)},
        {"proof": b""},
    ):
        assert code(msgspec.structs.replace(said, **changed)) == "unauthorised"


def test_names_that_run_into_each_other_have_different_proofs():
    one, two = hello(node_id="ab", incarnation="c"), hello(node_id="a", incarnation="bc")
    assert one.proof != two.proof


@pytest.mark.parametrize("field", ["name", "weights_hash", "vocab_hash"])
def test_another_model_is_refused_and_a_shorter_limit_is_not(field):
    refused = verdict(hello(model=msgspec.structs.replace(CARD, **{field: "other"})))
    assert isinstance(refused, Reject)
    assert refused.code == "model"
    assert "--model" in refused.reason
    assert verdict(hello(model=msgspec.structs.replace(CARD, max_len=7))) == 1


def test_a_decode_node_without_admission_is_refused_unless_it_is_not_needed():
    refused = verdict(hello(capabilities=("recovery",)))
    assert isinstance(refused, Reject)
    assert refused.code == "capability"
    assert DECODE_ADMISSION in refused.reason
    assert "--disable-admission" in refused.reason
    assert verdict(hello(capabilities=()), need_admission=False) == 1
    assert verdict(hello(capabilities=(), role="prefill")) == 1


def test_the_master_proves_the_token_over_the_nonce_of_the_node():
    nonce = new_nonce()
    assert nonce != new_nonce()
    proof = master_proof(TOKEN, nonce, "master")
    assert verify_master(TOKEN, nonce, "master", proof)
    assert not verify_master("wrong", nonce, "master", proof)
    assert not verify_master(TOKEN, new_nonce(), "master", proof)
    assert not verify_master(TOKEN, nonce, "other", proof)
    assert not verify_master(TOKEN, nonce, "master", b"")


def test_a_fresh_nonce_for_every_hello():
    assert hello().nonce != hello().nonce


def test_transfer_metadata_that_no_peer_would_accept_is_refused_here():
    assert code(hello(transfer=sign("a", b"blob", "another token"))) == "transfer"


@pytest.mark.parametrize(
    "said",
    [
        hello(layout=KvLayout(0, 128, 1, 1, 1, "sim")),
        hello(model=msgspec.structs.replace(CARD, max_len=0)),
        hello(capacity=-3),
        NodeStats(pages_free=-1),
        NodeStats(queued=-(2**62)),
    ],
)
def test_what_a_node_says_of_itself_makes_sense_or_is_malformed(said):
    with pytest.raises(ProtocolError, match="Expected `int` >="):
        decode_from_node(encode(said))
