"""Render messages to a prompt with the model's own Jinja chat template.

The Jinja environment matches transformers' `apply_chat_template`: the same whitespace rules, `raise_exception`,
`strftime_now` and `tojson`, and `generation` blocks, which only matter in training.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastgen.config import ConfigError

# White space that no template emits after a message.
_MARK_SPACE = " \n\t"
# A tool name that no template contains.
_PROBE = "fastgen_probe"


class ChatTemplateError(ValueError):
    """The template rejected the messages. The error message is the template's."""


class ChatTemplate:
    """A model's chat template, compiled.

    Attributes:
        source: source text of the template.
        tool_source: source text of the template for requests with tools, often the same.
        takes_tools: whether that template renders tools.

    Raises:
        ConfigError: if a template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens)
        self._template = _compiled(source)
        self._tool_template = _compiled(tool_source) if tool_source else self._template
        self.takes_tools = self._shows_tools()

    @classmethod
    def named(cls, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Build from a model's templates by name, chosen as in transformers; None if there are none."""
        if not sources.get("default"):
            return None
        return cls(sources["default"], special_tokens, tool_source=sources.get("tool_use"))

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
    ) -> str:
        """Return the prompt for `messages` (role, content, ...), ending with the generation prompt.

        `tools` are JSON schemas of functions, `documents` texts with titles, and `variables` further variables of the
        template, for example `enable_thinking`.

        Raises:
            ChatTemplateError: if the template rejects the messages or fails.
        """
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
        }
        template = self._tool_template if tools else self._template
        try:
            return template.render(context)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error
        except RecursionError:
            raise ChatTemplateError("a value is nested too deeply") from None

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
            ChatTemplateError: see `render`; also if the template does not render the last message's text.
        """
        last = str(messages[-1].get("content") or "")
        if not last.strip():
            raise ChatTemplateError("the last message has no text to continue")
        # Digits, because templates may change the case of letters. Random, so that no text contains them.
        mark = str(secrets.randbits(128))
        marked = [*messages[:-1], {**messages[-1], "content": last + mark + _MARK_SPACE}]
        shown, found, behind = self.render(marked, add_generation_prompt=False, **context).rpartition(mark)
        if not found:
            raise ChatTemplateError("the template does not render the last message's text, so it cannot be continued")
        # A template that strips white space after the mark would also strip the text's.
        return shown if behind.startswith(_MARK_SPACE) else shown.removesuffix(last[len(last.rstrip()) :])


def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"chat template: line {getattr(error, 'lineno', '?')}: {error}") from None


class _GenerationBlocks(Extension):
    """Jinja tag `{% generation %}...{% endgeneration %}`, which marks training text: renders its body."""

    tags = {"generation"}  # noqa: RUF012  (name and type required by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which does not belong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
