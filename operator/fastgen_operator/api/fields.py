"""Field types, CEL rules and engine settings shared by the API models."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from fastgen.settings import ENGINE_SETTINGS, SERVER_SETTINGS, Setting

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
FREE_FORM: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
FreeForm = Annotated[dict[str, Any], WithJsonSchema(FREE_FORM)]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]
# Name of an object, such as a Secret or a StorageClass.
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
# Key and value of a label, as apimachinery validates them (pkg/util/validation).
LabelKey = Annotated[
    str,
    Field(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
        r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    ),
]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]

# The name of an operator class is part of its Lease's name.
CLASS_LIMIT = 63
CLASS_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
OperatorClass = Annotated[str, Field(min_length=1, max_length=CLASS_LIMIT, pattern=CLASS_PATTERN)]


class ApiModel(BaseModel):
    """Base of the API models: snake_case in Python, camelCase in YAML, immutable.

    The docstring under a field is its description in the CRD. Without one, the docstring of its type is.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, use_attribute_docstrings=True
    )


def engine_setting(name: str) -> Setting:
    """Return the engine setting `name`."""
    return next(setting for setting in ENGINE_SETTINGS + SERVER_SETTINGS if setting.name == name)


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return a schema extension with (CEL rule, message) pairs; messages name the field and the remedy."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def rule(condition: str, message: str) -> dict[str, Any]:
    """Return a schema extension with one CEL rule."""
    return rules((condition, message))


def model_rules(*pairs: tuple[str, str]) -> ConfigDict:
    """Return the configuration of a model with `rules`."""
    return ConfigDict(json_schema_extra=rules(*pairs))


def model_rule(condition: str, message: str) -> ConfigDict:
    """Return the configuration of a model with one CEL rule."""
    return model_rules((condition, message))


_OF_SETTING: Final = object()


def crd_field(
    name: str,
    *,
    required: bool = False,
    json_schema_extra: dict[str, Any] | None = None,
    default: Any = _OF_SETTING,
    more: str = "",
) -> Any:
    """Return a field with the default, bounds and help text of the engine setting `name`.

    Args:
        required: give the field no default.
        default: another default than that of the setting.
        more: added to the setting's help text.
    """
    found = engine_setting(name)
    if default is _OF_SETTING:
        default = ... if required else found.default
    return Field(
        default,
        ge=found.minimum,
        le=found.maximum,
        description=f"{found.help} {more}".strip(),
        json_schema_extra=json_schema_extra,
    )


def number_or_word(name: str, path: str, more: str = "") -> Any:
    """Return a field for an integer within the bounds of the setting `name`, or one of its keywords.

    Args:
        path: path of the field, for the error message.
        more: added to the setting's help text.
    """
    found = engine_setting(name)
    words = " or ".join(found.words)
    allowed = f"an integer from {found.minimum} to {found.maximum}"
    in_words = ", ".join(f"'{word}'" for word in found.words)
    bounds = (
        f"type(self) == int ? (self >= {found.minimum} && self <= {found.maximum}) : self in [{in_words}]",
        f"{path} must be {words}, or {allowed}",
    )
    return Field(
        found.default,
        description=f"{found.help} {more}".strip(),
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            # Applies to strings only. Its error message contains the value; a CEL rule's on such a field does not.
            "pattern": f"^({'|'.join(found.words)})$",
            **rules(bounds),
        },
    )
