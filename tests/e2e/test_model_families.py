"""Models of gpt-oss's and Qwen3.5's architecture run in pods: they reason, call a tool and answer.

Their layers have small random weights; embedding and head make them say given texts (`support.parrot`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import PreTrainedModel

from cluster.bed import Bed
from cluster.node import own_address
from fastgen.text.harmony import MARKS
from support.deployments import ServedNamespace, manifest
from support.hub import serving
from support.namespace import Object
from support.parrot import END, WIDTH, save_words
from support.quantized_models import save_mxfp4
from support.tiny_models import TINY, TINY_MULTIMODAL, Tiny
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: Any = {"role": "user", "content": "How is the weather in Bern?"}
# Layers change no next token. The experts' rows must be a multiple of MXFP4's groups of 32.
SMALL = {"hidden_size": WIDTH, "intermediate_size": 96, "initializer_range": 0.02, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Speaker:
    """A model, and what it says before and after the result of a tool.

    Attributes:
        shape: its layers.
        lanes: the tokens of both generations.
        marks: special tokens.
        template: chat template. The prompt ends with the start of a lane.
        ends: tokens that end a generation.
        save: writes weights and configuration into a new folder inside another, and returns that.
        content: the text beside the call.
    """

    shape: Tiny
    lanes: tuple[list[str], list[str]]
    marks: tuple[str, ...]
    template: str
    ends: tuple[str, ...]
    save: Callable[[PreTrainedModel, Path], Path]
    content: str | None

    def write(self, folder: Path) -> Path:
        """Write the model into a new folder inside `folder`, and return that."""
        words = save_words(folder, self.lanes, special=self.marks, tokenizer_config={"chat_template": self.template})
        tiny = replace(self.shape, settings=self.shape.settings | SMALL | {"vocab_size": len(words.ids)})
        torch.manual_seed(7)
        model: Any = tiny.model_class(tiny.config())
        model.get_input_embeddings().weight.data.copy_(words.embedding)
        model.get_output_embeddings().weight.data.copy_(words.head)
        saved = self.save(model, folder)
        (saved / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [words.ids[end] for end in self.ends]})
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).rename(saved / name)
        return saved


def save_plain(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder / "plain")
    return folder / "plain"


GPT_OSS = Speaker(
    TINY["gpt-oss"],
    (
        # No token may have two successors, so the header of the thought is the prompt's, and the others are generated.
        [
            *("A ", "tool ", "knows.", "<|end|>", "<|start|>", "assistant to=functions.weather", "<|channel|>"),
            *("commentary json", "<|message|>", '{"city": ', '"Bern"}', "<|call|>"),
        ],
        ["Sunny", ", 21", " degrees.", "<|return|>"],
    ),
    MARKS,
    "{%- for t in tools or [] %}<|start|>developer<|message|>{{ t.function | tojson }}<|end|>{% endfor %}"
    "{%- for m in messages if m.role != 'assistant' %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant<|channel|>"
    "{%- if messages[-1].role == 'tool' %}final<|message|><|s1|>{% else %}analysis<|message|><|s0|>{% endif %}",
    ("<|return|>", "<|call|>"),
    lambda model, folder: save_mxfp4(model, folder)[0],
    None,
)
QWEN = Speaker(
    TINY_MULTIMODAL["multimodal-qwen3-5"],
    (
        [
            *("<think>", "\nA ", "tool ", "knows.\n", "</think>", "\n\nI ", "ask ", "it.", "\n\n", "<tool_call>"),
            *(
                "\n<function=weather>\n<parameter=",
                "city>\n",
                "Bern",
                "\n</parameter>",
                "\n</function>\n",
                "</tool_call>",
            ),
        ],
        ["Sunny", ", 21", " degrees."],
    ),
    ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "{#- <tool_call><function= -#}"
    "{%- for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
    "{%- for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if messages[-1].role == 'tool' %}<|s1|>{% else %}<|s0|>{% endif %}",
    (END,),
    save_plain,
    "I ask it.",
)


def secret(url: str) -> Object:
    data = {"HF_ENDPOINT": base64.b64encode(url.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "data": data}


@dataclass
class Heard:
    """What the deltas of a stream add up to, and in how many of them."""

    reasoning: str = ""
    content: str = ""
    name: str = ""
    arguments: str = ""
    finish: str | None = None
    deltas: int = 0


def hear(client: OpenAI, messages: list[Any]) -> Heard:
    """Stream a chat."""
    heard = Heard()
    stream = client.chat.completions.create(
        model="chat", messages=messages, tools=[TOOL], max_tokens=64, temperature=0, stream=True
    )
    for event in stream:
        for choice in event.choices:
            delta: Any = choice.delta
            pieces = (getattr(delta, "reasoning_content", None) or "", delta.content or "")
            heard.reasoning, heard.content = heard.reasoning + pieces[0], heard.content + pieces[1]
            for call in delta.tool_calls or []:
                heard.name += call.function.name or ""
                heard.arguments += call.function.arguments or ""
            heard.finish = choice.finish_reason or heard.finish
            heard.deltas += 1
    return heard


@pytest.mark.parametrize("speaker", [pytest.param(GPT_OSS, id="gpt-oss"), pytest.param(QWEN, id="qwen3-5")])
def test_a_pod_reasons_calls_a_tool_and_answers(
    speaker: Speaker, bed: Bed, namespace: ServedNamespace, tmp_path: Path
) -> None:
    if bed.kind != "native":
        pytest.skip("only pods of a node on this machine can reach the tests' hub")
    with serving(speaker.write(tmp_path), own_address()) as hub:
        namespace.apply(secret(hub.url))
        namespace.apply(manifest("chat", model={"source": "hf://tests/tiny", "secretName": "hub"}))
        namespace.wait_condition("Ready", "True")
    with namespace.url("chat") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        eventually(lambda: client.models.list().data, within=30, what="the Service")
        first = hear(client, [QUESTION])
        assert (first.reasoning, first.content) == ("A tool knows.", speaker.content or "")
        assert (first.name, json.loads(first.arguments)) == ("weather", {"city": "Bern"})
        assert first.finish == "tool_calls"
        assert first.deltas > 5, "the response was not streamed token by token"
        call = {"id": "call_1", "type": "function", "function": {"name": first.name, "arguments": first.arguments}}
        asked = {"role": "assistant", "content": speaker.content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21"}
        answer = hear(client, [QUESTION, asked, result])
        assert (answer.reasoning, answer.content, answer.name) == ("", "Sunny, 21 degrees.", "")
        assert answer.finish == "stop"
