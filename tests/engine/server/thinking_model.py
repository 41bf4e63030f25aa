"""A model that thinks, for the scripted engine.

Its tokenizer has the marks of Qwen3 as tokens that are not special, and a chat template written from Qwen3's
documentation: `enable_thinking=False` ends the prompt with an empty block, and reasoning of earlier turns is left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine.server.test_special_token_markers import CONFIG
from fastgen.text.tokenizer import Tokenizer

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' + tools | tojson + '</tools><tool_call></tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set thought = '' %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if thought and loop.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
# Unused tokens, which are renamed.
MARKS = {"<gh_stars>": "<think>", "<jupyter_start>": "</think>"}


def write_thinking_model(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the model to a folder; `tokenizer` is the demo model's."""
    described = json.loads(tokenizer.backend.to_str())
    for token in described["added_tokens"]:
        if token["content"] in MARKS:
            token.update(content=MARKS[token["content"]], special=False)
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {MARKS.get(token, token): number for token, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
