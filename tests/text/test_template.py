from __future__ import annotations

import re

import pytest

from pdserve.errors import ConfigError, InvalidRequestError
from pdserve.text.template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source, messages=USER, /, **kwargs):
    return ChatTemplate(source, bos="<s>", eos="</s>").render(messages, **kwargs)


def test_embedded_model_template(smollm2):
    template = ChatTemplate(smollm2.chat_template, bos=smollm2.bos_token, eos=smollm2.eos_token)
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = template.render([{"role": "system", "content": "Be brief"}, *USER], add_generation_prompt=False)
    assert own == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_variables_and_extras():
    source = (
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ tools }}{{ thinking }}{{ add_generation_prompt }}"
    )
    assert render(source, tools=[{"a": 1}], thinking=False) == "<s>Hi</s>[{'a': 1}]FalseTrue"


def test_extras_cannot_replace_the_messages_or_tokens():
    extras = {"messages": [], "bos_token": "evil"}
    assert render("{{ bos_token }}{{ messages|length }}", **extras) == "<s>1"


def test_whitespace_like_hugging_face():
    assert render("{% if true %}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n{% endif %}\n") == "Hi\n"


def test_loop_controls_and_generation_blocks():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"


def test_tojson_does_not_escape_for_html():
    value = [{"role": "user", "content": "<é & 'x'>"}]
    assert render("{{ messages[0].content|tojson }}", value) == "\"<é & 'x'>\""
    assert render("{{ {'b': 1, 'a': 2}|tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_strftime_now():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_message_contents_are_data_only():
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 1 + 1 }}<b>"}]) == "{{ 1 + 1 }}<b>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 // 0 }}",
        "{{ messages|tojson(indent=[]) }}{{ range|tojson }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
    ],
)
def test_failure_over_the_messages_is_the_request_s_fault(source):
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_template_s_own_message_reaches_the_client():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_source_that_does_not_compile_names_its_line():
    with pytest.raises(ConfigError, match=r"--model.*line 2"):
        ChatTemplate("ok\n{% if %}", bos="", eos="")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ lipsum.__globals__ }}",
        "{{ (messages|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('{x.__class__.__mro__}'|attr('format_map'))({'x': messages}) }}",
        "{{ messages|map(attribute='__class__.__mro__')|list|first|list }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{{ range(10**9)|list }}",
    ],
)
def test_hostile_template_reaches_nothing(source):
    try:
        text = render(source)
    except InvalidRequestError:
        text = ""
    assert "class" not in text
    assert "object" not in text
    assert USER == [{"role": "user", "content": "Hi"}]
