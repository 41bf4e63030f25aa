"""What the fields of the models are made of: types that the CRD knows, CEL rules, and the engine's own settings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from fastgen.config import ENGINE_SETTINGS, SERVER_SETTINGS, Setting

QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE])?$"

Quantity = Annotated[
    int | str,
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
        }
    ),
]
FreeForm = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]
# The name of a Secret, a claim or a class.
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class ApiModel(BaseModel):
    """A part of the resource: snake_case here, camelCase in YAML, never changed."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)


def engine_setting(name: str) -> Setting:
    """The engine's setting of that name."""
    return next(setting for setting in ENGINE_SETTINGS + SERVER_SETTINGS if setting.name == name)


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules, each with the message that names the field and the remedy."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def setting_field(name: str, *, required: bool = False) -> Any:
    """A field with the engine's own default, bounds and help for the setting `name`."""
    found = engine_setting(name)
    default = ... if required else found.default
    return Field(default, ge=found.minimum, le=found.maximum, description=found.help)


def number_or_word(name: str, path: str) -> Any:
    """A whole number within the setting's bounds, or one of its words."""
    found = engine_setting(name)
    words = " or ".join(found.words)
    allowed = f"a whole number from {found.minimum} to {found.maximum}"
    in_words = ", ".join(f"'{word}'" for word in found.words)
    rule = (
        f"type(self) == int ? (self >= {found.minimum} && self <= {found.maximum}) : self in [{in_words}]",
        f"{path} must be {words}, or {allowed}",
    )
    return Field(
        found.default,
        description=found.help,
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            **rules(rule),
        },
    )
