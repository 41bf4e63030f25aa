"""Find a rule or a terminal of a Lark grammar that matches no text.

The library accepts them, and a generation that reaches one cannot continue, or never ends. Parameters of rules
(`rule::0`) and their conditions (`%if`) are not looked at: a rule stands for all of its values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from fastgen.text.grammars.endings import with_an_end
from fastgen.text.grammars.lark_tokens import tokens

_END = ("newline", "")
_ENDS_ALTERNATIVE = ("|", ")", "]", "}", "->")


def empty_part(text: str, is_empty: Callable[[str], bool]) -> str:
    """Return what is wrong with a valid grammar: a part that no text matches, or that never ends; "" if nothing is.

    Args:
        text: the grammar.
        is_empty: whether a grammar of terminals, whose start is one of them, matches nothing.
    """
    try:
        return _Rules(token for token in tokens(text) if token[0] != "space").empty_part(is_empty)
    except (ValueError, RecursionError):
        return ""  # syntax that is not known here


class _Rules:
    """The rules of a grammar, and of grammars nested in it, each with a scope of its own.

    Groups in parentheses are rules with a number as their name.
    """

    def __init__(self, tokens: Iterator[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._needs: dict[str, list[list[str]]] = defaultdict(list)  # what each alternative of a rule needs
        self._mentions: dict[str, list[str]] = defaultdict(list)  # also what may be left out
        self._nested: dict[str, _Rules] = {}
        self._definitions = ""  # of terminals
        self._num_groups = 0
        self._next = _END
        self._advance()
        while self._next != _END and self._text != "}":
            self._definition()

    @property
    def _text(self) -> str:
        return self._next[1]

    def _advance(self) -> str:
        """Return the text of the next token, and advance past it."""
        found, self._next = self._next, next(self._tokens, _END)
        return found[1]

    def _take(self, text: str) -> None:
        if self._advance() != text:
            raise ValueError(text)

    def _definition(self) -> None:
        kind, text = self._next
        if kind == "newline" or text == "%override":
            self._advance()
        elif kind == "name" and text.lstrip("!?_")[0].islower():
            while self._advance() != ":":
                if self._next[0] == "newline":
                    raise ValueError(text)
            self._alternatives(text.lstrip("!?"))
        else:
            while self._next[0] != "newline":
                self._definitions += self._advance() + " "
            self._definitions += "\n"

    def _alternatives(self, rule: str) -> None:
        while True:
            needed = []
            while self._next[0] != "newline" and self._text not in _ENDS_ALTERNATIVE:
                symbol = self._symbol()
                self._mentions[rule].append(symbol)
                if not self._may_be_left_out():
                    needed.append(symbol)
                if self._text == "%if":
                    self._advance()
                    self._parameter()
            self._needs[rule].append(needed)
            if self._text == "->":
                self._advance()
                self._advance()
            if self._text != "|":
                return
            self._advance()

    def _symbol(self) -> str:
        """Return the name of a rule or terminal, the text of a regular expression, or "" for what matches some text."""
        kind, text = self._next
        self._advance()
        if text in ("(", "["):
            self._num_groups += 1
            group = str(self._num_groups)
            self._alternatives(group)
            self._take({"(": ")", "[": "]"}[text])
            if text == "[":
                self._needs[group].append([])
            return group
        if text == "%lark":
            if self._text != "{":
                raise ValueError(text)
            name = f"%lark {len(self._nested)}"
            nested = self._nested[name] = _Rules(self._tokens)
            if nested._text != "}":
                raise ValueError(text)
            self._advance()
            return name
        if kind == "string" and self._text == "..":
            self._advance()
            self._advance()
        elif kind in ("regex", "name") or text.startswith("%regex"):
            if self._text == "::":
                self._advance()
                self._parameter()
            return text
        elif kind not in ("string", "data") and text[0] not in "<@":
            raise ValueError(text)
        return ""

    def _parameter(self) -> None:
        """Read an expression of a rule's parameter, such as `0x1`, `_` or `incr([0:3])`."""
        self._advance()
        depth = 0
        while depth or self._text == "(":
            if self._next == _END:
                raise ValueError("(")
            depth += {"(": 1, ")": -1}.get(self._advance(), 0)

    def _may_be_left_out(self) -> bool:
        """Read what follows a symbol; return whether there may be none of it."""
        if self._text in ("?", "*", "+"):
            return self._advance() != "+"
        if self._text == "~":
            self._advance()
            least = self._advance()
            if self._text == "..":
                self._advance()
                self._advance()
            return int(least) == 0
        if self._text != "{":
            return False
        self._advance()
        least = self._text
        while self._advance() != "}":
            if self._next[0] == "newline":
                raise ValueError("{")
        return least == "," or int(least) == 0

    def empty_part(self, is_empty: Callable[[str], bool]) -> str:
        """See the function of this name."""
        reached = self._reached()
        for name in reached:
            if name in self._nested and (found := self._nested[name].empty_part(is_empty)):
                return found
        terminals = [name for name in reached if name[0] in "/%" or name.lstrip("_")[0].isupper()]
        terminals = [name for name in terminals if name not in self._nested]
        if terminals and is_empty(self._joined(terminals)):
            while len(terminals) > 1:
                half = terminals[: len(terminals) // 2]
                terminals = half if is_empty(self._joined(half)) else terminals[len(half) :]
            return f"{terminals[0]} matches no text; correct or remove it"
        if endless := self._endless_rule(reached):
            return f"the rule {endless} never ends; add an alternative that does not need it, or remove it"
        return ""

    def _reached(self) -> list[str]:
        """Return the symbols that a match can reach."""
        found, waiting = {"start": None}, ["start"]
        while waiting:
            for symbol in self._mentions.get(waiting.pop(), ()):
                if symbol and symbol not in found:
                    found[symbol] = None
                    waiting.append(symbol)
        return list(found)

    def _joined(self, terminals: list[str]) -> str:
        """Return a grammar of all of these terminals in a row: it matches nothing if one of them does."""
        return f"start: ALL-TERMINALS\nALL-TERMINALS: {' '.join(terminals)}\n{self._definitions}"

    def _endless_rule(self, reached: list[str]) -> str:
        """Return a rule of which each alternative needs a rule of the same kind; "" if there is none."""
        ended = with_an_end(self._needs)
        rule = next((rule for rule in reached if rule in self._needs and rule not in ended), "")
        seen: set[str] = set()
        while rule and (rule.isdigit() or rule not in seen):  # until the rule that needs itself
            seen.add(rule)
            rule = next(symbol for symbol in self._needs[rule][0] if symbol in self._needs and symbol not in ended)
        return rule
