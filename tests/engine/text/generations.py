"""The text of a generation whose request has some fields of `RenderedRequest`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.text.output_text import OutputText
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.tokenizer import Tokenizer


def output_text(
    tokenizer: Tokenizer, *, min_tokens: int = 0, marks: tuple[str, ...] = (), **meaning: Any
) -> OutputText:
    """Return the text of a generation; `marks` are those of a tool-call format."""
    sampling = SamplingParams(max_tokens=99, min_tokens=min_tokens)
    request = Request(id="", prompt_token_ids=[1], sampling=sampling)
    if marks:
        meaning["tool_format"] = SimpleNamespace(marks=marks)
    return OutputText(tokenizer, RenderedRequest(requests=[request], **meaning), request)
