"""Render messages to a prompt with a chat template, the model's or a request's."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

from fastgen.settings import ConfigError
from fastgen.text.control_tokens import ControlTokens
from fastgen.text.message_form import MessageForm
from fastgen.text.template_environment import environment

# White space that no template emits after a message.
_MARK_SPACE = " \n\t"
# A tool name that no template contains.
_PROBE = "fastgen_probe"


class ChatTemplateError(ValueError):
    """The template rejected the messages or failed. The message says why, often in the template's words."""


class ChatTemplate:
    """A model's chat templates, compiled: the usual one and, for some models, one for tools and one for documents.

    Attributes:
        source: source text of the usual template.
        tool_source: source text of the template for requests with tools, often the same.
        takes_tools: whether that template renders tools.

    Raises:
        ConfigError: if a template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        document_source: str | None = None,
    ) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        self._template = _Template(source)
        self._tool_template = _Template(tool_source) if tool_source else self._template
        self._document_template = _Template(document_source) if document_source else self._template
        self.takes_tools = self._shows_tools()

    @classmethod
    def named(cls, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Build from a model's templates by name; None if neither `default` nor `tool_use` is there.

        As in transformers, `tool_use` serves requests with tools, and `default` all others. In transformers, callers
        choose `rag` by its name; here it serves requests with documents.
        """
        usual = sources.get("default") or sources.get("tool_use")
        if not usual:
            return None
        return cls(usual, special_tokens, tool_source=sources.get("tool_use"), document_source=sources.get("rag"))

    def replaced(self, source: str) -> ChatTemplate:
        """Return a template with another source and the same special tokens."""
        return ChatTemplate(source, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        control: ControlTokens | None = None,
    ) -> str:
        """Return the prompt for `messages` (role, content, ...), by default ending with the generation prompt.

        The messages have OpenAI's form; the template gets them in its own, see `message_form`. Content is a string,
        null, or a list of parts with a `text`.

        `tools` are functions in OpenAI's form, `documents` texts with titles, and `variables` further variables of the
        template, for example `enable_thinking`. With `control`, none of these and no message can write control tokens:
        the prompt contains its marks.

        Raises:
            ChatTemplateError: if the template rejects the messages or fails.
        """
        template = self._tool_template if tools else self._document_template if documents else self._template
        given = {
            **(variables or {}),
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
        }
        guarded = given if control is None else control.guarded(given)
        context = {**self._special_tokens, **guarded, "add_generation_prompt": add_generation_prompt}
        return template.render(messages, context, control)

    def literal_text(self) -> str:
        """Return the literal texts in the sources of the templates, one per line."""
        templates = dict.fromkeys((self._template, self._tool_template, self._document_template))
        return "\n".join(text for template in templates for text in template.literals())

    def _shows_tools(self) -> bool:
        """Return whether the template renders tools; its text may mention `tools` only as a field of a message."""
        if re.search(r"\btools\b", self.tool_source) is None:
            return False
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
        try:
            shown = self.render([{"role": "user", "content": "a"}], tools=[{"type": "function", "function": function}])
        except ChatTemplateError:  # the template requires another conversation or tool
            return True
        return _PROBE in shown

    def render_unfinished(self, messages: Sequence[Mapping[str, Any]], **context: Any) -> str:
        """Return the prompt up to the end of the last message's text, so that the model continues it.

        As in transformers, a marker appended to the text finds its end in the prompt: the text itself may also occur in
        what the template emits after it.

        Raises:
            ChatTemplateError: see `render`; also if the last message has no text, or the template does not render it.
        """
        content = messages[-1].get("content")
        parts = list(content) if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]
        last = parts[-1]["text"] if parts else ""
        if not last.strip():
            raise ChatTemplateError("the last message has no text to continue")
        # Digits, because templates may change the case of letters. Random, so that no text contains them.
        mark = str(secrets.randbits(128))
        text = last + mark + _MARK_SPACE
        marked = [*parts[:-1], {**parts[-1], "text": text}] if isinstance(content, list) else text
        shown, found, behind = self.render(
            [*messages[:-1], {**messages[-1], "content": marked}], add_generation_prompt=False, **context
        ).rpartition(mark)
        if not found:
            raise ChatTemplateError("the template does not render the last message's text, so it cannot be continued")
        # A template that strips white space after the mark would also strip the text's.
        return shown if behind.startswith(_MARK_SPACE) else shown.removesuffix(last[len(last.rstrip()) :])


class _Template:
    """One template, and the form in which it reads messages."""

    def __init__(self, source: str) -> None:
        self._source = source
        made = environment()
        try:
            tree = made.parse(source)
            self._compiled = made.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise ConfigError(f"chat template: line {line}: {error}; correct the template") from None
        self._form = MessageForm(tree, self._tried)

    def render(
        self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any], control: ControlTokens | None
    ) -> str:
        """Return the prompt; raise ChatTemplateError if the template rejects the messages or fails."""
        shaped = self._form.shaped(messages)
        return self._rendered(shaped if control is None else list(map(control.guarded_message, shaped)), context)

    def literals(self) -> Iterator[str]:
        """Yield the literal texts in the template's source."""
        tree = environment().parse(self._source)
        yield from (node.data for node in tree.find_all(nodes.TemplateData))
        yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))

    def _rendered(self, messages: list[dict[str, Any]], context: Mapping[str, Any]) -> str:
        try:
            return self._compiled.render({**context, "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error
        except RecursionError:
            raise ChatTemplateError("a value is nested too deeply") from None

    def _tried(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        context = {"add_generation_prompt": False, "tools": tools, "documents": None, "bos_token": "", "eos_token": ""}
        try:
            return self._rendered(messages, context)
        except ChatTemplateError:
            return None
