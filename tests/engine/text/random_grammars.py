"""Random grammars of every kind that requests may have: sensible ones, odd ones and malicious ones."""

from __future__ import annotations

import json
import random
from typing import Any

from fastgen.core.sampling_params import Grammar

_NUMBERS: list[Any] = [
    *range(-3, 6),
    *(sign * (1 << power) + more for sign in (-1, 1) for power in (31, 53, 63, 64) for more in (-1, 0, 1)),
    *(0.1, 0.5, -0.5, 1e-9, 2.5, 1e15, 1e16, 1e300, -1e300, 10**18, -(10**18), 10**19, 99999, 123456789),
]
_SIZES: list[Any] = [0, 0, 1, 1, 2, 3, 5, 50, 300, 10**4, 10**7, 1 << 64, 2.0, -1, "1"]
_NAMES = ["a", "b", "ab", "kind", "id", "", "é", "😀", 'q"', "\\", "a b", "$ref", "x\n", "\ud800", "p" * 300]
_PATTERNS = [
    *(
        "^a",
        "b$",
        "^a$",
        "^(a|b)$",
        "^[ab]$",
        "^.*$",
        "",
        "^$",
        "a^b",
        "x|y",
        "^(?:ab)+$",
        "[^a]",
        ".",
        "\\d{3}",
        "^\\w+$",
    ),
    *("(?=a)b", "(?<!a)b", "\\bfoo", "(a)\\1", "[", "(", "a{1,3}", "a{3,1}", "a{1000,}", "(a{1,100}){1,100}", "(a*)*b"),
    *(
        "^[a-z]{1,20}@[a-z]+\\.com$",
        "\\p{L}+",
        "\\u0041",
        "^\\s*$",
        "(?i)abc",
        "\\Aab\\z",
        "[[:alpha:]]",
        "(.*a.{12}){2}",
    ),
]
_FORMATS = [
    "date",
    "date-time",
    "time",
    "uuid",
    "email",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "duration",
    "password",
    "x",
    "",
]
_TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
_SAID = ["description", "title", "default", "deprecated", "examples", "x-note", "nullable", "$comment", "readOnly"]


