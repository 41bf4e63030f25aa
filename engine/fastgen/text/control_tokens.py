"""Keeps text of clients from becoming the tokens that structure a conversation.

A chat template writes role marks such as `<|im_end|>` as text, and the tokenizer makes tokens of them. The same text in
a message would become the same token, and forge the end of the message. So before a template renders client text, a
lone surrogate, which no text contains, is put into each spelling of a control token. In the prompt, spellings with it
inside are encoded as plain text, and those without are the template's. transformers serves the same purpose
with `apply_chat_template(..., sanitize_control_tokens=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Strict JSON cannot spell it, and `message_form` replaces it in the arguments of earlier calls.
MARK = "\ud800"


class ControlTokens:
    """The control tokens of a model with a chat template.

    They are its special tokens and the added tokens that the template writes, such as DeepSeek's role marks, but not
    white space, which templates write as ordinary text. Tokens of one character are left out.

    Attributes:
        ids: of the control tokens.

    Args:
        spellings: the control tokens' texts by id.
        kept: marks that keep their meaning in an assistant's messages, because templates look for them there: those
            around the reasoning.
    """

    def __init__(self, spellings: Mapping[int, str], kept: Iterable[str] = ()) -> None:
        longer = {number: text for number, text in spellings.items() if len(text) > 1}
        self.ids = frozenset(longer)
        texts = sorted(longer.values(), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._breaks = re.compile("|".join(_breaks(texts)) or r"(?!)")
        self._kept = re.compile("|".join(map(re.escape, kept)) or r"(?!)")

    def guarded(self, value: Any) -> Any:
        """Return text of clients, or objects and lists that contain it, with a mark inside each control token.

        A token could also be joined from several texts, so parts of it are marked too: its first two characters, its
        last two, and its first or last character at the edge of a text.
        """
        if isinstance(value, str):
            return self._breaks.sub(rf"\g<0>{MARK}", value.replace(MARK, ""))
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(item) for item in value]
        return value

    def guarded_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with marks in its text, but not in the `kept` marks of an assistant's content.

        The role is the client's choice, not text: it is left as it is, unless it contains a control token.
        """
        guarded = {name: self.guarded(value) for name, value in message.items() if name != "role"}
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            texts, kept = self._kept.split(content), self._kept.findall(content)
            pieces = [self.guarded(text) + mark for text, mark in zip(texts, [*kept, ""], strict=True)]
            guarded["content"] = "".join(pieces)
        role = message.get("role")
        is_forged = isinstance(role, str) and self._whole.search(role) is not None
        return {"role": self.guarded(role) if is_forged else role, **guarded}

    def parted(self, rendered: str) -> tuple[list[str], int]:
        """Divide a rendered prompt into ordinary text and text of clients that spells control tokens.

        Return the pieces without marks, every second of which is a spelling to encode as plain text, and the number of
        control tokens that the template wrote.
        """
        pieces, num_written, start = [""], 0, 0
        text = rendered.replace(MARK, "")
        marks = _places(rendered)
        for found in self._whole.finditer(text):
            if not any(place in marks for place in range(found.start() + 1, found.end())):
                num_written += 1
                continue
            pieces[-1] = text[start : found.start()]
            pieces += [found[0], ""]
            start = found.end()
        pieces[-1] = text[start:]
        return pieces, num_written


def _breaks(texts: Iterable[str]) -> list[str]:
    """Return expressions of what a mark follows: a place inside a control token, or inside what may become one."""
    behind: dict[str, set[str]] = {}  # characters by the one before them
    edges, words = set(), []
    for text in texts:
        if text[0].isalnum():  # templates compare texts with words, so only the whole token is marked
            words.append(f"{re.escape(text[0])}(?={re.escape(text[1:])})")
            continue
        behind.setdefault(text[0], set()).add(text[1])
        behind.setdefault(text[-2], set()).add(text[-1])
        edges.add(text[0])
        if not text[-1].isalnum():
            behind.setdefault("", set()).add(text[-1])
    starts = behind.pop("", set())
    pairs = [f"{re.escape(first)}(?={_any_of(seconds)})" for first, seconds in sorted(behind.items())]
    at_end = [rf"{_any_of(edges)}(?=\s*\Z)"] if edges else []
    at_start = [rf"(?:\A|\s)(?={_any_of(starts)})"] if starts else []
    return [*pairs, *at_end, *at_start, *words]


def _any_of(characters: Iterable[str]) -> str:
    return f"[{''.join(map(re.escape, sorted(characters)))}]"


def _places(rendered: str) -> frozenset[int]:
    """Return the places of the marks in the text without them."""
    places, before = set(), 0
    for text in rendered.split(MARK)[:-1]:
        before += len(text)
        places.add(before)
    return frozenset(places)
