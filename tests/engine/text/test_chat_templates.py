"""Models with a separate chat template for requests with tools, in each place that can contain it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fastgen.settings import ConfigError
from fastgen.text.chat_template import ChatTemplate
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.registry import choose_format

PLAIN = "{{ bos_token }}plain: {{ messages[0].content }}"
WITH_TOOLS = "{{ bos_token }}{{ tools[0].function.name }} <tool_call>: {{ messages[0].content }}"
HI = [{"role": "user", "content": "hi"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def folder(smollm2: Tokenizer, tmp_path: Path) -> Path:
    """Return a model's folder without chat templates."""
    PreTrainedTokenizerFast(tokenizer_object=smollm2.backend, bos_token="<|im_start|>").save_pretrained(tmp_path)
    assert template_of(tmp_path) is None
    return tmp_path


def template_of(folder: Path) -> ChatTemplate | None:
    return Tokenizer.load(folder).chat_template


def tell(folder: Path, chat_template: object) -> None:
    """Write the templates into tokenizer_config.json."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": chat_template}))


def check(tokenizer: Tokenizer) -> None:
    """Return whether requests with and without tools use their templates."""
    template = tokenizer.chat_template
    assert template is not None
    assert template.takes_tools
    assert template.render(HI) == "<|im_start|>plain: hi"
    assert template.render(HI, tools=TOOLS) == "<|im_start|>f <tool_call>: hi"
    assert template.render_unfinished(HI, tools=TOOLS) == "<|im_start|>f <tool_call>: hi"
    assert isinstance(choose_format("auto", tokenizer), Hermes)


def test_the_settings_can_list_a_template_for_tools(folder: Path) -> None:
    tell(folder, [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}])
    check(Tokenizer.load(folder))
    assert PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        HI, tools=TOOLS, tokenize=False
    ) == template_of(folder).render(HI, tools=TOOLS)  # type: ignore[union-attr]


@pytest.mark.parametrize("in_settings", [True, False])
def test_a_folder_of_templates_can_have_one_for_tools(folder: Path, in_settings: bool) -> None:
    if in_settings:
        tell(folder, PLAIN)
    else:
        (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    check(Tokenizer.load(folder))


def test_a_gguf_file_can_have_a_template_for_tools(smollm2_metadata: Any) -> None:
    templates = {"tokenizer.chat_template": PLAIN, "tokenizer.chat_template.tool_use": WITH_TOOLS}
    check(Tokenizer.load({**smollm2_metadata, **templates}))


def test_a_template_file_replaces_all_templates_of_the_settings(folder: Path) -> None:
    tell(folder, [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old {{ tools }}"}])
    (folder / "chat_template.jinja").write_text(PLAIN)
    template = template_of(folder)
    assert template is not None
    assert not template.takes_tools
    assert template.render(HI, tools=TOOLS) == "<|im_start|>plain: hi"


def test_a_processors_file_counts_if_there_is_no_other_template(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    template = template_of(folder)
    assert template is not None
    assert template.render(HI) == "<|im_start|>plain: hi"
    tell(folder, "newer")
    assert template_of(folder).render(HI) == "newer"  # type: ignore[union-attr]


def test_a_gguf_file_can_have_a_template_for_documents(smollm2_metadata: Any) -> None:
    template = {"tokenizer.chat_template": PLAIN, "tokenizer.chat_template.rag": "{{ documents[0].text }}"}
    loaded = Tokenizer.load({**smollm2_metadata, **template}).chat_template
    assert loaded is not None
    assert loaded.render(HI, documents=[{"text": "found"}]) == "found"
    assert loaded.render(HI) == "<|im_start|>plain: hi"


def test_an_invalid_template_for_tools_is_rejected_at_load(folder: Path) -> None:
    tell(folder, [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{% if %}"}])
    with pytest.raises(ConfigError, match="chat template: line 1"):
        template_of(folder)
