"""Scales of a float8 KV cache: read from a checkpoint, and applied where keys and values are stored and read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kv_cache.tensors import KVCache
from fastgen.model import ModelError
from fastgen.model.checkpoint.safetensors import open_safetensors
from fastgen.model.device_input import DeviceInput
from fastgen.model.layers.decoder import Decoder
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInputBuilder
from fastgen.runner.gpu_runner import GPURunner
from support.driving import sequence
from support.tiny_models import SIZES, saved

BLOCK_SIZE = 16
PROMPT = list(range(3, 43))
# Powers of two, so that a cache with the scale rounds as one without. Each differs from the others.
POWERS = [(4.0, 0.5), (0.25, 2.0), (8.0, 16.0)]
COMPRESSED, MODELOPT = "self_attn.{part}_scale", "self_attn.{part}_proj.{part}_scale"
FLOAT8 = torch.float8_e4m3fn


def with_scales(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return folder


def scales(values: list[tuple[float, float]], name: str = COMPRESSED) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.{name.format(part=part)}": torch.tensor([scale])
        for layer, of_layer in enumerate(values)
        for part, scale in zip("kv", of_layer, strict=True)
    }


def load(folder: Path, cache_dtype: torch.dtype | None = FLOAT8) -> Decoder[DeviceInput]:
    source = ModelSource.open(str(folder))
    return load_on_gpu(
        source, torch.device("cpu"), torch.float32, cache_dtype=cache_dtype, max_model_length=64,
        progress=lambda _fraction: None,
    )  # fmt: skip


def run(folder: Path, cache_dtype: torch.dtype | None = FLOAT8) -> tuple[KVCache, torch.Tensor]:
    """Compute a prompt in two chunks; return the cache, and what the second one leaves for the head."""
    model = load(folder, cache_dtype)
    cache = KVCache(model.kv_shape, 4, BLOCK_SIZE, dtype=model.cache_dtype)
    runner = GPURunner(model, cache, max_model_length=64, max_sequences=1)
    subject, builder = sequence(PROMPT, [2, 0, 3]), StepInputBuilder(BLOCK_SIZE)
    for start, end in ((0, 25), (25, 40)):
        subject.num_computed_tokens = start
        ticket = runner.launch(builder.build(StepPlan((Chunk(subject, start, end - start),))))
        ticket.sample([])
    return cache, ticket.forward.hidden


@pytest.mark.parametrize("name", [COMPRESSED, MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_scales_divide_what_is_stored_and_multiply_what_is_read(name: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    _, exact = run(folder, None)
    plain, expected = run(folder)
    scaled, hidden = run(with_scales(folder, scales(POWERS, name)))
    for layer, (key, value) in enumerate(POWERS):
        for stored, of_one, scale in ((scaled.keys, plain.keys, key), (scaled.values, plain.values, value)):
            wanted = (of_one[layer].float() / scale).to(FLOAT8).float()
            written = wanted != 0
            # Numbers near 0 have fewer bits. In later layers, this also rounds a few others to the other side.
            same = (stored[layer].float() == wanted)[written].float().mean()
            assert same > 0.8, f"scale {scale} of layer {layer}: {same:.0%} of the cache are as expected"
    assert (hidden - expected).norm() < 0.5 * (expected - exact).norm(), "it differs by more than float8 does"


def test_a_scale_keeps_keys_and_values_that_float8_cannot_hold(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.v_proj.weight"] *= 2000
    save_file(tensors, path, metadata={"format": "pt"})
    exact, wanted = run(folder, None)
    assert exact.values.abs().max() > 2 * 448
    _, clamped = run(folder)
    largest = exact.values.abs().amax((1, 2, 3, 4)) / 448
    scaled, hidden = run(with_scales(folder, scales([(1.0, float(scale)) for scale in largest])))
    torch.testing.assert_close(scaled.values[0].float() * largest[0], exact.values[0], rtol=2**-4, atol=2.0)
    assert (hidden - wanted).norm() < 0.3 * (clamped - wanted).norm()


def test_without_a_float8_cache_scales_change_nothing(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    _, expected = run(folder, None)
    _, hidden = run(with_scales(folder, scales(POWERS)), None)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_without_scales_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fastgen")
    folder = saved("llama", tmp_path)
    run(folder, None)
    assert not caplog.messages, "no scale is needed"
    run(folder)
    assert [message for message in caplog.messages if "no k_scale and v_scale" in message] == caplog.messages
    assert len(caplog.messages) == 1
    caplog.clear()
    run(with_scales(folder, scales(POWERS)))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (scales(POWERS[:2]), "layer 2 has no k_scale"),
        (scales([*POWERS, (1.0, 1.0)]), "a v_scale is of layer 3, which the model does not have"),
        ({**scales(POWERS), "model.layers.1.self_attn.v_scale": torch.ones(2)}, r"layers\.1\.\S+ has 2 scales"),
        ({**scales(POWERS), "model.layers.1.self_attn.v_scale": torch.zeros(())}, r"v_scale is 0\.0"),
        ({**scales(POWERS), "model.layers.1.self_attn.k_scale": torch.tensor(torch.nan)}, "k_scale is nan"),
    ],
)
def test_scales_that_cannot_be_used_are_named(tensors: dict[str, torch.Tensor], words: str, tmp_path: Path) -> None:
    folder = with_scales(saved("llama", tmp_path), tensors)
    assert SIZES["num_hidden_layers"] == 3
    source = ModelSource.open(str(folder))
    with pytest.raises(ModelError, match=words):
        open_safetensors(source.path, source.architecture)


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ONLY_KV = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV_SCHEME}


def configure(folder: Path, quantization: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return str(folder)


@pytest.mark.parametrize(
    "quantization",
    [ONLY_KV, {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}],
    ids=["compressed-tensors", "modelopt"],
)
def test_a_configuration_that_quantises_only_keys_and_values_is_served(
    quantization: dict[str, Any], tmp_path: Path
) -> None:
    folder = with_scales(saved("llama", tmp_path), scales(POWERS))
    assert load(Path(configure(folder, quantization)))._backend.kv_scales[1].value == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_algo": "FP8"}, "quant_algo is 'FP8': it is not supported"),
        ({"kv_cache_scheme": None}, "has neither config_groups nor a kv_cache_scheme"),
        ({"kv_cache_scheme": {**KV_SCHEME, "num_bits": 4}}, r"kv_cache_scheme\.num_bits is 4: expected 8"),
        ({"kv_cache_scheme": {**KV_SCHEME, "strategy": "attn_head"}}, r"kv_cache_scheme\.strategy is 'attn_head'"),
        ({"kv_cache_scheme": {**KV_SCHEME, "dynamic": True}}, r"kv_cache_scheme\.dynamic is True: expected False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_kv_cache_is_rejected(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{words}"):
        ModelSource.open(configure(saved("llama", tmp_path), ONLY_KV | changes))
