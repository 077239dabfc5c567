from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.bytelevel import ByteTokenizer, to_utf8
from pdserve.text.template import ChatTemplate

tokenizer = ByteTokenizer()


@given(st.text())
def test_round_trip(text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < 256


def test_control_tokens_are_parsed_only_on_request():
    text = "<|im_start|>user\né<|im_end|><|eos|>"
    assert tokenizer.encode(text, special=True) == [257, *"user\né".encode(), 258, 256]
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text, special=True)) == "user\né"
    assert tokenizer.decode(tokenizer.encode(text, special=True), skip_special=False) == text


def test_facts():
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_ids == {256, 258}
    assert [tokenizer.is_special(i) for i in (0, 255, 256, 258, 259)] == [False, False, True, True, False]
    assert [tokenizer.token_bytes(i) for i in (-1, 65, 256, 300)] == [b"", b"A", b"", b""]


def test_lone_surrogates_become_replacement_characters():
    assert to_utf8("a\ud800b").decode() == "a�b"
    assert to_utf8("\ud83d\ude00").decode() == "😀"


def test_template_is_chatml():
    template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos_token, eos=tokenizer.eos_token)
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
