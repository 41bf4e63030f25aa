"""Command-line flags from settings, and settings from parsed flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastgen.settings import ENGINE_SETTINGS, ConfigError, EngineConfig, Setting, parse_size
from fastgen.terminal import progress_bar

if TYPE_CHECKING:
    from fastgen.llm.llm import LLM

Subcommands = Any  # argparse's own type for them is private


def add_command(
    commands: Subcommands, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add a subcommand; `summary` is a sentence without capital and full stop."""
    description = f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, allow_abbrev=False
    )
    parser.set_defaults(command=run)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL."""
    parser.add_argument(
        "model", metavar="MODEL", help="a GGUF file, a Hugging Face directory, or a hub name such as org/name@revision"
    )


def add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting], default_from: str | None = None) -> None:
    """Add a flag for each setting.

    With `default_from`, which names where the defaults come from, settings that no flag sets are None.
    """
    for setting in settings:
        value = None if default_from else setting.default
        shown = default_from or setting.default
        if setting.kind == "switch":
            shown = default_from or ("on" if setting.default else "off")
            parser.add_argument(
                setting.flag,
                action=argparse.BooleanOptionalAction,
                default=value,
                help=f"{setting.help} (default: {shown})".replace("%", "%%"),
            )
            continue
        default = "" if shown is None else f" (default: {shown})"
        kinds: dict[str, Callable[[str], Any]] = {"int": _number_or(setting.words), "bytes": _size}
        number = setting.unit.upper() or "N"
        metavar = {
            "int": "|".join((*setting.words, number)),
            "ints": "|".join((*setting.words, f"{number},…")),
            "bytes": "SIZE",
            "text": "TEXT",
            "path": "PATH",
        }
        parser.add_argument(
            setting.flag,
            type=kinds.get(setting.kind, str),
            default=value,
            choices=setting.choices or None,
            metavar=metavar.get(setting.kind),
            help=(setting.help + default).replace("%", "%%"),
        )


def given(options: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """Return the parsed values of these settings."""
    return {setting.name: getattr(options, setting.name) for setting in settings}


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine's configuration.

    Raises:
        ConfigError: a value is not allowed, or two contradict each other.
    """
    return EngineConfig(model=options.model, **given(options, ENGINE_SETTINGS))


def load_model(config: EngineConfig) -> LLM:
    """Load the model into this process, with a progress bar that starts before torch is imported.

    Raises:
        ConfigError: the model cannot be served.
    """
    from fastgen.model.source import ModelSource

    source = ModelSource.open(config.model)  # errors show before torch is imported
    settings = {name: value for name, value in asdict(config).items() if name != "model"}
    with progress_bar() as on_loading:
        from fastgen.llm.llm import LLM

        # Commands have their own sampling parameters.
        return LLM(source, generation_config="none", on_loading=on_loading, **settings)


def _number_or(words: tuple[str, ...]) -> Callable[[str], Any]:
    def number(text: str) -> int | str:
        return text if text in words else int(text)

    # argparse names the type by this in its error message.
    number.__name__ = " or ".join((*words, "int"))
    return number


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
