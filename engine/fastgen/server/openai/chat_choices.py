"""Chat choices in OpenAI's format, complete or as stream chunks: reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from fastgen.core.step_output import TokenLogprobs
from fastgen.server.openai.logprobs import TokenText, chat_logprobs
from fastgen.server.openai.protocol import ChatRequest
from fastgen.server.openai.reasoning import ReasoningUse
from fastgen.server.openai.responses import (
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
from fastgen.server.openai.tool_calling import ToolUse
from fastgen.text.reasoning import ReasoningParser
from fastgen.text.request_output import OutputDelta, RequestOutput
from fastgen.text.tools.events import CallArguments, Collected, Content, ToolEvent

_TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """How generations become choices."""

    body: ChatRequest
    token_text: TokenText
    tools: ToolUse | None
    reasoning: ReasoningUse | None


def chat_choice(index: int, output: RequestOutput, options: ChoiceOptions) -> ChatChoice:
    """Return the complete choice number `index`."""
    tools, reasoning = options.tools, options.reasoning
    thought, content = _split(None if reasoning is None else reasoning.parser(), output.text, is_last=True)
    reason = finish_reason(output.finish_reason)
    calls: list[ToolCall] | UnsetType = UNSET
    if tools is not None:
        parser, found = tools.parser(), Collected()
        found.take(parser.push(content) + parser.finish())
        content = found.content
        if found.calls:
            calls = [
                ToolCall(tools.format.new_id(), FunctionCall(call.arguments, call.name))
                for call in found.calls[: tools.max_calls]
            ]
            reason = _reason_with_calls(reason, output.stop_reason, calls[-1].function.arguments or "")
    shown = thought if thought and reasoning is not None and reasoning.include else UNSET
    message = AssistantMessage(content or (None if thought or calls else ""), calls, shown, shown)
    logprobs = chat_logprobs(options.token_text, output.logprobs or ()) if options.body.logprobs else None
    token_ids = output.token_ids if options.body.return_token_ids else UNSET
    return ChatChoice(index, message, reason, logprobs, output.stop_reason, token_ids)


def _reason_with_calls(reason: str | None, stop_reason: str | int | None, last_arguments: str) -> str | None:
    """Return the finish reason of a choice with calls: `stop` if the client's stop string or token cut the last one."""
    if reason != "stop" or (stop_reason is not None and not _is_json(last_arguments)):
        return reason
    return _TOOL_CALLS


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _split(parser: ReasoningParser | None, text: str, *, is_last: bool) -> tuple[str, str]:
    """Return the reasoning and the content in the next `text` of a generation."""
    if parser is None:
        return "", text
    parts = [parser.push(text)]
    if is_last:
        parts.append(parser.finish())
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


class ChatChunkWriter:
    """Writes the chunks of one streamed choice after the first: deltas, then the finish reason."""

    def __init__(self, index: int, options: ChoiceOptions) -> None:
        self._index = index
        self._token_text = options.token_text if options.body.logprobs else None
        self._tools = options.tools
        self._parser = None if options.tools is None else options.tools.parser()
        self._reasoning = None if options.reasoning is None else options.reasoning.parser()
        self._includes_reasoning = options.reasoning is not None and options.reasoning.include
        self._has_token_ids = bool(options.body.return_token_ids)
        self._num_sent_tokens = 0
        self._last_arguments: list[str] | None = None  # of the last call, if any
        self._pending_logprobs: list[TokenLogprobs] = []

    @property
    def is_plain(self) -> bool:
        """Return whether each chunk but the last carries the text of one delta and nothing else."""
        parsed = self._parser is not None or self._reasoning is not None
        return not parsed and self._token_text is None and not self._has_token_ids

    def write(self, delta: OutputDelta, output: RequestOutput) -> list[ChatChunkChoice]:
        """Return the chunks for a delta of `output`; its logprobs and token ids go with the first chunk."""
        is_last = delta.finish_reason is not None
        thought, text = _split(self._reasoning, delta.text, is_last=is_last)
        shown = thought and self._includes_reasoning
        chat_deltas = [Delta(reasoning_content=thought, reasoning=thought)] if shown else []
        if self._parser is None:
            chat_deltas += [Delta(content=text)] if text else []
        else:
            events = self._parser.push(text)
            if is_last:
                events += self._parser.finish()
            chat_deltas += [chat_delta for event in events for chat_delta in self._deltas(event)]
        self._pending_logprobs += delta.logprobs
        chunks = [
            ChatChunkChoice(self._index, chat_delta, None, self._take_logprobs(), token_ids=self._take_tokens(output))
            for chat_delta in chat_deltas
        ]
        if is_last:
            reason = finish_reason(delta.finish_reason)
            if self._last_arguments is not None:
                reason = _reason_with_calls(reason, delta.stop_reason, "".join(self._last_arguments))
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

    def _deltas(self, event: ToolEvent) -> list[Delta]:
        assert self._tools is not None
        if isinstance(event, Content):
            return [Delta(content=event.text)]
        if self._tools.max_calls is not None and event.index >= self._tools.max_calls:
            return []
        if isinstance(event, CallArguments):
            assert self._last_arguments is not None
            self._last_arguments.append(event.text)
            return [Delta(tool_calls=[ToolCallDelta(event.index, FunctionCall(event.text))])]
        self._last_arguments = []
        call = ToolCallDelta(event.index, FunctionCall("", event.name), self._tools.format.new_id(), "function")
        return [Delta(tool_calls=[call])]
