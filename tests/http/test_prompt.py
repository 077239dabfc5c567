import pytest

from pdserve.errors import InvalidRequestError
from pdserve.http.fields import Fields
from pdserve.http.prompt import Prompts
from pdserve.text.bytelevel import ByteTokenizer
from pdserve.text.template import ChatTemplate

pytestmark = pytest.mark.trio


class WithBos(ByteTokenizer):
    """A vocabulary whose raw prompts begin with BOS, as Llama's do."""

    bos_token_id = 257
    bos_token = "<|im_start|>"
    add_bos = True


async def test_bos_comes_before_a_raw_prompt_once():
    prompts = Prompts(WithBos(), None)
    assert await prompts.encode("a") == [257, 97]
    assert await prompts.encode("<|im_start|>a") == [257, 97]
    assert await prompts.encode("a", add_special_tokens=False) == [97]
    assert await prompts.read(Fields({"prompt": [97]}), "prompt") == (97,)


async def test_a_template_spells_out_its_own_bos():
    template = ChatTemplate("{{ messages[0].content }}", bos="<|im_start|>", eos="")
    fields = Fields({"messages": [{"role": "user", "content": "a"}]})
    assert await Prompts(WithBos(), template).read_chat(fields) == (97,)


async def test_messages_that_render_to_nothing_are_refused():
    template = ChatTemplate("", bos="", eos="")
    fields = Fields({"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(InvalidRequestError) as caught:
        await Prompts(ByteTokenizer(), template).read_chat(fields)
    assert caught.value.param == "messages"
