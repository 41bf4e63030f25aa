"""Command-line flags out of the knobs, and settings out of the flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from fastgen.config import KNOBS, ConfigError, EngineConfig, Knob, parse_size

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


def add_knobs(parser: argparse.ArgumentParser, knobs: Iterable[Knob]) -> None:
    """A flag for each knob."""
    for knob in knobs:
        default = "" if knob.default is None else f" (default: {knob.default})"
        if knob.kind == "switch":
            parser.add_argument(
                knob.flag,
                action=argparse.BooleanOptionalAction,
                default=knob.default,
                help=f"{knob.help} (default: {'on' if knob.default else 'off'})".replace("%", "%%"),
            )
            continue
        kinds: dict[str, Callable[[str], Any]] = {"int": _number_or(knob.words), "bytes": _size}
        metavar = {"int": "|".join((*knob.words, knob.unit.upper() or "N")), "bytes": "SIZE", "text": "TEXT"}
        parser.add_argument(
            knob.flag,
            type=kinds.get(knob.kind, str),
            default=knob.default,
            choices=knob.choices or None,
            metavar=metavar.get(knob.kind),
            help=(knob.help + default).replace("%", "%%"),
        )


def given(options: argparse.Namespace, knobs: Iterable[Knob]) -> dict[str, Any]:
    """What the flags of these knobs were set to."""
    return {knob.name: getattr(options, knob.name) for knob in knobs}


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings.

    Raises:
        ConfigError: when they are out of bounds or contradict each other.
    """
    return EngineConfig(model=options.model, **given(options, KNOBS))


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
