"""A model that thinks, for the scripted engine.

Its tokenizer has the marks of Qwen3 as tokens that are not special. Its chat template was written to give the prompts
of Qwen3's: `enable_thinking=False` ends the prompt with an empty block, reasoning before the last question is left out,
and results of tools are the user's.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine.server.openai.test_special_token_markers import CONFIG
from fastgen.text.tokenizer import Tokenizer

TEMPLATE = """\
{%- set first = 1 if messages[0].role == 'system' else 0 %}
{%- if tools or first %}
    {{- '<|im_start|>system\\n' }}
    {%- if first %}{{- messages[0].content }}{% endif %}
    {%- if tools and first %}{{- '\\n\\n' }}{% endif %}
    {%- if tools %}
        {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
        {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
        {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
        {{- '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages[first:] %}
    {%- set place, content = loop.index0 + first, message.content %}
    {%- if message.role == 'tool' %}
        {%- if messages[place - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- set thought = message.reasoning_content or '' %}
    {%- if message.role == 'assistant' and not thought and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if message.role == 'assistant' and place > asked.last and (loop.last or thought) %}
        {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- set content = content.lstrip('\\n') %}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {%- if content or not loop.first %}{{- '\\n' }}{% endif %}
        {%- set arguments = call.function.arguments %}
        {%- if arguments is not string %}{% set arguments = arguments | tojson %}{% endif %}
        {{- '<tool_call>\\n{\\"name\\": \\"' + call.function.name + '\\", \\"arguments\\": ' + arguments }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
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
