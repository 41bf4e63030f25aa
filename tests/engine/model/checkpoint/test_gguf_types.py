"""Every supported GGUF type is dequantised bit for bit like package gguf."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from fastgen.model import ModelError
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.checkpoint.gguf_types import FOUR_BIT_TYPES, TYPES, dequantise
from fastgen.model.checkpoint.packed_blocks import PackedBlocks

# Offsets of the half-precision scales in a block; all other bytes may have any value.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
PLAIN = ("F32", "F16", "BF16")


def random_blocks(kind: str, count: int) -> np.ndarray:
    """Return blocks [count, bytes per block] with random bytes and scales in the range of real models."""
    rng = np.random.default_rng(len(kind) + count)
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        scales = rng.standard_normal(count).astype(np.float16) * np.float16(0.05)
        blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks


def test_every_supported_type_is_tested_and_has_the_block_size_of_package_gguf() -> None:
    assert {kind.name for kind in TYPES.values()} == HALVES.keys() | set(PLAIN)
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.block_bytes)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("count", [1, 1500])
def test_random_blocks_are_dequantised_bit_for_bit_like_package_gguf(kind: str, count: int) -> None:
    blocks = random_blocks(kind, count)
    quantisation = gguf.GGMLQuantizationType[kind]
    ours = dequantise(blocks.reshape(-1), TYPES[quantisation])
    assert ours.dtype == np.float32
    assert ours.tobytes() == gguf.dequantize(blocks, quantisation).tobytes()


@pytest.mark.parametrize("kind", FOUR_BIT_TYPES)
def test_four_bit_integers_with_their_scales_and_offsets_are_the_values(kind: str) -> None:
    blocks = random_blocks(kind, 1500)
    quantisation = gguf.GGMLQuantizationType[kind]
    packed = PackedBlocks.of_tensor(blocks.reshape(-1), TYPES[quantisation], columns=1500 * TYPES[quantisation].block)
    assert packed is not None
    integers, (scales, offsets) = packed.values.reshape(-1, 32), (part[0] for part in packed.scales_and_offsets())
    assert (integers.dtype, integers.shape[1], integers.max()) == (np.uint8, 32, 15)
    values = integers * scales[:, None].astype(np.float64) + offsets[:, None]
    exact = gguf.dequantize(blocks, quantisation).reshape(-1, 32)
    np.testing.assert_allclose(values, exact, rtol=0, atol=1e-6 * abs(exact).max())


@pytest.mark.parametrize("kind", [*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_files_quantised_by_package_gguf_are_read_bit_for_bit(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 256), dtype=np.float32)
    values[0, :32] = 0  # a block without a scale
    quantisation = gguf.GGMLQuantizationType[kind]
    path = write_one(tmp_path, gguf.quantize(values, quantisation), quantisation)
    (tensor,) = gguf.GGUFReader(path).tensors
    ours = GGUFFile(path).tensor("t")
    assert ours.shape == (6, 256)
    assert ours.tobytes() == gguf.dequantize(tensor.data, tensor.tensor_type).tobytes()


def write_one(folder: Path, data: np.ndarray, quantisation: gguf.GGMLQuantizationType) -> Path:
    path = folder / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unsupported_type_is_rejected_by_name_with_a_remedy(tmp_path: Path) -> None:
    path = write_one(tmp_path, np.zeros((2, 66), np.uint8), gguf.GGMLQuantizationType.IQ2_XXS)
    with pytest.raises(ModelError, match=r"tensor t has type IQ2_XXS, .*convert the model to Q8_0, Q4_K_M or F16"):
        GGUFFile(path)


def test_an_unknown_type_is_rejected_by_number(tmp_path: Path) -> None:
    path = write_one(tmp_path, np.zeros((1, 34), np.uint8), gguf.GGMLQuantizationType.Q8_0)
    data = bytearray(path.read_bytes())
    place = data.index(b"\1\0\0\0\0\0\0\0t") + 9  # the tensor's name is followed by dimensions, sizes and type
    data[place + 4 + 8 * 2 : place + 4 + 8 * 2 + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="tensor t has the unknown type 99"):
        GGUFFile(path)


def test_rows_that_do_not_fill_blocks_are_rejected(tmp_path: Path) -> None:
    path = write_one(tmp_path, np.zeros((1, 34), np.uint8), gguf.GGMLQuantizationType.Q8_0)
    data = bytearray(path.read_bytes())
    place = data.index(b"\1\0\0\0\0\0\0\0t") + 9
    data[place + 4 : place + 12] = (33).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="rows of 33 values cannot be in blocks of 32"):
        GGUFFile(path)
