"""What a setting is: its type, default, bounds, unit and help, and the check of a value against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["int", "bytes", "choice", "switch", "text"]


class ConfigError(ValueError):
    """A setting that cannot be served. The message is one line: it names the field and the remedy.

    Programs print it and exit with code 2.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the outside sees it.

    Attributes:
        name: the attribute of `EngineConfig`; the flag is `--` + name with dashes.
        kind: "int", "bytes", "choice", "switch" (on or off) or "text".
        default: the value where the user says nothing; None means "worked out at start", as `help` says.
        minimum, maximum: inclusive bounds of an int, or None.
        choices: the allowed values of a choice.
        words: what an int may be said to be instead of a number, for example "auto".
        unit: of an int or a size, or "".
        help: one sentence for people.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    unit: str = ""

    @property
    def flag(self) -> str:
        """The command-line spelling, for example `--token-budget`."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raises ConfigError if `value` is outside the setting's bounds."""
        if (value is None and self.default is None) or value in self.words:
            return
        if self.kind == "choice" and value not in self.choices:
            raise ConfigError(f"{self.flag} {value}: choose one of {', '.join(self.choices)}")
        if self.kind in ("int", "bytes"):
            if isinstance(value, str):
                words = "".join(f"{word} or " for word in self.words)
                raise ConfigError(f"{self.flag} {value}: must be {words}a whole number")
            if self.minimum is not None and value < self.minimum:
                raise ConfigError(f"{self.flag} {value}: must be at least {self.minimum}")
            if self.maximum is not None and value > self.maximum:
                raise ConfigError(f"{self.flag} {value}: must be at most {self.maximum}")


def setting_field(
    default: Any,
    help: str,
    *,
    kind: Kind = "int",
    minimum: int | None = None,
    maximum: int | None = None,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    unit: str = "",
) -> Any:
    """A dataclass field that is a setting: see `Setting` for what is said of it."""
    metadata = {
        "kind": kind,
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "words": words,
        "unit": unit,
    }
    return field(default=default, metadata=metadata)


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings among the fields of a dataclass, in order."""
    return tuple(
        Setting(name=f.name, default=None if f.default is MISSING else f.default, **f.metadata)
        for f in fields(cls)
        if f.metadata
    )


_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as `2GiB`, `512Mi`, `2G` (powers of 1000) or `1073741824`.

    Raises:
        ConfigError: when it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"size {text!r}: write a whole number with a unit, for example 2GiB or 512MiB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    power = " kmgt".index(unit.lower()) if unit else 0
    return int(number) * int(base**power)


def parsed_settings(values: Mapping[str, Any], settings: Iterable[Setting]) -> dict[str, Any]:
    """Settings by name as a program gives them: sizes may be texts.

    Raises:
        ConfigError: when a name is none of the settings' or a size is none.
    """
    kinds = {setting.name: setting.kind for setting in settings}
    for name in values:
        if name not in kinds:
            raise ConfigError(f"{name}: no such setting; there are {', '.join(kinds)}")
    return {
        name: parse_size(value) if kinds[name] == "bytes" and isinstance(value, str) else value
        for name, value in values.items()
    }
