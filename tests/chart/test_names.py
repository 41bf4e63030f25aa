"""A public name that two modules of a program define means the same thing in both."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Operations that each kind of device, or a specification, has a function for.
OPERATIONS = (
    "add_rms_norm", "clamped_swiglu_multiply", "commit_tokens", "embed", "experts", "gated_activation",
    "gelu_tanh_multiply", "int4_product",
    "list_attention_work", "multiply", "narrowed", "paged_attention", "process_logits", "quantise_rows",
    "rms_norm", "rotary_cache", "route_experts", "sample_tokens", "silu_multiply", "token_logprobs", "widened",
)  # fmt: skip
ENGINE = {
    **dict.fromkeys(OPERATIONS, "one operation for several devices or types of value"),
    "BLOCK": "values that share a scale, in files and in kernels",
    "Bytes": "a type of arrays",
    "FAILED": "the exit code; `fetch` imports nothing of the engine",
    "FAMILIES": "of Hugging Face and of GGUF files",
    "Features": "of Hugging Face and of GGUF files",
    "FloatArray": "a type of arrays",
    "Function": "a type variable",
    "Input": "a type variable",
    "IntArray": "a type of arrays",
    "Mask": "a grammar's allowed tokens, as bits",
    "ROWS": "rows per tile, in two kernels",
    "Scalar": "a type variable",
    "T": "a type variable",
    "VARIANTS": "the compiled variants of a module's kernels",
    "WITHOUT_EFFECT": "keys of a configuration that change nothing, of GGUF files and of generation_config.json",
    "add": "a subcommand's arguments",
    "build": "a tokenizer from each kind of file",
    "log": "the logger of each module",
    "longest_sequence": "that a model supports, with and without transformers' code",
    "main": "of a program",
    "named_special_tokens": "of a tokenizer, from each kind of file",
    "register": "a change of transformers' code",
    "rope_configs": "from each kind of file",
    "router": "the routes of each module",
    "run": "a subcommand, or the server",
}
OPERATOR = {
    "PAGE_PATH": "the page that a module generates",
    "Path": "the keys to a field",
    "TRUST": "how long what was read is believed",
    "add_arguments": "a subcommand's arguments",
    "logger": "the logger of each module",
    "main": "of a program",
    "run": "a subcommand",
}
GATEWAY: dict[str, str] = {"logger": "the logger of each module"}


def defined(file: Path) -> set[str]:
    """Return the functions, classes and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                found.add(name)
            case ast.Assign(targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(ast.Name(name)):
                found.add(name)
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("engine/fastgen", ENGINE), ("operator/fastgen_operator", OPERATOR), ("gateway/fastgen_gateway", GATEWAY)],
)
def test_no_name_of_a_program_means_two_things(folder: str, allowed: dict[str, str]) -> None:
    files = defaultdict[str, list[str]](list)
    for file in sorted((ROOT / folder).rglob("*.py")):
        for name in defined(file):
            files[name].append(str(file.relative_to(ROOT)))
    repeated = {name: where for name, where in files.items() if len(where) > 1}
    assert {name: where for name, where in repeated.items() if name not in allowed} == {}
    assert allowed.keys() <= repeated.keys(), "remove what repeats no more"
