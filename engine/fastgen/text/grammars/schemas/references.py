"""References within a schema: `$ref` to any place in it, to an anchor, or to its own `$id`."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from fastgen.text.grammars.schemas.errors import SchemaError, within


def check_base(schema: dict[str, Any], place: str) -> None:
    """Check a schema within a document.

    Raises:
        SchemaError: if it has an id of its own and references that begin with `#`, which are relative to that id.
    """
    for name in ("$id", "id"):
        if (
            isinstance(schema.get(name), str)
            and not schema[name].startswith("#")
            and '"$ref": "#' in json.dumps(schema)
        ):
            raise SchemaError.at(
                within(place, name), "references below an id of its own are not supported; leave the id out"
            )


class References:
    """Finds what the references of one document refer to."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._anchors: dict[str, Any] | None = None

    def target(self, reference: object, place: str) -> Any:
        """Return the schema that a `$ref` refers to.

        Raises:
            SchemaError: if it refers outside this document, or to nothing in it.
        """
        if not isinstance(reference, str):
            raise SchemaError.at(place, "must be a string")
        base, _, fragment = reference.partition("#")
        own = self._document.get("$id", self._document.get("id")) if isinstance(self._document, dict) else None
        if base and base != own:
            fault = "refers outside this schema, which is not supported; copy the definition into $defs"
            raise SchemaError.at(place, f"{reference[:100]!r} {fault}")
        if not fragment or fragment.startswith("/"):
            return self._pointed(unquote(fragment), reference, place)
        if self._anchors is None:
            self._anchors = _anchors(self._document)
        if fragment not in self._anchors:
            raise SchemaError.at(place, f"{reference[:100]!r} is not an anchor in the schema")
        return self._anchors[fragment]

    def _pointed(self, pointer: str, reference: str, place: str) -> Any:
        found = self._document
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise SchemaError.at(place, f"{reference[:100]!r} refers to nothing in the schema")
        return found


def _anchors(document: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    waiting = [document]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$anchor"), str):
                found[part["$anchor"]] = part
            for name in ("$id", "id"):  # drafts 6 and 7, and 4
                if isinstance(part.get(name), str) and part[name].startswith("#"):
                    found[part[name][1:]] = part
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return found
