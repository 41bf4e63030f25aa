"""Parts of a JSON schema that refer to themselves in a way that no value matches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from fastgen.text.grammars.endings import with_an_end, without_a_match
from fastgen.text.grammars.schemas.alternatives import types_of
from fastgen.text.grammars.schemas.errors import SchemaError

# What a value is: only the first two have parts.
_KINDS = ("array", "object", "other")
# The rule of values that match `false`.
_NOTHING = "nothing"
# Schemas of all rules together. Beyond that, parts count as matched by any value: not all endless schemas are found.
_MOST_MEMBERS = 50_000


def check_recursion(document: Any, definitions: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Check a normalized document.

    Args:
        document: the schema of the whole value.
        definitions: the schemas that it refers to, by name.
        places: where each of them is in the document.

    Raises:
        SchemaError: if a definition refers to itself for the same value, so that nothing matches it, or if values
            may have a part that requires a part like itself: a generation that comes to it never ends.
    """
    try:
        TopologicalSorter({name: set(_required(schema)) for name, schema in definitions.items()}).prepare()
    except CycleError:
        raise SchemaError("$ref: a schema refers to itself for the same value, so nothing matches it") from None
    endless = _Values(document, definitions).endless_definition() if definitions else None
    if endless is not None:
        raise SchemaError.at(
            places[endless],
            "each value needs another one of the same schema within it, so none ends; do not require the property, or "
            "let the list be empty",
        )


