"""Find a rule or a terminal of a Lark grammar that matches no text.

The library accepts them, and a generation that reaches one cannot continue, or never ends. A rule with a parameter
(`rule::0`) is looked at first as if it stood for all values and its conditions (`%if`) held, and then with each value
that a match can give it, as far as these are not too many.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastgen.text.grammars.endings import Needs, with_an_end
from fastgen.text.grammars.lark_tokens import tokens
from fastgen.text.grammars.parameters import parsed

_END = ("newline", "")
_ENDS_ALTERNATIVE = ("|", ")", "]", "}", "->")
# Most symbols of rules to look at with the values of their parameters: a tenth of a second.
_MOST_SYMBOLS = 20_000


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


@dataclass(frozen=True, slots=True)
class _Symbol:
    """A symbol of an alternative.

    Attributes:
        name: of a rule or terminal; the text of a regular expression; "" for what matches some text.
        parameter: the expression of its parameter; "" if it has none.
        is_optional: whether it may be left out.
    """

    name: str
    parameter: str = ""
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class _Alternative:
    symbols: Sequence[_Symbol]
    condition: str = ""


class _Rules:
    """The rules of a grammar, and of grammars nested in it, each with a scope of its own.

    Groups in parentheses are rules with a number as their name.
    """

    def __init__(self, tokens: Iterator[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._rules: dict[str, list[_Alternative]] = defaultdict(list)
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
            symbols: list[_Symbol] = []
            condition = ""
            while self._next[0] != "newline" and self._text not in _ENDS_ALTERNATIVE:
                is_empty = self._text == '""'
                name, parameter = self._symbol()
                is_optional = self._may_be_left_out()
                if not is_empty:
                    symbols.append(_Symbol(name, parameter, is_optional))
                if self._text == "%if":
                    self._advance()
                    condition = self._parameter()
            self._rules[rule].append(_Alternative(symbols, condition))
            if self._text == "->":
                self._advance()
                self._advance()
            if self._text != "|":
                return
            self._advance()

    def _symbol(self) -> tuple[str, str]:
        """Return the name of a symbol, and the expression of its parameter; see `_Symbol`."""
        kind, text = self._next
        self._advance()
        if text in ("(", "["):
            self._num_groups += 1
            group = str(self._num_groups)
            self._alternatives(group)
            self._take({"(": ")", "[": "]"}[text])
            if text == "[":
                self._rules[group].append(_Alternative([]))
            return group, "_"
        if text == "%lark":
            if self._text != "{":
                raise ValueError(text)
            name = f"%lark {len(self._nested)}"
            nested = self._nested[name] = _Rules(self._tokens)
            if nested._text != "}":
                raise ValueError(text)
            self._advance()
            return name, ""
        if kind == "string" and self._text == "..":
            self._advance()
            self._advance()
        elif kind in ("regex", "name") or text.startswith("%regex"):
            if self._text != "::":
                return text, ""
            self._advance()
            return text, self._parameter()
        elif kind not in ("string", "data") and text[0] not in "<@":
            raise ValueError(text)
        return "", ""

    def _parameter(self) -> str:
        """Return an expression of a rule's parameter, such as `0x1`, `_` or `incr([0:3])`."""
        found, depth = self._advance(), 0
        while depth or self._text == "(":
            if self._next == _END:
                raise ValueError("(")
            depth += {"(": 1, ")": -1}.get(self._text, 0)
            found += self._advance()
        return found

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
        if dead_end := self._dead_end():
            return (
                f"no match of {dead_end} ends, and a generation may come to it; add an alternative whose %if allows it"
            )
        return ""

    def _reached(self) -> list[str]:
        """Return the symbols that a match can reach."""
        found, waiting = {"start": None}, ["start"]
        while waiting:
            for alternative in self._rules.get(waiting.pop(), ()):
                for symbol in alternative.symbols:
                    if symbol.name and symbol.name not in found:
                        found[symbol.name] = None
                        waiting.append(symbol.name)
        return list(found)

    def _joined(self, terminals: list[str]) -> str:
        """Return a grammar of all of these terminals in a row: it matches nothing if one of them does."""
        return f"start: ALL-TERMINALS\nALL-TERMINALS: {' '.join(terminals)}\n{self._definitions}"

    def _endless_rule(self, reached: list[str]) -> str:
        """Return a rule of which each alternative needs a rule of the same kind; "" if there is none."""
        needs = {rule: [_needed(each.symbols) for each in alternatives] for rule, alternatives in self._rules.items()}
        ended = with_an_end(needs)
        rule = next((rule for rule in reached if rule in needs and rule not in ended), "")
        seen: set[str] = set()
        while rule and (rule.isdigit() or rule not in seen):  # until the rule that needs itself
            seen.add(rule)
            rule = next(symbol for symbol in needs[rule][0] if symbol in needs and symbol not in ended)
        return rule

    def _dead_end(self) -> str:
        """Return a rule, with a value, without a match that ends, which a match comes to after some text; or "".

        A rule that is the first of its alternative is not such a dead end: the alternative has no text then.
        """
        rules = self._with_values()
        needs = {rule: [_needed(symbols) for symbols in alternatives] for rule, alternatives in rules.items()}
        ended = with_an_end(needs)
        found, waiting = {"start"}, ["start"]
        while waiting:
            rule = waiting.pop()
            for symbols in rules[rule]:
                for place, symbol in enumerate(symbols):
                    has_an_end = symbol.name not in rules or symbol.name in ended
                    if place and not has_an_end and not symbol.is_optional:
                        return _named(symbol.name, rule, needs, ended)
                    if symbol.name in rules and symbol.name not in found:
                        found.add(symbol.name)
                        waiting.append(symbol.name)
                    if not has_an_end and not symbol.is_optional:
                        break  # what follows it is not reached
        return ""

    def _with_values(self) -> dict[str, list[list[_Symbol]]]:
        """Return the rules for each value that a match can give them, such as `rule::5`, the nearest ones first."""
        found: dict[str, list[list[_Symbol]]] = {}
        waiting, num_symbols = deque([("start", "start", 0)]), 0
        while waiting and num_symbols < _MOST_SYMBOLS:
            name, rule, value = waiting.popleft()
            if name in found:
                continue
            alternatives: list[list[_Symbol]] = []
            found[name] = alternatives
            for alternative in self._rules[rule]:
                num_symbols += 1 + len(alternative.symbols)
                if alternative.condition and not parsed(alternative.condition)(value):
                    continue
                symbols = []
                for symbol in alternative.symbols:
                    given, at = 0, symbol.name
                    if symbol.parameter and symbol.name in self._rules:
                        given = parsed(symbol.parameter)(value)
                        at = f"{symbol.name}::{given}"
                    if symbol.name in self._rules:
                        waiting.append((at, symbol.name, given))
                    symbols.append(_Symbol(at, is_optional=symbol.is_optional))
                alternatives.append(symbols)
        return found


def _needed(symbols: Sequence[_Symbol]) -> list[str]:
    return [symbol.name for symbol in symbols if not symbol.is_optional]


def _named(symbol: str, rule: str, needs: Needs, ended: set[str]) -> str:
    """Return the rule that makes a symbol of another rule endless: groups in parentheses have no names."""
    seen: set[str] = set()
    while symbol and symbol not in seen:
        seen.add(symbol)
        rule = rule if symbol[0].isdigit() else symbol
        symbol = next((each for needed in needs[symbol] for each in needed if each in needs and each not in ended), "")
    return rule
