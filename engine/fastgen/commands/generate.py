"""`fastgen generate`: generate text in this process, streamed or as a batch of JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fastgen.commands.flags import Subcommands, add_command, add_model, add_settings, engine_config, load_model
from fastgen.core.sampling_params import SamplingParams
from fastgen.settings import ENGINE_SETTINGS, ConfigError

if TYPE_CHECKING:
    from fastgen.llm.llm import LLM, Prompt


def add(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(commands, "generate", "generate text for prompts from the command line or a file", run)
    add_model(parser)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to answer or to continue")
    parser.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="file with one prompt per line: plain text, or JSON objects with the field prompt (FILE.jsonl)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write one JSON object per prompt to this file; prompts run as a batch, with a progress bar",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum tokens to generate (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the most likely tokens up to this mass (default: 1)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: all (default: 0)"
    )
    parser.add_argument("--seed", type=int, help="the same seed gives the same text (default: random)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the model's chat template; --no-chat continues the text (default: if the model has one)",
    )
    parser.add_argument("--raw", dest="chat", action="store_false", help="alias of --no-chat")
    add_settings(parser, ENGINE_SETTINGS)


def run(options: argparse.Namespace) -> int:
    """Generate text for each prompt; a batch, as JSON lines, with --prompts-file or --output.

    Raises:
        ConfigError: if an argument, a file or the model cannot be used.
        RequestError: if a sampling parameter or a stop string is invalid, or the model cannot serve a prompt.
    """
    config = engine_config(options)
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    texts = [*options.prompt, *(_read(options.prompts_file) if options.prompts_file else ())]
    if not texts:
        raise ConfigError("PROMPT: give at least one prompt, or a --prompts-file that contains one")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {options.output}: its directory does not exist: create it first")
    model = load_model(config)
    uses_template = model.tokenizer.chat_template is not None if options.chat is None else options.chat
    prompts = [model.chat_prompt([{"role": "user", "content": text}]) if uses_template else text for text in texts]
    if options.output is None and not options.prompts_file:
        _stream(model, prompts, sampling, options.stop)
        return 0
    if options.output is None:
        _write(sys.stdout, model, texts, prompts, sampling, options.stop)
    else:
        with options.output.open("w", encoding="utf-8") as file:
            _write(file, model, texts, prompts, sampling, options.stop)
    return 0


def _stream(model: LLM, prompts: Sequence[Prompt], sampling: SamplingParams, stop: Sequence[str]) -> None:
    """Write one answer after another, streamed."""
    for prompt in prompts:
        for delta in model.stream(prompt, sampling, stop=stop):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _write(
    file: TextIO,
    model: LLM,
    texts: Sequence[str],
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    stop: Sequence[str],
) -> None:
    """Run all prompts as a batch; write one JSON object per line, in order."""
    for text, done in zip(texts, model.generate(prompts, sampling, stop=stop), strict=True):
        answer = {
            "prompt": text,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.usage.prompt_tokens,
            "completion_tokens": done.usage.completion_tokens,
        }
        file.write(json.dumps(answer, ensure_ascii=False) + "\n")


def _read(path: Path) -> Iterator[str]:
    """Yield the prompts of a file, without empty lines.

    Raises:
        ConfigError: the file or a line cannot be read; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts-file {path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _prompt_of(line, f"--prompts-file {path}, line {number}") if path.suffix == ".jsonl" else line


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not valid JSON ({error})") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'{place}: write a JSON string, or an object like {{"prompt": "..."}}')
    return prompt
