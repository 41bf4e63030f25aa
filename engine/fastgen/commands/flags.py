"""Command-line flags out of the settings, and settings out of the flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from fastgen.config import ENGINE_SETTINGS, ConfigError, EngineConfig, Setting, parse_size

Subcommands = Any  # argparse's own type for them is private


def add_command(
    commands: Subcommands, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A subcommand: `summary` is a sentence without capital and full stop."""
    description = f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, allow_abbrev=False
    )
    parser.set_defaults(command=run)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """The argument MODEL."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file or a Hugging Face directory")


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """A flag for each setting."""
    for setting in settings:
        default = "" if setting.default is None else f" (default: {setting.default})"
        if setting.kind == "switch":
            parser.add_argument(
                setting.flag,
                action=argparse.BooleanOptionalAction,
                default=setting.default,
                help=f"{setting.help} (default: {'on' if setting.default else 'off'})".replace("%", "%%"),
            )
            continue
        kinds: dict[str, Callable[[str], Any]] = {"int": _number_or(setting.words), "bytes": _size}
        metavar = {"int": "|".join((*setting.words, setting.unit.upper() or "N")), "bytes": "SIZE", "text": "TEXT"}
        parser.add_argument(
            setting.flag,
            type=kinds.get(setting.kind, str),
            default=setting.default,
            choices=setting.choices or None,
            metavar=metavar.get(setting.kind),
            help=(setting.help + default).replace("%", "%%"),
        )


def given(options: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """What the flags of these settings were set to."""
    return {setting.name: getattr(options, setting.name) for setting in settings}


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings.

    Raises:
        ConfigError: when they are out of bounds or contradict each other.
    """
    return EngineConfig(model=options.model, **given(options, ENGINE_SETTINGS))


def _number_or(words: tuple[str, ...]) -> Callable[[str], Any]:
    def number(text: str) -> int | str:
        return text if text in words else int(text)

    # What argparse calls it when the text is neither.
    number.__name__ = " or ".join((*words, "int"))
    return number


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
