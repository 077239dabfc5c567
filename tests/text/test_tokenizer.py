from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.text.bpe import BYTE_ALPHABET
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.tokenizer import load_tokenizer

# --- the embedded model


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("Hello world", [19556, 905]),
        ("Hello world 1234's", [19556, 905, 216, 33, 34, 35, 36, 506]),
        ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
    ],
)
def test_known_tokenisations(smollm2, text, ids):
    assert smollm2.encode(text, special=True) == ids


def test_facts_of_the_embedded_model(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == {0, 2}
    assert (smollm2.eos_token, smollm2.bos_token, smollm2.bos_token_id) == ("<|im_end|>", "<|im_start|>", 1)
    assert smollm2.add_bos is False
    assert "<|im_start|>" in smollm2.chat_template
    assert [smollm2.is_special(i) for i in (-1, 0, 2, 16, 17, 49152)] == [False, True, True, True, False, False]


def test_control_tokens_in_plain_text_stay_text(smollm2):
    text = "a<|im_end|>b<|endoftext|>"
    ids = smollm2.encode(text)
    assert not any(smollm2.is_special(i) for i in ids)
    assert smollm2.decode(ids) == text


def test_skipping_special_tokens_is_a_choice(smollm2):
    ids = smollm2.encode("<|im_start|>Hi<|im_end|>", special=True)
    assert smollm2.decode(ids) == "Hi"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>Hi<|im_end|>"


def test_bytes_of_tokens(smollm2):
    assert [smollm2.token_bytes(i) for i in smollm2.encode("Hello world")] == [b"Hello", b" world"]
    assert b"".join(smollm2.token_bytes(i) for i in smollm2.encode("🎉")) == "🎉".encode()
    assert [smollm2.token_bytes(i) for i in (-1, 1, 49152, 10**9)] == [b"", b"", b"", b""]


@given(st.data())
def test_round_trip(smollm2, data):
    known = {smollm2.token_bytes(i) for i in range(17, 300)}
    text = data.draw(st.text())
    # Some bytes (control characters, rare planes) are simply not in this vocabulary; Hugging Face drops them likewise.
    text = "".join(c for c in text if all(bytes((b,)) in known for b in c.encode()))
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert all(0 <= i < smollm2.vocab_size for i in ids)
    assert smollm2.decode(smollm2.encode(text, special=True), skip_special=False) == text


def test_lone_surrogates_do_not_fail(smollm2):
    assert smollm2.decode(smollm2.encode("a\ud800b")) == "a�b"


def test_threads_do_not_mix_up_special_parsing(smollm2):
    wrong = []

    def work(special, expected):
        for _ in range(200):
            if smollm2.encode("<|im_end|>", special=special) != expected:
                wrong.append(special)

    plain = smollm2.encode("<|im_end|>")
    threads = [threading.Thread(target=work, args=a) for a in ((True, [2]), (False, plain)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert wrong == []


# --- other GGUF vocabularies

LETTERS = list(BYTE_ALPHABET)
GPT2 = {"tokens": [*LETTERS, "12", "123", "hi", "<|im_end|>", "<tool>"], "merges": ["1 2", "12 3", "h i"]}
GPT2["token_type"] = [1] * (len(GPT2["tokens"]) - 2) + [3, 4]


def gpt2(write_gguf, pre=None, **fields):
    fields = {f"tokenizer__ggml__{k}": v for k, v in {"model": "gpt2", "eos_token_id": 259, **fields}.items()}
    if pre:
        fields["tokenizer__ggml__pre"] = pre
    return load_tokenizer(resolve_model(str(write_gguf(arrays=GPT2, **fields))))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["123", "4"]),
        ("default", ["123", "4"]),
        (None, ["123", "4"]),
    ],
)
def test_pre_tokenizers_cut_numbers_differently(write_gguf, pre, pieces):
    tokenizer = gpt2(write_gguf, pre)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode("1234")] == pieces
    text = "Don't  stop\n\n 12345 ñandú 🎉\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2_normalises_like_its_reference(write_gguf):
    assert gpt2(write_gguf, "qwen2").decode(gpt2(write_gguf, "qwen2").encode("e\u0301")) == "é"
    assert gpt2(write_gguf, "gpt-2").decode(gpt2(write_gguf, "gpt-2").encode("e\u0301")) == "e\u0301"


def test_user_defined_tokens_are_text(write_gguf):
    tokenizer = gpt2(write_gguf, "gpt-2")
    ids = tokenizer.encode("hi<tool><|im_end|>", special=True)
    assert ids == [258, 260, 259]
    assert tokenizer.decode(ids) == "hi<tool>"
    assert tokenizer.eos_token_ids == {259}
    assert tokenizer.bos_token_id is None
    assert tokenizer.bos_token == ""


def test_llama_bpe_adds_bos_unless_told_otherwise(write_gguf):
    assert gpt2(write_gguf, "llama-bpe", bos_token_id=0).add_bos is True
    assert gpt2(write_gguf, "llama-bpe", bos_token_id=0, add_bos_token=False).add_bos is False
    assert gpt2(write_gguf, "llama-bpe").add_bos is False
    assert gpt2(write_gguf, "gpt-2", bos_token_id=0).add_bos is False


