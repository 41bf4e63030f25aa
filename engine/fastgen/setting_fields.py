"""Definition and validation of settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, Literal

Kind = Literal["int", "ints", "bytes", "choice", "switch", "text", "path"]

_PART = 800  # characters at each end of an error message that are always shown


class ConfigError(ValueError):
    """An invalid setting or model. The message is one line that names the setting or file and the remedy.

    Commands print it and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """Return an error message as one line of bounded length.

    It may quote a file or a server, so characters that are not printable are escaped, and the middle of a message of
    more than 1600 characters is left out.
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    return line if len(line) <= 2 * _PART else f"{line[:_PART]} … {line[-_PART:]}"


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded: arguments and JSON may have half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: a dataclass field, a command-line flag and, for some, a CRD field.

    Attributes:
        name: field name of the config dataclass.
        kind: "int", "ints" (a text such as "16,32"), "bytes", "choice", "switch" (on or off), "text" or "path".
        default: None if there is none, or if it is derived at start; `help` then says how.
        minimum, maximum: inclusive bounds of an int, a size or each number of ints; None for no bound.
        choices: allowed values of a choice.
        words: values that are accepted besides numbers, for example "auto".
        unit: unit of an int or a size, or "".
        help: description shown to users.
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

    def checked(self, value: Any) -> Any:
        """Return a value as the type of the setting: an integer, a boolean or a text.

        Accepts what Python programs hold instead: paths, whole floats such as 2e9, 0 and 1 for switches, lists of
        numbers, members of enumerations, numbers of numpy and torch, and torch's types and devices.

        Raises:
            ConfigError: if the value is not allowed.
        """
        if value is None and self.default is None:
            return None
        value = self._plain(value)
        if isinstance(value, str) and value in self.words:
            return value
        words = "".join(f"{word} or " for word in self.words)
        match self.kind:
            case "choice":
                if not isinstance(value, str) or value not in self.choices:
                    raise ConfigError(f"{self.flag} {value}: choose one of {', '.join(self.choices)}")
            case "ints":
                try:
                    numbers = parse_ints(value)
                except (ValueError, AttributeError):
                    raise ConfigError(
                        f"{self.flag} {value}: must be {words}whole numbers with commas between them, for example 16,32"
                    ) from None
                for number in numbers:
                    self._check_bounds(number)
            case "int" | "bytes":
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ConfigError(f"{self.flag} {value}: must be {words}a whole number")
                self._check_bounds(value)
            case "switch":
                if not isinstance(value, bool):
                    raise ConfigError(f"{self.flag} {value}: must be true or false")
            case _:
                if not isinstance(value, str):
                    raise ConfigError(f"{self.flag} {value}: must be a {self.kind}")
        return value

    def _plain(self, value: Any) -> Any:
        """Return a value as a type of Python itself that this kind of setting has, if it stands for one."""
        value = plain(value)
        if isinstance(value, float) and value.is_integer() and self.kind in ("int", "bytes"):
            return int(value)
        if isinstance(value, int) and value in (0, 1) and self.kind == "switch":
            return bool(value)
        if self.kind == "ints" and isinstance(value, list | tuple):
            return ",".join(str(plain(each)) for each in value)
        if self.kind == "path" and isinstance(value, os.PathLike):
            return os.fsdecode(value)
        return value

    def _check_bounds(self, number: int) -> None:
        if self.minimum is not None and number < self.minimum:
            raise ConfigError(f"{self.flag} {number}: must be at least {self.minimum}")
        if self.maximum is not None and number > self.maximum:
            raise ConfigError(f"{self.flag} {number}: must be at most {self.maximum}")


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
    """Return a dataclass field that holds a setting; the arguments are attributes of `Setting`."""
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


def plain(value: Any) -> Any:
    """Return what a member of an enumeration, or an object of numpy or torch, stands for; other values as they are."""
    if isinstance(value, Enum):
        value = value.value
    if type(value).__module__ in ("numpy", "torch"):
        if getattr(value, "ndim", None) == 0:
            return value.item()
        if type(value).__name__ in ("dtype", "device"):
            return str(value).removeprefix("torch.")
    return value


def check_settings(config: Any, settings: Iterable[Setting]) -> None:
    """Replace the settings of a new config dataclass by their checked values.

    Raises:
        ConfigError: if a value is not allowed.
    """
    for setting in settings:
        object.__setattr__(config, setting.name, setting.checked(getattr(config, setting.name)))


def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return the settings of a config dataclass, in field order."""
    return tuple(
        Setting(name=f.name, default=None if f.default is MISSING else f.default, **f.metadata)
        for f in fields(cls)
        if f.metadata
    )


def parse_ints(text: str) -> tuple[int, ...]:
    """Return the distinct numbers of a text such as `16,32`, ascending.

    Raises:
        ValueError: if it is not a list of numbers.
    """
    return tuple(sorted({int(number) for number in text.split(",")}))


_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `2GiB`, `512Mi`, `2G` (powers of 1000) or `1073741824`.

    Raises:
        ConfigError: if it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"size {text!r}: write a whole number with a unit, for example 2GiB or 512MiB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    power = " kmgt".index(unit.lower()) if unit else 0
    return int(number) * int(base**power)


def parsed_settings(values: Mapping[str, Any], settings: Iterable[Setting]) -> dict[str, Any]:
    """Return keyword settings with sizes such as "2GiB" converted to bytes.

    Raises:
        ConfigError: if a name is unknown or a size is malformed. The message names the setting.
    """
    kinds = {setting.name: setting.kind for setting in settings}
    for name in values:
        if name not in kinds:
            raise ConfigError(f"{name}: no such setting; choose from {', '.join(kinds)}")
    return {
        name: _named_size(name, value) if kinds[name] == "bytes" and isinstance(value, str) else value
        for name, value in values.items()
    }


def _named_size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
