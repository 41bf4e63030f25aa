"""A chat's choices as OpenAI's objects: content and tool calls, whole or in deltas."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.core.step_output import TokenLogprobs
from fastgen.server.openai.logprobs import TokenNames, chat_logprobs
from fastgen.server.openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from fastgen.server.openai.tool_calling import ToolUse
from fastgen.server.serving.outputs import Answer, Piece
from fastgen.text.tools.events import CallArguments, CallBegun, CallBroken, Collected, Content, ToolEvent

_TOOL_CALLS = "tool_calls"


class AnswerWriter:
    """Writes the choices of one chat request.

    Args:
        names: how tokens are written, where log-probabilities were asked for.
        tools: what may be called, if anything.
    """

    def __init__(self, names: TokenNames | None, tools: ToolUse | None) -> None:
        self._names = names
        self._tools = tools

    def whole(self, answer: Answer) -> ChatChoice:
        """A choice at once."""
        message, reason = AssistantMessage(answer.text), answer.finish_reason
        if self._tools is not None:
            parser, found = self._tools.parser(), Collected()
            found.take(parser.push(answer.text))
            found.take(parser.finish())
            calls = found.calls[: self._tools.most_calls]
            if calls:
                written = [
                    ToolCall(self._tools.format.new_id(), FunctionCall(call.arguments, call.name)) for call in calls
                ]
                message = AssistantMessage(found.content or None, written)
                reason = _TOOL_CALLS if reason == "stop" else reason
            else:
                message = AssistantMessage(found.content)
        return ChatChoice(answer.index, message, reason, self.logprobs(answer.logprobs), answer.stop_reason)

    def stream(self, index: int) -> AnswerStream:
        """A choice piece by piece."""
        return AnswerStream(index, self, self._tools)

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        """Log-probabilities as they are told, where they are to be."""
        return None if self._names is None else chat_logprobs(self._names, entries)


class AnswerStream:
    """One choice of a stream: its role first, then what comes, at last why it ended."""

    def __init__(self, index: int, writer: AnswerWriter, tools: ToolUse | None) -> None:
        self._index = index
        self._writer = writer
        self._tools = tools
        self._parser = None if tools is None else tools.parser()
        self._standing: set[int] = set()  # calls that have not turned out broken
        self._unshown: list[TokenLogprobs] = []

    def begin(self) -> ChatChunkChoice:
        """What comes first."""
        return ChatChunkChoice(self._index, Delta(role="assistant", content=""), None)

    def next(self, piece: Piece) -> list[ChatChunkChoice]:
        """The chunks that a piece becomes; its log-probabilities go with the first of them."""
        if self._parser is None:
            deltas = [Delta(content=piece.text)] if piece.text else []
        else:
            events = self._parser.push(piece.text)
            if piece.finish_reason is not None:
                events += self._parser.finish()
            deltas = [delta for event in events for delta in self._deltas(event)]
        chunks = []
        self._unshown += piece.logprobs
        for delta in deltas:
            chunks.append(ChatChunkChoice(self._index, delta, None, self._take_logprobs()))
        if piece.finish_reason is not None:
            reason = _TOOL_CALLS if self._standing and piece.finish_reason == "stop" else piece.finish_reason
            last = self._take_logprobs()
            chunks.append(ChatChunkChoice(self._index, Delta(), reason, last, piece.stop_reason))
        return chunks

    def _take_logprobs(self) -> ChatLogprobs | None:
        entries, self._unshown = self._unshown, []
        return self._writer.logprobs(entries) if entries else None

    def _deltas(self, event: ToolEvent) -> list[Delta]:
        assert self._tools is not None
        most = self._tools.most_calls
        match event:
            case Content(text):
                return [Delta(content=text)]
            case CallBegun(index, name) if most is None or index < most:
                self._standing.add(index)
                call = ToolCallDelta(index, FunctionCall("", name), self._tools.format.new_id(), "function")
                return [Delta(tool_calls=[call])]
            case CallArguments(index, text) if most is None or index < most:
                return [Delta(tool_calls=[ToolCallDelta(index, FunctionCall(text))])]
            case CallBroken(index):  # it is with the client already
                self._standing.discard(index)
        return []
