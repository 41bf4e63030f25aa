"""A model that writes Harmony's messages (gpt-oss), for the scripted engine.

Its marks are special tokens. Its chat template was written to give prompts of the form of gpt-oss's: a message for each
turn, thoughts before calls since the last answer, and results of tools behind the name of the function.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine.server.openai.test_special_token_markers import CONFIG
from fastgen.text.harmony import MARKS
from fastgen.text.tokenizer import Tokenizer

TEMPLATE = """\
{%- macro message(head, text) %}{{- '<|start|>' + head + '<|message|>' + text + '<|end|>' }}{% endmacro %}
{{- message('system', 'Reasoning: ' + (reasoning_effort or 'medium')) }}
{%- if tools %}
    {%- for tool in tools %}{{- message('developer', tool.function | tojson) }}{% endfor %}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if called.name is none %}{{- raise_exception('a result without a call') }}{% endif %}
        {{- message('functions.' + called.name + ' to=assistant<|channel|>commentary', m.content | tojson) }}
    {%- elif m.role != 'assistant' %}
        {{- message('developer' if m.role == 'system' else m.role, m.content) }}
    {%- elif m.tool_calls %}
        {%- if m.content and m.thinking %}{{- raise_exception('both content and thinking beside a call') }}{% endif %}
        {%- set thought = m.content or m.thinking %}
        {%- if thought %}{{- message('assistant<|channel|>analysis', thought) }}{% endif %}
        {%- set called.name = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- else %}
        {%- set called.name = none %}
        {{- message('assistant<|channel|>final', m.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
_UNUSED = (
    *("<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>"),
    *("<jupyter_start>", "<jupyter_text>", "<jupyter_code>"),
)


def write_harmony_model(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the model to a folder; `tokenizer` is the demo model's, of which unused tokens become the marks."""
    renamed = dict(zip(_UNUSED, MARKS, strict=True))
    described = json.loads(tokenizer.backend.to_str())
    for token in described["added_tokens"]:
        if token["content"] in renamed:
            token.update(content=renamed[token["content"]], special=True)
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {renamed.get(token, token): number for token, number in vocabulary.items()}
    ends = [vocabulary[token] for token, mark in renamed.items() if mark in ("<|return|>", "<|call|>")]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ends, CONFIG["eos_token_id"]]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
