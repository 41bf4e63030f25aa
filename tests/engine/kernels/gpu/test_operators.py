"""The registration of operators: their functions dispatch, and their launch functions take the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.kernels.gpu import attention, elementwise, embedding, experts, float8, int4, rotary_cache, work_list
from fastgen.kernels.gpu.operators import has_kernels, launch_function
from fastgen.kernels.gpu.sampling import logits, logprobs, tokens

OPERATORS: dict[str, Any] = {
    "paged_attention": attention.paged_attention,
    "list_attention_work": work_list.list_attention_work,
    "add_rms_norm": elementwise.add_rms_norm,
    "gated_activation": elementwise.gated_activation,
    "embed": embedding.embed,
    "int4_product": int4.int4_product,
    "quantise_rows": float8.quantise_rows,
    "route_experts": experts.route_experts,
    "experts": experts.experts,
    "process_logits": logits.process_logits,
    "token_logprobs": logprobs.token_logprobs,
    "rotary_cache": rotary_cache.rotary_cache,
    "sample_tokens": tokens.sample_tokens,
    "commit_tokens": tokens.commit_tokens,
}


class Operations(TorchDispatchMode):
    """Records the names of dispatched operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "fastgen":
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_call_of_the_function_is_dispatched() -> None:
    with Operations() as seen:
        elementwise.gated_activation(torch.ones(1, 4), activation="silu")
    assert seen.names == ["fastgen.gated_activation.default"]


def test_these_are_all_operators_with_kernels() -> None:
    found = {name: getattr(torch.ops.fastgen, name) for name in torch.ops.fastgen._dir if has_kernels(name)}
    assert found == OPERATORS


@pytest.mark.parametrize("name", OPERATORS)
def test_the_launch_function_takes_the_operators_arguments_and_defaults(name: str) -> None:
    """Arguments that are equal to their defaults are not passed on, so these must be the same."""
    schema = OPERATORS[name].default._schema
    mutated = [argument.name for argument in schema.arguments if argument.is_write]
    launched = torch.library.infer_schema(launch_function(name), mutates_args=mutated)
    assert str(schema) == f"fastgen::{name}{launched.replace('=0.0', '=0.').replace('=1.0', '=1.')}"
