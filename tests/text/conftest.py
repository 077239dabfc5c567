"""Real vocabularies: the embedded model's, and tiny ones written as the formats prescribe."""

from __future__ import annotations

import json

import gguf
import numpy
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pdserve.text.models import resolve_model
from pdserve.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def smollm2():
    return load_tokenizer(resolve_model("smollm2"))


@pytest.fixture
def write_gguf(tmp_path):
    """Write a small GGUF with the reference writer: `write_gguf(tokens=…, **metadata)`."""

    def write(name="tiny.gguf", *, architecture="llama", context=64, arrays=None, **fields):
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        if context:
            writer.add_context_length(context)
        for key, value in (arrays or {}).items():
            writer.add_array(f"tokenizer.ggml.{key}", value)
        for key, value in fields.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}
            add[type(value)](key.replace("__", "."), value)
        writer.add_tensor("blk.0.weight", numpy.arange(12, dtype=numpy.float32).reshape(3, 4))
        writer.add_tensor("norm.weight", numpy.ones(5, dtype=numpy.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def hf_directory(tmp_path):
    """A Hugging Face directory with a byte-level BPE tokenizer and two shards of something."""
    path = tmp_path / "tiny-hf"
    path.mkdir()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat, the hat"] * 3, trainer)
    backend.add_special_tokens(["<s>", "<|end|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 128, "eos_token_id": 1}))
    for shard in ("a", "b"):
        header = json.dumps({"__metadata__": {"shard": shard}}).encode()
        data = len(header).to_bytes(8, "little") + header + shard.encode() * 300_000
        (path / f"model-{shard}.safetensors").write_bytes(data)
    return path


@pytest.fixture
def sentencepiece_json():
    """A Llama-2 style tokenizer: spaces as `▁`, unknown bytes as `<0xNN>`."""
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, "▁", "h", "i", "▁h", "▁hi"]
    backend = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            [("▁", "h"), ("▁h", "i")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend.to_str()
