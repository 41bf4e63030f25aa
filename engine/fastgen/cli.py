"""The command `fastgen`. What is wrong with what a user asked for is one line on standard error and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from fastgen import logs
from fastgen.config import KNOBS, SERVER_KNOBS, ConfigError, EngineConfig, Knob, ServerConfig, parse_size
from fastgen.core.request import RequestError, SamplingParams
from fastgen.version import VERSION

_MISUSE, _FAILURE = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except (ConfigError, RequestError) as error:
        return _fail(str(error), _MISUSE)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `fastgen generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail too
        return _FAILURE


def _fail(message: str, exit_code: int) -> int:
    print(f"fastgen: error: {message}", file=sys.stderr)
    return exit_code


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage that --help prints."""

    def error(self, message: str) -> NoReturn:
        self.exit(_MISUSE, f"fastgen: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastgen", description="Serve language models with Dynamic SplitFuse.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastgen {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_generate(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP, as OpenAI does", description="Serve a model over HTTP, as OpenAI does.",
        allow_abbrev=False,
    )  # fmt: skip
    _add_model(serve)
    serve.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    serve.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="what requests may call the model; the first is its name in metrics (default: the model's file name)",
    )
    _add_knobs(serve, [*SERVER_KNOBS, *KNOBS])
    serve.set_defaults(command=_serve)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate", help="continue prompts on the terminal", description="Continue prompts on the terminal.",
        allow_abbrev=False,
    )  # fmt: skip
    _add_model(generate)
    generate.add_argument("prompt", nargs="+", metavar="PROMPT", help="what to continue or to answer")
    generate.add_argument("--max-tokens", type=int, default=256, help="most tokens to generate (default: 256)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this sum (default: 1)"
    )
    generate.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all (default: 0)")
    generate.add_argument("--seed", type=int, help="the same seed gives the same text (default: a new one each time)")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    generate.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="answer by the model's chat template; --no-chat continues the text (default: where there is one)",
    )
    generate.add_argument("--raw", dest="chat", action="store_false", help="the same as --no-chat")
    _add_knobs(generate, KNOBS)
    generate.set_defaults(command=_generate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file or a Hugging Face directory")


def _add_knobs(parser: argparse.ArgumentParser, knobs: Iterable[Knob]) -> None:
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


def _given(options: argparse.Namespace, knobs: Iterable[Knob]) -> dict[str, Any]:
    return {knob.name: getattr(options, knob.name) for knob in knobs}


def _serve(options: argparse.Namespace) -> int:
    engine_config = EngineConfig(model=options.model, **_given(options, KNOBS))
    server_config = ServerConfig(
        host=options.host,
        port=options.port,
        served_model_names=tuple(options.served_model_name),
        **_given(options, SERVER_KNOBS),
    )
    logs.configure(server_config.log_format)
    from fastgen.process import EngineStartError
    from fastgen.server.main import run

    try:
        return run(engine_config, server_config)
    except EngineStartError as error:
        return _fail(str(error), error.exit_code)


def _generate(options: argparse.Namespace) -> int:
    config = EngineConfig(model=options.model, **_given(options, KNOBS))
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    from fastgen.model.source import ModelSource
    from fastgen.terminal import generate

    ModelSource.open(config.model)  # what is wrong with it shows before torch is imported
    generate(config, options.prompt, sampling, stop=options.stop, chat=options.chat)
    return 0
