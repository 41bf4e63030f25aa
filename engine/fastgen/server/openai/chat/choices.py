"""Chat choices in OpenAI's format, complete or as stream chunks: reasoning, content and tool calls."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from fastgen.core.step_output import TokenLogprobs
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.openai.logprobs import TokenText, chat_logprobs
from fastgen.server.openai.response_bodies import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
    finish_reason,
)
from fastgen.text.output_events import CallArguments, CallBegun, Collected, Content, OutputEvent, Reasoning
from fastgen.text.output_parser import OutputParser
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta, RequestOutput


def chat_choice(
    index: int, output: RequestOutput, rendered: RenderedRequest, body: ChatRequest, token_text: TokenText
) -> ChatChoice:
    """Return the complete choice number `index`."""
    parser, delta = OutputParser(rendered), output.as_delta()
    found = Collected(parser.push(delta))
    calls: list[ToolCall] | UnsetType = UNSET
    if found.calls:
        calls = [ToolCall(call_id(rendered), FunctionCall(call.arguments, call.name)) for call in found.calls]
    shown = found.reasoning if found.reasoning and rendered.include_reasoning else UNSET
    message = AssistantMessage(found.content or (None if found.reasoning or found.calls else ""), calls, shown, shown)
    logprobs = chat_logprobs(token_text, delta.logprobs) if body.logprobs else None
    token_ids = output.token_ids if body.return_token_ids else UNSET
    return ChatChoice(index, message, chat_finish_reason(parser, delta), logprobs, delta.stop_reason, token_ids)


def chat_finish_reason(parser: OutputParser, delta: OutputDelta) -> str | None:
    """Return the finish reason of a choice that `delta` ends; None if it does not."""
    reason = finish_reason(delta.finish_reason)
    return "tool_calls" if reason == "stop" and parser.ends_with_call(delta.stop_reason) else reason


def call_id(rendered: RenderedRequest) -> str:
    """Return a new id of a call, in the form that the model's template requires."""
    assert rendered.tool_format is not None
    return rendered.tool_format.new_id()


class ChatChunkWriter:
    """Writes the chunks of one streamed choice after the first: deltas, then the finish reason."""

    def __init__(self, index: int, rendered: RenderedRequest, body: ChatRequest, token_text: TokenText) -> None:
        self._index = index
        self._rendered = rendered
        self._parser = OutputParser(rendered)
        self._token_text = token_text if body.logprobs else None
        self._has_token_ids = bool(body.return_token_ids)
        self._num_sent_tokens = 0
        self._pending_logprobs: list[TokenLogprobs] = []

    @property
    def is_plain(self) -> bool:
        """Return whether each chunk but the last carries the text of one delta and nothing else."""
        return self._parser.is_plain and self._token_text is None and not self._has_token_ids

    def write(self, delta: OutputDelta, output: RequestOutput) -> list[ChatChunkChoice]:
        """Return the chunks for a delta of `output`; its logprobs and token ids go with the next chunk."""
        chat_deltas = [chat_delta for event in self._parser.push(delta) for chat_delta in self._deltas(event)]
        self._pending_logprobs += delta.logprobs
        chunks = [
            ChatChunkChoice(self._index, chat_delta, None, self._take_logprobs(), token_ids=self._take_tokens(output))
            for chat_delta in chat_deltas
        ]
        if delta.finish_reason is not None:
            reason = chat_finish_reason(self._parser, delta)
            logprobs, token_ids = self._take_logprobs(), self._take_tokens(output)
            chunks.append(ChatChunkChoice(self._index, Delta(), reason, logprobs, delta.stop_reason, token_ids))
        return chunks

    def _take_tokens(self, output: RequestOutput) -> list[int] | UnsetType:
        """Return the token ids since the last chunk, if requested."""
        if not self._has_token_ids:
            return UNSET
        token_ids = output.token_ids[self._num_sent_tokens :]
        self._num_sent_tokens += len(token_ids)
        return token_ids

    def _take_logprobs(self) -> ChatLogprobs | None:
        entries, self._pending_logprobs = self._pending_logprobs, []
        return chat_logprobs(self._token_text, entries) if entries and self._token_text is not None else None

    def _deltas(self, event: OutputEvent) -> list[Delta]:
        match event:
            case Reasoning(text):
                return [Delta(reasoning_content=text, reasoning=text)] if self._rendered.include_reasoning else []
            case Content(text):
                return [Delta(content=text)]
            case CallBegun(index, name):
                call = ToolCallDelta(index, FunctionCall("", name), call_id(self._rendered), "function")
                return [Delta(tool_calls=[call])]
            case CallArguments(index, text):
                return [Delta(tool_calls=[ToolCallDelta(index, FunctionCall(text))])]
