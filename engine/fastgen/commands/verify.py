"""`fastgen verify`: compute the answers of a receipt again, and say whether they are equal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.commands.flags import Subcommands, add_command, add_settings, given, load_model
from fastgen.receipt import Receipt, ReceiptNumbers, parse_receipt, printable
from fastgen.settings import ENGINE_SETTINGS, ConfigError, EngineConfig

if TYPE_CHECKING:
    from fastgen.llm.llm import LLM
    from fastgen.llm.verification import Difference

_EQUAL, _DIFFERS, _OTHER_FILES = 0, 1, 3
# Larger than any response: a bound on the memory that a hostile file takes.
_MOST_BYTES = 64 << 20
# Settings that the receipt has, unless a flag sets them.
_FROM_RECEIPT = tuple(
    setting for setting in ENGINE_SETTINGS if setting.name in set(ReceiptNumbers.__struct_fields__) - {"arithmetic"}
)


def add(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(commands, "verify", "compute the answers of a receipt again, and say where they differ", run)
    parser.add_argument(
        "receipt", metavar="RECEIPT", help="file with a receipt, or with a response that has one; - is standard input"
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a GGUF file, a Hugging Face directory, or a hub name such as org/name@revision; its files must be those "
        "of the receipt. Required, because a receipt must not choose what is downloaded",
    )
    add_settings(parser, _FROM_RECEIPT, default_from="the receipt's")
    add_settings(parser, [setting for setting in ENGINE_SETTINGS if setting not in _FROM_RECEIPT])


def run(options: argparse.Namespace) -> int:
    """Verify the answers one after the other.

    Return 0 if they are equal, 1 if one differs, and 3 if the model has other files or the receipt was changed.

    Raises:
        ConfigError: if the receipt, a flag or the model cannot be used.
        RequestError: if the model cannot serve a request of the receipt.
    """
    from fastgen.model.file_digests import FilesAtStart, differences
    from fastgen.model.source import ModelSource

    receipt = parse_receipt(_read(options.receipt))
    if receipt.computed_digest() != receipt.digest:
        return _refuse("receipt: it was changed: its digest is not that of its content")
    config = _engine_config(options, receipt.numbers)
    source = ModelSource.open(config.model)
    faults = differences(receipt.model.files, FilesAtStart.of(source.path))
    if faults:
        return _refuse(f"model {options.model}: not the receipt's files: {printable('; '.join(faults))}")
    try:
        model = load_model(config)
    except ConfigError as error:
        raise ConfigError(f"{error} (settings without a flag are the receipt's)") from None
    return _verify(model, receipt)


def _verify(model: LLM, receipt: Receipt) -> int:
    from fastgen.llm.verification import Verifier, obstacles

    why, verifier, code = obstacles(receipt, ReceiptNumbers.of(model.info)), Verifier(model), _EQUAL
    if why:
        _note(f"equal tokens are likely, not promised: {printable('; '.join(why))}")
    answers = [(prompt, answer) for prompt in receipt.prompts for answer in prompt.answers]
    for prompt, answer in answers:
        difference = verifier.first_difference(prompt, answer)
        choice = f"choice {answer.index}: " if len(answers) > 1 else ""
        if difference is None:
            print(f"{choice}equal: {len(answer.token_ids)} tokens", flush=True)
        else:
            code = _DIFFERS
            print(f"{choice}{_described(model, difference, len(answer.token_ids))}", flush=True)
    if code == _DIFFERS and not why:
        _note("equal tokens are promised here: the receipt was changed and its digest made anew, or this is a defect")
    return code


def _described(model: LLM, difference: Difference, num_tokens: int) -> str:
    """Return where an answer differs, in one line."""
    place = f"differs after {difference.position} of {num_tokens} tokens:"
    expected, found = difference.expected, difference.found
    if expected is None and found is None and not difference.reason:
        return f"{place} the text of the receipt's tokens does not contain its stop string"
    here = there = f"ends ({difference.reason})"
    if expected is not None:
        there = f"has {_token(model, expected)}{_logprob(difference.expected_logprob) if found is not None else ''}"
    if found is not None:
        here = f"has {_token(model, found.token_id)}{_logprob(found.logprob)}"
    if expected is None and found is None:
        there = "ends for another reason"
    return f"{place} the receipt {there}, this machine {here}"


def _token(model: LLM, token: int) -> str:
    return f"{token} {model.tokenizer.decode([token], skip_special_tokens=False)!r}"


def _logprob(value: float | None) -> str:
    return " (not among the most likely)" if value is None else f" (logprob {value:.6f})"


def _engine_config(options: argparse.Namespace, numbers: ReceiptNumbers) -> EngineConfig:
    values: dict[str, Any] = given(options, ENGINE_SETTINGS)
    for setting in _FROM_RECEIPT:
        if values[setting.name] is None:
            values[setting.name] = getattr(numbers, setting.name)
    try:
        return EngineConfig(model=options.model, **values)
    except ConfigError as error:
        raise ConfigError(printable(f"{error} (settings without a flag are the receipt's)")) from None


def _read(name: str) -> bytes:
    """Return the content of a file, or of standard input.

    Raises:
        ConfigError: if it cannot be read or is too long.
    """
    try:
        if name == "-":
            text = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"receipt {name}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"receipt {name}: has more than {_MOST_BYTES >> 20} MiB")
    return text


def _refuse(message: str) -> int:
    print(f"fastgen: error: {message}", file=sys.stderr)
    return _OTHER_FILES


def _note(message: str) -> None:
    print(f"fastgen: {message}", file=sys.stderr)
