"""Our template environment against that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from fastgen.settings import ConfigError
from fastgen.text.chat_template import ChatTemplate, ChatTemplateError
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
def test_whitespace_filters_and_loops_equal_transformers(add_generation_prompt: bool) -> None:
    expected, _ = render_jinja_template(
        [CONVERSATION], chat_template=TAGS, add_generation_prompt=add_generation_prompt, bos_token="<s>"
    )
    ours = ChatTemplate(TAGS, {"bos_token": "<s>"})
    assert ours.render(CONVERSATION, add_generation_prompt=add_generation_prompt) == expected[0]


FUNCTION = {"name": "f", "description": "d <é>", "parameters": {"type": "object", "properties": {"x": {"enum": ["é"]}}}}
# What templates of public models use, beside the above.
FEATURES = [
    "{{ tools | tojson(separators=(',', ':')) }}{{ tools | tojson(sort_keys=True, indent=4) }}",
    "{{ tools | tojson(ensure_ascii=True) }}",
    "{{ tools[0] | string }}{{ messages[0].content | e }}",
    "{{ tools[0].function.parameters | tojson(indent=2) | indent(4) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages[-1].content.strip().split('本')[0] }}{{ messages[1:] | length }}{{ messages[::-1][0].role }}",
    "{{ missing }}{{ missing is defined }}{{ messages[0].nope }}{{ messages[0].get('nope') }}",
    "{% macro f(x) %}[{{ x }}{{ caller() if caller else '' }}]{% endmacro %}{{ f(1) }}{% call f(2) %}z{% endcall %}",
    "{% for k, v in tools[0].function.parameters.properties.items() %}{{ k }}{{ v | items | list }}{% endfor %}",
    "  {% if true %}\n  x\n  {% endif %}\n\ny\n{# comment #}\n {% filter upper %}a{% endfilter %}",
    "{{ '%s-%d' | format('a', 3) }}{{ '%.2f' % 1.234 }}{{ {'a': 1}.items() | list }}{{ 'ab'[::-1] }}{{ 7 // 2 }}",
    "{% set x %}{{ messages[0].content }}{% endset %}{{ x | length }}{{ x is string }}{{ x | upper }}",
    "{{ messages is iterable }}{{ messages[0] is mapping }}{{ none is none }}{{ tools is sequence }}{{ 3 is number }}",
    "{{ range(3) | list }}{{ dict(a=1) }}{{ joiner(',')() }}{{ namespace(a=2).a }}{{ cycler('a').next() }}",
    "{{ bos_token }}{{ pad_token is defined }}{{ add_generation_prompt }}{{ documents is none }}",
    "{{ (messages | first).role | capitalize }}{{ ' a '.lstrip() }}|{{ 'abc'.startswith(('a', 'b')) }}",
    "{{ [1, [2]] | string }}{{ true }}{{ none }}{{ 1.0 }}{{ 10 ** 20 }}{{ [3, 1] | sort }}{{ 'a' ~ 1 }}",
    "{% for a, b in [(1, 2)] %}{{ a }}{{ b }}{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}",
    "{{ '{}'.format('y') }}{{ messages[0].content.encode is defined }}{{ strftime_now('%Y') | length }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_what_templates_use_renders_as_in_transformers(source: str) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    expected, _ = render_jinja_template(
        [CONVERSATION], chat_template=source, tools=tools, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(CONVERSATION, tools=tools) == expected[0]


def test_smollm2s_template_renders_as_transformers_does(smollm2: Tokenizer, smollm2_metadata: Any) -> None:
    assert smollm2.chat_template is not None
    for messages in (CONVERSATION, CONVERSATION[1:2], CONVERSATION[1:]):
        expected, _ = render_jinja_template(
            [messages], chat_template=smollm2_metadata["tokenizer.chat_template"], add_generation_prompt=True
        )
        assert smollm2.chat_template.render(messages) == expected[0]


def test_an_error_raised_by_the_template_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(CONVERSATION)


def test_a_template_that_fails_on_the_messages_is_a_request_error() -> None:
    template = ChatTemplate("{{ messages[0].content + 1 }}", {})
    with pytest.raises(ChatTemplateError, match="can only concatenate str"):
        template.render(CONVERSATION)


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {})
    with pytest.raises(ChatTemplateError):
        template.render(CONVERSATION)


def test_todays_date_is_available() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') | int > 2000 }}", {}).render([]) == "True"


def test_an_invalid_template_is_rejected_at_load() -> None:
    with pytest.raises(ConfigError, match="chat template: line 2"):
        ChatTemplate("line one\n{% for %}", {})


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMMING = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
SPACED = "{% for m in messages %}[{{ m.role }}] {{ m.content.strip() }} </s>{% endfor %}"
ENDINGLESS = "{% for m in messages %}{{ m.role }}: {{ m.content.rstrip() }}\n{% endfor %}"
# Text that templates end their messages with, parts of it, and white space to strip.
PREFILLS = st.one_of(
    st.sampled_from(["<", "end", ">", "|", "im_end", "<|im_end|>", "</s>", "s", "_of_turn>", "assistant", "user\nHi"]),
    st.text("<|>/_imends u\n\t", min_size=1, max_size=8).filter(str.strip),
)


@given(prefill=PREFILLS, earlier=PREFILLS)
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n{1}"),
        (TRIMMING, "<start_of_turn>user\n{0:strip}<end_of_turn>\n<start_of_turn>assistant\n{1:strip}"),
        (SPACED, "[user] {0:strip} </s>[assistant] {1:strip}"),
        (ENDINGLESS, "user: {0:rstrip}\nassistant: {1:rstrip}"),
    ],
    ids=["chatml", "trimming", "spaced", "endingless"],
)
def test_a_prompt_to_continue_ends_with_the_last_messages_text(
    template: str, expected: str, prefill: str, earlier: str
) -> None:
    messages = [{"role": "user", "content": earlier}, {"role": "assistant", "content": prefill}]
    cut = ChatTemplate(template, {}).render_unfinished(messages)
    assert cut == expected.format(Text(earlier), Text(prefill))
    assert ChatTemplate(template, {}).render(messages, add_generation_prompt=False).startswith(cut)


class Text(str):
    """Return a text with white space that a template may strip."""

    def __format__(self, way: str) -> str:
        return {"": str(self), "strip": self.strip(), "rstrip": self.rstrip()}[way]


@pytest.mark.parametrize(
    ("template", "content"),
    [(CHATML, " "), (CHATML, None), ("{{ messages[0].role }}", "a")],
    ids=["blank", "none", "unseen"],
)
def test_continuing_a_message_without_text_is_rejected(template: str, content: str | None) -> None:
    with pytest.raises(ChatTemplateError, match="the last message"):
        ChatTemplate(template, {}).render_unfinished([{"role": "assistant", "content": content}])
