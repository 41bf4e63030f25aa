"""Choose how a model's reasoning is parsed."""

from __future__ import annotations

from fastgen.settings import ConfigError
from fastgen.text import harmony
from fastgen.text.reasoning.format import ReasoningFormat
from fastgen.text.reasoning.harmony import HarmonyReasoning
from fastgen.text.reasoning.think import Think
from fastgen.text.tokenizer import Tokenizer


def reasoning_format(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format of `--reasoning-parser`; None if reasoning is not parsed.

    `auto` finds Harmony's channels in the template. Otherwise it looks for the closing mark of `Think` in the template,
    or both marks in the vocabulary.

    Raises:
        ConfigError: if the vocabulary lacks a mark of Harmony.
    """
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    if name == "harmony" or (name == "auto" and harmony.CHANNEL in template):
        missing = next((mark for mark in harmony.MARKS if not tokenizer.added_ids_of([mark])), None)
        if missing is not None:
            raise ConfigError(
                f"--reasoning-parser {name}: the model's vocabulary has no special token {missing}, which the channels "
                "of Harmony (gpt-oss) need; set it to none to get reasoning, calls and answers as one text"
            )
        return HarmonyReasoning()
    think = Think()
    if name == "auto":
        has_tokens = all(tokenizer.backend.token_to_id(mark) is not None for mark in think.marks)
        return think if think.closing in template or has_tokens else None
    return think if name == "think" else None
