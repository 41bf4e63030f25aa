"""Shapes of public chat templates: what each reads of a message, and how. Written for the tests, not copied.

The sources are in `templates/`, named by the models whose template works in this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ALL = frozenset({"system", "user", "assistant", "tool"})
NONE = frozenset[str]()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form of messages that a template was written for.

    Attributes:
        strings, parts: roles whose content it reads as a string, and as a list of parts.
        arguments: "object" or "text".
        null, empty: whether it shows calls beside null content, and beside empty content.
        tools: whether it also serves requests with tools.
    """

    strings: frozenset[str] = ALL
    parts: frozenset[str] = NONE
    arguments: str = "object"
    null: bool = True
    empty: bool = True
    tools: bool = False


SHAPES: dict[str, Shape] = {
    "chatml": Shape(null=False),  # chatml (Yi, Qwen 1.5)
    "chatml_printed": Shape(null=False),  # chatml with a print
    "zephyr": Shape(null=False),
    "vicuna": Shape(null=False),
    "llama_2": Shape(null=False),
    "llama_3": Shape(null=False),
    "llama_3_1": Shape(tools=True),  # llama 3.1, 3.2 and 3.3
    "llama_4": Shape(parts=ALL, null=False),
    "qwen_2_5": Shape(tools=True),  # qwen 2.5
    "qwen_3": Shape(tools=True),
    "qwq": Shape(),
    "hermes": Shape(tools=True),  # hermes 2 and 3
    "mistral_v1": Shape(null=False),
    "mistral_v3_and_nemo": Shape(tools=True),
    "mistral_tekken": Shape(parts=frozenset({"user"})),  # mistral v11 (tekken), with parts
    "gemma_2": Shape(null=False),
    "gemma_3": Shape(parts=frozenset({"assistant", "tool", "user"}), null=False),
    "phi_3": Shape(null=False),
    "phi_4": Shape(null=False),
    "deepseek_v3": Shape(),
    "deepseek_r1_distills": Shape(arguments="text", empty=False),
    "smollm_3": Shape(),
    "glm_4": Shape(arguments="text"),
    "glm_4_5": Shape(parts=ALL),  # glm 4.5
    "granite_3": Shape(tools=True),
    "command_r": Shape(),
    "gpt_oss": Shape(),  # gpt-oss
    "kimi_k2": Shape(parts=ALL),
    "minimax_m2": Shape(parts=ALL, null=False),
    "qwen_3_5": Shape(parts=ALL),  # qwen 3.5 and 3-vl
    "deepseek_v3_1": Shape(),
    "mistral_small_3": Shape(parts=frozenset({"assistant", "user"})),  # small 3.1 and 3.2
    "command_r7b": Shape(),
    "parts_only": Shape(strings=NONE, parts=ALL, null=False),  # smolvlm, idefics and llava: parts only
    "parts_in_a_variable": Shape(parts=ALL, null=False),
}


def source_of(name: str) -> str:
    """Return the template of a shape."""
    return Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text()