def _required(schema: Any) -> Iterator[str]:
    """Return the names of the definitions that a value of a schema has to match, too."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield _name(schema["$ref"])
        for part in schema.get("allOf", ()):
            yield from _required(part)


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


class _Values:
    """What the values that a schema can generate need, as rules of a grammar.

    A rule such as `7` stands for the values that match some schemas together, and `7 array` for those of a kind.
    Schemas of the same value are taken together, because one may require the property that another one describes.
    `anyOf` and `oneOf` are alternatives. Where a keyword is not looked at, more values count as possible.
    """

    def __init__(self, document: Any, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._names = {id(schema): name for name, schema in definitions.items()}
        self._needs: dict[str, list[list[str]]] = {
            f"{_NOTHING}{kind}": [] for kind in ("", *(f" {kind}" for kind in _KINDS))
        }
        self._mentions: dict[str, list[str]] = defaultdict(list)  # also what may be left out
        # A member of a rule is a schema, or the list of alternatives of an `anyOf`. A rule has a set of their numbers.
        self._members: list[Any] = []
        self._numbers: dict[int, int] = {}  # of members, by identity
        self._others: dict[int, Any] = {}  # the schema of undeclared properties, by the identity of a schema
        self._rules: dict[frozenset[int], str] = {}
        self._waiting: list[tuple[str, frozenset[int]]] = []
        self._num_members = 0
        self._root = self._value([document])
        while self._waiting:
            rule, members = self._waiting.pop()
            self._needs[rule] = [[f"{rule} {kind}"] for kind in _KINDS]
            for kind in _KINDS:
                self._needs[f"{rule} {kind}"] = self._alternatives(f"{rule} {kind}", members, kind)

    def endless_definition(self) -> str | None:
        """Return the name of a definition that a generation may come to and never end; None if there is none."""
        impossible = without_a_match(self._needs)
        endless = {*self._needs} - with_an_end(self._needs) - impossible
        reached, waiting = {self._root}, [self._root]
        while waiting:
            rule = waiting.pop()
            for each in () if rule in impossible else (*self._mentions[rule], *_joined(self._needs[rule])):
                if each not in reached:
                    reached.add(each)
                    waiting.append(each)
        symbol = next((rule for rule in self._rules.values() if rule in endless & reached), None)
        # Parts are smaller than what they are parts of, so every loop comes to a definition.
        seen: dict[str, None] = {}
        while symbol is not None and symbol not in seen:
            seen[symbol] = None
            symbol = next(each for each in _joined(self._needs[symbol]) if each in endless)
        loop = [*seen][[*seen].index(symbol) :] if symbol is not None else []
        members = {rule: members for members, rule in self._rules.items()}
        found = (number for rule in loop for number in sorted(members.get(rule.partition(" ")[0], ())))
        return next((name for number in found if (name := self._names.get(id(self._members[number])))), None)

    def _value(self, schemas: Iterable[Any], others: frozenset[int] = frozenset()) -> str:
        """Return the rule of the values that match all of these schemas, and other members of rules."""
        found: set[int] = set()
        waiting = [*schemas]
        while waiting:
            schema = waiting.pop()
            if schema is False:
                return _NOTHING
            if schema is True or self._number(schema) in found:
                continue
            found.add(self._number(schema))
            found |= {self._number(schema[keyword]) for keyword in ("anyOf", "oneOf") if keyword in schema}
            waiting += schema.get("allOf", ())
            if "$ref" in schema:
                waiting.append(self._definitions[_name(schema["$ref"])])
        self._num_members += len(found) + len(others)
        members = others | found if self._num_members < _MOST_MEMBERS else frozenset()
        if members not in self._rules:
            self._rules[members] = str(len(self._rules))
            self._waiting.append((self._rules[members], members))
        return self._rules[members]

    def _number(self, member: Any) -> int:
        number = self._numbers.setdefault(id(member), len(self._members))
        if number == len(self._members):
            self._members.append(member)
        return number

    def _alternatives(self, rule: str, members: frozenset[int], kind: str) -> list[list[str]]:
        """Return what values of a kind need in each alternative; what they may have is added to the mentions."""
        numbers = sorted(members)
        schemas = [self._members[number] for number in numbers if isinstance(self._members[number], Mapping)]
        if any(kind not in {name if name in _KINDS else "other" for name in types_of(schema)} for schema in schemas):
            return []
        options = next((number for number in numbers if isinstance(self._members[number], list)), None)
        if options is not None:
            chosen = [self._value([each], members - {options}) for each in self._members[options]]
            self._mentions[rule] += chosen
            return [[f"{each} {kind}"] for each in chosen]
        if kind == "other" or any({"const", "enum"} & {*schema} for schema in schemas):
            return [[]]
        return self._items(rule, schemas) if kind == "array" else self._properties(rule, schemas)

    def _items(self, rule: str, schemas: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        least = max((schema.get("minItems", 0) for schema in schemas), default=0)
        most = min((schema["maxItems"] for schema in schemas if "maxItems" in schema), default=least + 1_000_000)
        if least > most:
            return []
        length = max((len(schema.get("prefixItems", ())) for schema in schemas), default=0)
        # The last of these stands for all further ones.
        items = [self._value(_item(schema, place) for schema in schemas) for place in range(min(most, length + 1))]
        self._mentions[rule] += items
        return [items[:least]]

    def _properties(self, rule: str, schemas: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        required = dict.fromkeys(name for schema in schemas for name in schema.get("required", ()))
        most = min((schema["maxProperties"] for schema in schemas if "maxProperties" in schema), default=None)
        if most is not None and len(required) > most:
            return []
        names = required | dict.fromkeys(name for schema in schemas for name in schema.get("properties", {}))
        rules = {name: self._value(self._property(schema, name) for schema in schemas) for name in names}
        needed = [rules[name] for name in required]
        if most == len(required):
            return [needed]
        undeclared = self._value(self._property(schema, None) for schema in schemas)
        optional = [*(found for name, found in rules.items() if name not in required), undeclared]
        self._mentions[rule] += optional
        least = max((schema.get("minProperties", 0) for schema in schemas), default=0)
        return [[*needed, one] for one in optional] if least > len(required) else [needed]

    def _property(self, schema: Mapping[str, Any], name: str | None) -> Any:
        """Return the schema of a property. One that is not declared may match any pattern, or none."""
        declared = schema.get("properties", {})
        if name in declared:
            return declared[name]
        if id(schema) not in self._others:
            others = schema.get("additionalProperties", True)
            patterns = schema.get("patternProperties", {})
            self._others[id(schema)] = {"anyOf": [*patterns.values(), others]} if patterns else others
        return self._others[id(schema)]


def _joined(alternatives: Iterable[Sequence[str]]) -> list[str]:
    return [symbol for needed in alternatives for symbol in needed]


def _item(schema: Mapping[str, Any], place: int) -> Any:
    first = schema.get("prefixItems", ())
    return first[place] if place < len(first) else schema.get("items", True)
