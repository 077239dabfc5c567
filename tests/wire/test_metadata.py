"""The signature of transfer metadata."""

from __future__ import annotations

from pdserve.wire.metadata import authentic, sign


def test_signature_covers_every_byte_and_where_the_name_ends():
    assert authentic(sign("p", b"blob", ""), "")
    assert authentic(sign("p", b"blob", "t"), "t")
    for metadata in (sign("p", b"blob", "u"), sign("pb", b"lob", "t")):
        assert not authentic(type(metadata)(agent="p", blob=b"blob", mac=metadata.mac), "t")
