"""The product's template environment against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fastgen.config import ConfigError
from fastgen.text.chat import ChatTemplate, ChatTemplateError
from fastgen.text.tokenizer import Tokenizer

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": 'Zwei "Fragen"?\n\n'},
    {"role": "assistant", "content": " Ja. "},
    {"role": "user", "content": "日本語"},
]
TAGS = """
{%- set ns = namespace(seen=0) -%}
{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.seen = ns.seen + 1 %}
<{{ message.role }} {{ loop.index0 }}>{{ message['content'] | trim }}
    {% if ns.seen == 2 %}{% break %}{% endif %}
{% endfor %}
{{ messages | tojson }} {{ messages | tojson(indent=2) }}
{% generation %}{% set hidden = 1 %}said{{ hidden }}{% endgeneration %}
{% if tools is none and documents is none %}no tools{% endif %}
{% if add_generation_prompt %}<assistant>{% endif %}
"""


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_whitespace_filters_and_loops_are_transformers(add_generation_prompt: bool) -> None:
    expected, _ = render_jinja_template(
        [CONVERSATION], chat_template=TAGS, add_generation_prompt=add_generation_prompt, bos_token="<s>"
    )
    ours = ChatTemplate(TAGS, {"bos_token": "<s>"})
    assert ours.render(CONVERSATION, add_generation_prompt=add_generation_prompt) == expected[0]


def test_smollm2s_template_renders_as_transformers_does(smollm2: Tokenizer, smollm2_metadata: Any) -> None:
    assert smollm2.chat_template is not None
    for messages in (CONVERSATION, CONVERSATION[1:2], CONVERSATION[1:]):
        expected, _ = render_jinja_template(
            [messages], chat_template=smollm2_metadata["tokenizer.chat_template"], add_generation_prompt=True
        )
        assert smollm2.chat_template.render(messages) == expected[0]


def test_a_templates_own_refusal_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(CONVERSATION)


def test_a_template_that_cannot_handle_the_messages_is_an_error_of_the_request() -> None:
    template = ChatTemplate("{{ messages[0].content + 1 }}", {})
    with pytest.raises(ChatTemplateError, match="can only concatenate str"):
        template.render(CONVERSATION)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {})
    with pytest.raises(ChatTemplateError):
        template.render(CONVERSATION)


def test_todays_date_is_available() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') | int > 2000 }}", {}).render([]) == "True"


def test_a_template_that_is_no_jinja_is_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="chat template: line 2"):
        ChatTemplate("line one\n{% for %}", {})