class RandomGrammars:
    """Random grammars; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def grammar(self) -> Grammar:
        """Return a grammar of any kind."""
        kind = self._random.choice(["json_schema"] * 3 + ["regex", "lark"])
        if kind == "json_schema":
            return Grammar(kind="json_schema", text=json.dumps(self.schema()))
        if kind == "regex":
            return Grammar(kind="regex", text=self.regex(self._random.randint(1, 5)))
        return Grammar(kind="lark", text=self.lark())

    def schema(self) -> Any:
        """Return a JSON schema with definitions that it may refer to."""
        self._num_definitions = self._random.choice([0, 0, 1, 3])
        root = self._schema(self._random.randint(1, 4))
        if isinstance(root, dict) and self._num_definitions:
            root["$defs"] = {f"d{number}": self._schema(2) for number in range(self._num_definitions)}
        return root

    def _schema(self, depth: int) -> Any:
        choice = self._random.random()
        if choice < 0.06 or depth <= 0:
            return self._random.choice([True, False, {}, {"type": "string"}, {"type": "integer"}, {"const": "x"}])
        if choice < 0.14 and self._num_definitions:
            beside = {} if self._random.random() < 0.7 else self._limits("integer")
            return {"$ref": f"#/$defs/d{self._random.randrange(self._num_definitions + (choice < 0.062))}", **beside}
        if choice < 0.28:
            return self._combined(depth)
        if choice < 0.34:
            return {
                self._random.choice(["const", "enum"]): self._random.choice(
                    [self._value(2), [self._value(1), self._value(2)]]
                )
            }
        types = self._random.choices(_TYPES, k=self._random.choice([1, 1, 1, 1, 2, 3]))
        found: dict[str, Any] = {} if choice > 0.95 else {"type": types[0] if len(types) == 1 else types}
        for name in types:
            found |= self._limits(name) | (self._parts(name, depth) if name in ("array", "object") else {})
        if self._random.random() < 0.15:
            found[self._random.choice(_SAID)] = self._value(1)
        if self._random.random() < 0.03:
            found[self._random.choice(["not", "if", "contains", "propertyNames", "items"])] = self._schema(1)
        if self._random.random() < 0.03:
            found[self._random.choice([*found, "type", "enum", "required", "pattern"])] = self._value(2)
        return found

    def _combined(self, depth: int) -> dict[str, Any]:
        keyword = self._random.choice(["anyOf", "anyOf", "oneOf", "oneOf", "allOf"])
        if keyword == "oneOf" and self._random.random() < 0.6:
            return {"oneOf": [self._tagged(tag, depth) for tag in self._random.sample(["a", "b", "c"], 2)]}
        found = {keyword: [self._schema(depth - 1) for _ in range(self._random.randint(1, 3))]}
        return found | (self._limits(self._random.choice(_TYPES)) if self._random.random() < 0.3 else {})

    def _tagged(self, tag: str, depth: int) -> dict[str, Any]:
        kind = {"const": tag} if self._random.random() < 0.7 else {"enum": [tag, f"{tag}2"]}
        properties = {"kind": kind, "value": self._schema(depth - 2)}
        return {"type": "object", "properties": properties} | (
            {"required": ["kind"]} if self._random.random() < 0.7 else {}
        )

    def _limits(self, type_name: str) -> dict[str, Any]:
        pick, found = self._random.random, {}
        if type_name in ("integer", "number"):
            names = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
            found = {name: self._random.choice(_NUMBERS) for name in names if pick() < 0.2}
            for name in ("minimum", "maximum"):
                if name in found and pick() < 0.5:
                    found[name] = self._random.randint(-200, 200)
                if pick() < 0.02:  # of draft 4
                    found[f"exclusive{name.title()}"] = pick() < 0.8
        elif type_name == "string":
            found = {"minLength": self._random.choice(_SIZES)} if pick() < 0.15 else {}
            found |= {"maxLength": self._random.choice(_SIZES)} if pick() < 0.2 else {}
            found |= {"pattern": self._random.choice(_PATTERNS)} if pick() < 0.2 else {}
            found |= {"format": self._random.choice(_FORMATS)} if pick() < 0.15 else {}
        elif type_name in ("array", "object"):
            noun = "Items" if type_name == "array" else "Properties"
            found = {f"{side}{noun}": self._random.choice(_SIZES) for side in ("min", "max") if pick() < 0.12}
        return found

    def _parts(self, type_name: str, depth: int) -> dict[str, Any]:
        pick = self._random.random
        found: dict[str, Any] = {}
        if type_name == "array":
            found |= {"items": self._schema(depth - 1)} if pick() < 0.8 else {}
            found |= {"prefixItems": [self._schema(depth - 1)] * self._random.randint(0, 2)} if pick() < 0.15 else {}
            return found | ({"uniqueItems": pick() < 0.3} if pick() < 0.1 else {})
        names = self._random.sample(_NAMES, self._random.randint(0, 4))
        found["properties"] = {name: self._schema(depth - 1) for name in names}
        if pick() < 0.02:
            found["properties"] |= {
                f"p{number}": {"type": "integer"} for number in range(self._random.choice([30, 600, 1500]))
            }
        if pick() < 0.6:
            found["required"] = [name for name in names if pick() < 0.5] + (["b"] if pick() < 0.1 else [])
        if pick() < 0.5:
            found["additionalProperties"] = False if pick() < 0.7 else self._schema(depth - 1)
        if pick() < 0.15:
            patterns = self._random.sample(
                [pattern for pattern in _PATTERNS[:12] if pattern], self._random.randint(1, 2)
            )
            found["patternProperties"] = {pattern: self._schema(depth - 1) for pattern in patterns}
        return found

    def _value(self, depth: int) -> Any:
        choice = self._random.random()
        if depth and choice < 0.2:
            return [self._value(depth - 1) for _ in range(self._random.randint(0, 3))]
        if depth and choice < 0.4:
            return {name: self._value(depth - 1) for name in self._random.sample(_NAMES, self._random.randint(0, 3))}
        return self._random.choice([*_NUMBERS, *_NAMES, True, False, None])

    def regex(self, depth: int) -> str:
        """Return a regular expression, which may be invalid."""
        pick = self._random.choice
        if depth <= 0 or self._random.random() < 0.2:
            atoms = [
                "a",
                "b",
                "[a-z]",
                "[^x]",
                ".",
                "\\d",
                "\\w",
                "(?s:.)",
                "é",
                "\\n",
                "\\.",
                "[\\s\\S]",
                "",
                "\\p{Lu}",
                "^",
                "$",
            ]
            return pick([*atoms, *_PATTERNS]) if self._random.random() < 0.3 else pick(atoms[:7])
        inner = self.regex(depth - 1)
        match self._random.randrange(5):
            case 0:
                return f"({inner}|{self.regex(depth - 1)})"
            case 1:
                return f"{inner}{self.regex(depth - 1)}"
            case 2:
                return f"({inner}){pick(['*', '+', '?', '{2}', '{1,40}', '{0,2000}', '{3,}', '{100000}', '*?'])}"
            case 3:
                return f"(?:{inner})"
        return inner + pick(["", "\\", "(", "]", "{", "(?i)", "(?=x)", "\\b"]) * (self._random.random() < 0.1)

    def lark(self) -> str:
        """Return a grammar in Lark syntax, which may be invalid, ambiguous, or without an end."""
        chain = self._random.random()
        if chain < 0.05:
            length = self._random.choice([50, 500, 1500, 3000])
            return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(length)) + f'r{length}: "a"\n'
        names = [f"r{number}" for number in range(self._random.randint(1, 6))]
        terminals = [f"T{number}" for number in range(self._random.randint(0, 3))]
        rules = [f"{name}: {self._body([*names, *terminals], 3)}\n" for name in ["start", *names]]
        rules += [f"{name}: {self._terminal()}\n" for name in terminals]
        return "".join(rules)

    def _terminal(self) -> str:
        parts = [f"/{self.regex(3).replace('/', '')}/" for _ in range(self._random.choice([1, 1, 1, 2]))]
        return self._random.choice([" ", " | ", " & ", " & ~"]).join(parts)

    def _body(self, names: list[str], depth: int) -> str:
        pick = self._random.choice
        if depth <= 0 or self._random.random() < 0.3:
            literal = pick(['"a"', '"b"', '"é"', '""', '" "', '"{"', f"/{self.regex(2).replace('/', '')}/"])
            schema = json.dumps(pick([{"type": "integer"}, {"const": "x"}, {"type": "object"}, False]))
            return pick(
                [
                    literal,
                    literal,
                    pick(names),
                    pick(names),
                    "missing" if self._random.random() < 0.02 else f"%json {schema}",
                ]
            )
        inner = self._body(names, depth - 1)
        return pick(
            [
                f"{inner} {self._body(names, depth - 1)}",
                f"({inner} | {self._body(names, depth - 1)})",
                f"({inner}){pick(['*', '+', '?', '{2}', '{1,5}', '{0,300}', '{5000}'])}",
                inner,
            ]
        )
