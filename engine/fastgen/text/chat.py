"""Messages to a prompt, by the model's own Jinja template.

The environment is the one that templates are written for (transformers' `apply_chat_template`): its whitespace rules,
its `raise_exception`, `strftime_now` and `tojson`, and its `generation` blocks, which only matter in training.
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

# White space that no template writes behind a message itself.
_MARK_SPACE = " \n\t"
# The name of a tool that no template has in it.
_PROBE = "fastgen_probe"


class ChatTemplateError(ValueError):
    """These messages do not fit the model's template; the message is the template's own."""


class ChatTemplate:
    """A model's chat template, compiled.

    Attributes:
        source: the template as the model has it.
        tool_source: the one for requests with tools; the same where the model has no other.
        takes_tools: does that one tell the model of tools?

    Raises:
        ConfigError: when a template is not valid Jinja.
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
        """The template of a model with templates of these names, as transformers chooses among them; None without any.

        Raises:
            ConfigError: when a template is not valid Jinja.
        """
        if not sources.get("default"):
            return None
        return cls(sources["default"], special_tokens, tool_source=sources.get("tool_use"))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages` (role, content, ...), ending where the assistant is to speak.

        `tools` are JSON schemas of functions, `documents` texts with titles, and `variables` whatever else this
        template reads (for example `enable_thinking`).

        Raises:
            ChatTemplateError: when the template refuses the messages or cannot handle them.
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
            raise ChatTemplateError("something in them is nested too deeply") from None

    def _shows_tools(self) -> bool:
        """Is a tool that is offered told to the model? The word alone, which may be a message's field, says little."""
        if re.search(r"\btools\b", self.tool_source) is None:
            return False
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
        try:
            shown = self.render([{"role": "user", "content": "a"}], tools=[{"type": "function", "function": function}])
        except ChatTemplateError:  # it wants another conversation, or another tool
            return True
        return _PROBE in shown

    def render_unfinished(self, messages: Sequence[Mapping[str, Any]], **context: Any) -> str:
        """As `render`, ending inside the last message, so that the model goes on with it.

        The text itself is no guide to where that is, as it may stand in the template's marks behind it too: a mark of
        our own goes behind it, as transformers does it.

        Raises:
            ChatTemplateError: also when the template does not show the last message's text.
        """
        last = str(messages[-1].get("content") or "")
        if not last.strip():
            raise ChatTemplateError("the last message has no text to go on with")
        # Digits: a template that changes letters leaves them alone. Nobody can have written these.
        mark = str(secrets.randbits(128))
        marked = [*messages[:-1], {**messages[-1], "content": last + mark + _MARK_SPACE}]
        shown, found, behind = self.render(marked, add_generation_prompt=False, **context).rpartition(mark)
        if not found:
            raise ChatTemplateError("the last message's text is not shown, so that nothing can go on with it")
        # A template that strips the white space behind the mark would have stripped the text's own.
        return shown if behind.startswith(_MARK_SPACE) else shown.removesuffix(last[len(last.rstrip()) :])


def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"chat template: line {getattr(error, 'lineno', '?')}: {error}") from None


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}`: marks what a model is trained on; here its body as it is."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that jinja2 asks for)

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
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