def test_unknown_pre_tokenizer_and_type_are_named(write_gguf):
    with pytest.raises(ConfigError, match=r"--model.*'tekken'"):
        gpt2(write_gguf, "tekken")
    with pytest.raises(ConfigError, match=r"--model.*'bert'"):
        gpt2(write_gguf, model="bert")
    files = resolve_model(str(write_gguf("none.gguf")))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.tokens"):
        load_tokenizer(files)


@pytest.mark.parametrize(
    "arrays",
    [
        {**GPT2, "merges": ["x yz"]},
        {**GPT2, "token_type": [1]},
    ],
)
def test_inconsistent_vocabulary_is_a_config_error(write_gguf, arrays):
    files = resolve_model(str(write_gguf(arrays=arrays, tokenizer__ggml__model="gpt2")))
    with pytest.raises(ConfigError, match=r"tiny\.gguf"):
        load_tokenizer(files)


def sentencepiece(write_gguf, **fields):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁h", "▁hi", "hi", "▁", "h", "i"]
    arrays = {
        "tokens": tokens,
        "scores": [0.0] * 259 + [-2.0, -3.0, -1.0, -9.0, -9.0, -9.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
    }
    fields = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, **fields}
    fields = {f"tokenizer__ggml__{k}": v for k, v in fields.items()}
    return load_tokenizer(resolve_model(str(write_gguf(arrays=arrays, **fields))))


def test_sentencepiece_scores_are_merge_priorities(write_gguf):
    tokenizer = sentencepiece(write_gguf)
    # "hi" has the best score, so it forms first; then "▁" + "hi" is a merge as well.
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("hi")] == [b" hi"]
    assert tokenizer.add_bos is True
    assert tokenizer.encode("<s>hi</s>", special=True)[0] == 1
    assert tokenizer.eos_token_ids == {2}


def test_sentencepiece_round_trip(write_gguf):
    tokenizer = sentencepiece(write_gguf)

    @given(st.text(st.characters(exclude_characters="▁", codec="utf-8")))  # SentencePiece's own spelling of a space
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


# --- Hugging Face directories


def write(directory, name, value):
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def load(directory):
    return load_tokenizer(resolve_model(str(directory)))


def test_directory(hf_directory):
    write(hf_directory, "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}, "bos_token": "<s>"})
    write(hf_directory, "generation_config.json", {"eos_token_id": [2, 3]})
    tokenizer = load(hf_directory)
    bos, end, tool = tokenizer.encode("<s><|end|><tool>", special=True)
    assert tokenizer.eos_token_ids == {1, 2, 3, end}
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token) == ("<s>", bos, "<|end|>")
    assert tokenizer.add_bos is False
    assert tokenizer.vocab_size == tool + 1
    assert tokenizer.decode([bos, tool, end]) == "<tool>"
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("the cat 🎉\x00")) == "the cat 🎉\x00"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], "r"),
        ([], None),
        (None, None),
    ],
)
def test_chat_template_forms(hf_directory, template, expected):
    write(hf_directory, "tokenizer_config.json", {"chat_template": template, "add_bos_token": True})
    assert load(hf_directory).chat_template == expected
    assert load(hf_directory).add_bos is False, "there is no BOS to add"
    write(hf_directory, "chat_template.jinja", "file")
    assert load(hf_directory).chat_template == "file"


def test_sentencepiece_directory(hf_directory, sentencepiece_json):
    write(hf_directory, "tokenizer.json", sentencepiece_json)
    write(hf_directory, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    tokenizer = load(hf_directory)
    assert tokenizer.add_bos is True
    for text in ("hi hi", "hé 🎉", " two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(tokenizer.encode("hi")[0]) == b" hi"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


def test_broken_directories_are_named(hf_directory):
    write(hf_directory, "tokenizer.json", '{"model": {"type": "Alien"}}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not usable"):
        load(hf_directory)
    write(hf_directory, "tokenizer.json", "{")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        load(hf_directory)
    write(hf_directory, "tokenizer.json", "[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load(hf_directory)


def test_unsupported_decoder_is_named(hf_directory):
    spec = json.loads((hf_directory / "tokenizer.json").read_text())
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        write(hf_directory, "tokenizer.json", {**spec, "decoder": decoder})
        with pytest.raises(ConfigError, match="decoder"):
            load(hf_directory)


def test_settings_for_training_are_ignored(hf_directory):
    spec = json.loads((hf_directory / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write(hf_directory, "tokenizer.json", spec)
    assert load(hf_directory).decode(load(hf_directory).encode("the cat sat")) == "the cat sat"


def test_builtin_tokenizer_needs_no_files():
    files = resolve_model("sim-bytes")
    assert load_tokenizer(files).encode("é") == [0xC3, 0xA9]
    assert load_model_card(files, max_seq_len=10).max_len == 10
