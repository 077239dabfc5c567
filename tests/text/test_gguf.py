from __future__ import annotations

import struct

import numpy
import pytest

from pdserve.errors import ConfigError
from pdserve.text.gguf import read_gguf
from pdserve.text.models import resolve_model


def test_reads_what_the_reference_writer_writes(write_gguf):
    arrays = {"tokens": ["a", "Ġé", ""], "scores": [0.5, -1.0, 2.0], "token_type": [1, 3, 6]}
    path = write_gguf(arrays=arrays, general__name="tiny", a__flag=True, a__float=0.25, a__big=7)
    file = read_gguf(path)
    assert file.path == path
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.context_length"] == 64
    assert {k: file.metadata[f"tokenizer.ggml.{k}"] for k in arrays} == arrays
    assert (file.metadata["a.flag"], file.metadata["a.float"], file.metadata["a.big"]) == (True, 0.25, 7)
    weight = file.tensors["blk.0.weight"]
    assert (weight.shape, weight.ggml_type) == ((3, 4), 0)
    assert file.tensors["norm.weight"].shape == (5,)
    data = numpy.frombuffer(path.read_bytes(), numpy.float32, 12, weight.offset)
    assert data.tolist() == list(range(12))
    assert weight.offset >= file.header_bytes


def test_embedded_model_directory():
    path = resolve_model("smollm2").path
    file = read_gguf(path)
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    assert max(t.offset for t in file.tensors.values()) < path.stat().st_size


def header(fields, *, tensors=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, len(fields)) + b"".join(fields)


def field(key, kind, value):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def test_nested_arrays_and_every_scalar(tmp_path):
    inner = struct.pack("<IQ2B", 0, 2, 1, 2)
    nested = struct.pack("<IQ", 9, 2) + inner + inner
    fields = [field(b"nested", 9, nested), field(b"u64", 10, struct.pack("<Q", 2**40)), field(b"f64", 12, b"\0" * 8)]
    (tmp_path / "a.gguf").write_bytes(header(fields, version=2))
    assert read_gguf(tmp_path / "a.gguf").metadata == {"nested": [[1, 2], [1, 2]], "u64": 2**40, "f64": 0.0}


BAD = {
    "empty": b"",
    "magic": header([], magic=b"GGML"),
    "version": header([], version=1),
    "count": header([])[:16] + b"\xff" * 8,
    "kind": header([field(b"k", 99, b"")]),
    "string": header([field(b"k", 8, struct.pack("<Q", 2**63))]),
    "strings": header([field(b"k", 9, struct.pack("<IQQ", 8, 1, 2**62))]),
    "string count": header([field(b"k", 9, struct.pack("<IQ", 8, 2**60))]),
    "array": header([field(b"k", 9, struct.pack("<IQ", 4, 2**61))]),
    "deep": header([field(b"k", 9, struct.pack("<IQ", 9, 1) * 5000)]),
    "alignment 0": header([field(b"general.alignment", 4, b"\0" * 4)]),
    "alignment list": header([field(b"general.alignment", 9, struct.pack("<IQ", 4, 0))]),
    "tensor": header([], tensors=3),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_unusable_file_is_named(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--model: .*bad\.gguf"):
        read_gguf(path)


def test_every_truncation_is_named(write_gguf):
    path = write_gguf(arrays={"tokens": ["a", "b"]})
    whole, length = path.read_bytes(), read_gguf(path).header_bytes
    for end in range(1, length, 3):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigError):
            read_gguf(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.gguf"):
        read_gguf(tmp_path / "none.gguf")
