"""Which part of a model each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import Checkpoint, Part
from fastgen.model.config.architecture import EMBEDDING, HEAD, ModelArchitecture
from fastgen.model.native import load_on_torch, open_checkpoint
from fastgen.model.partition import Partition, division_of
from fastgen.model.source import ModelSource
from fastgen.settings import ConfigError
from support.gguf_writing import write_gguf
from support.quantized_models import FORMATS, model_of, save_quantized
from support.tiny_models import TINY, Tiny, saved

pytestmark = pytest.mark.slow  # builds every family


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def parts_of(source: ModelSource, size: int) -> tuple[list[Checkpoint], list[ModelArchitecture]]:
    """Return the checkpoint and the decoder of each rank."""
    whole, checkpoint = source.architecture, open_checkpoint(source)
    partitions = [Partition.of(whole, checkpoint, rank, size, 1) for rank in range(size)]
    return [each.checkpoint(checkpoint, whole) for each in partitions], [
        each.architecture(whole) for each in partitions
    ]


def joined(name: str, whole: ModelArchitecture, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor that the ranks' parts make up; several ranks may hold the same heads of keys."""
    division = division_of(name, whole)
    if division is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if division.along == "columns" and name.endswith("bias"):
        return torch.stack(list(parts)).sum(0)
    if division.unit in ("kv heads", "linear keys"):
        layer = int(name.split(".")[2])
        delta = whole.layers[layer].delta
        copies = max(1, len(parts) // (whole.heads_of(layer).num_kv_heads if delta is None else delta.key_heads))
        groups = [parts[first : first + copies] for first in range(0, len(parts), copies)]
        assert all(torch.equal(part, group[0]) for group in groups for part in group)
        parts = [group[0] for group in groups]
    return torch.cat(list(parts), 0 if division.along == "rows" else 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TINY)
def test_the_parts_of_all_ranks_make_up_every_tensor(root: Path, name: str, size: int) -> None:
    source = ModelSource.open(str(saved(name, root)))
    whole, checkpoint = source.architecture, open_checkpoint(source)
    parts, decoders = parts_of(source, size)
    for tensor in whole.tensor_shapes():
        stored = [part.stored(tensor) for part in parts]
        found = [each.float32() for each in stored]
        assert torch.equal(joined(tensor, whole, found), checkpoint.tensor(tensor)), tensor
        assert [tuple(part.shape) for part in found] == [each.shape for each in stored]
        if tensor not in (EMBEDDING, HEAD):
            assert [each.shape for each in stored] == [each.tensor_shapes()[tensor] for each in decoders]


def as_slice(some: range | None) -> slice:
    return slice(None) if some is None else slice(some.start, some.stop)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_0", "Q4_0"])
def test_a_part_of_a_gguf_tensor_is_a_part_of_its_values(tmp_path: Path, kind: str) -> None:
    tiny = Tiny("Llama", {"intermediate_size": 128})  # its queries and keys are permuted in the file
    source = ModelSource.open(str(write_gguf(tiny.build(), tmp_path / "tiny.gguf", kind)))
    checkpoint = open_checkpoint(source)
    for name, part in {
        "self_attn.q_proj": Part(rows=range(16, 48)),
        "self_attn.k_proj": Part(rows=range(16, 32)),
        "self_attn.o_proj": Part(columns=range(32, 64)),
        "mlp.up_proj": Part(rows=range(5, 77)),
        "mlp.down_proj": Part(columns=range(32, 128)),
    }.items():
        tensor = checkpoint.stored(f"model.layers.1.{name}.weight")
        rows, columns = (
            slice(None) if some is None else slice(some.start, some.stop) for some in (part.rows, part.columns)
        )
        found = tensor.part(part)
        assert found.shape == tuple(found.values().shape)
        assert torch.equal(found.values(), tensor.values()[rows, columns]), name
        assert (found.int8().dequantised() == tensor.int8().dequantised()[rows, columns]).all(), name
    table = checkpoint.stored(EMBEDDING)
    rows = torch.tensor([0, 3, 1])
    assert torch.equal(table.part(Part(rows=range(40, 90))).table()(rows), table.table()(rows + 40))


def test_a_part_of_a_gguf_tensor_has_whole_blocks(tmp_path: Path) -> None:
    source = ModelSource.open(str(write_gguf(TINY["llama"].build(), tmp_path / "tiny.gguf", "Q8_0")))
    tensor = open_checkpoint(source).stored("model.layers.1.self_attn.o_proj.weight")
    with pytest.raises(ModelError, match=r"attn_output\.weight has blocks of 32 Q8_0 values"):
        tensor.part(Part(columns=range(16, 32)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_a_quantised_tensor_is_a_part_of_its_values(tmp_path: Path, name: str) -> None:
    """Also if it cuts groups of columns."""
    packed, _ = save_quantized(model_of("llama"), FORMATS[name], tmp_path)
    checkpoint = open_checkpoint(ModelSource.open(str(packed)))
    for tensor in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        stored = checkpoint.stored(f"model.layers.1.{tensor}.weight")
        values = stored.values()
        for some in (range(16, 48), range(32, 64), range(8, 20)):
            rows, columns = (stored.part(part) for part in (Part(rows=some), Part(columns=some)))
            assert torch.equal(rows.values(), values[some.start : some.stop])
            assert torch.equal(columns.values(), values[:, some.start : some.stop])
            assert (rows.shape, columns.shape) == (rows.values().shape, columns.values().shape)


def test_mlps_are_divided_at_blocks(tmp_path: Path) -> None:
    wide = Tiny("Llama", {"intermediate_size": 160})
    source = ModelSource.open(str(write_gguf(wide.build(), tmp_path / "tiny.gguf", "Q8_0")))
    whole, checkpoint = source.architecture, open_checkpoint(source)
    for rank, width in enumerate((64, 96)):
        partition = Partition.of(whole, checkpoint, rank, 2, 1)
        assert partition.architecture(whole).mlp_size == width
        own = partition.checkpoint(checkpoint, whole)
        assert own.tensor("model.layers.0.mlp.down_proj.weight").shape == (64, width)


class CountedFile:
    """An open safetensors file that counts the bytes of all tensors, and parts of tensors, that are read."""

    num_bytes = 0

    def __init__(self, path: Path, framework: str) -> None:
        self._file: Any = safe_open(path, framework)
        self.keys = self._file.keys

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._counted(self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        stored = self._file.get_slice(name)
        return type(
            "Slice", (), {"get_shape": stored.get_shape, "__getitem__": lambda _, at: self._counted(stored[at])}
        )()

    @classmethod
    def _counted(cls, values: torch.Tensor) -> torch.Tensor:
        cls.num_bytes += values.nbytes
        return values


@pytest.mark.parametrize(("family", "size"), [("Llama", 2), ("Llama", 4), ("Llama", 8), ("Mixtral", 4)])
def test_each_rank_reads_only_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    """Within 5 %, while it loads: all ranks read the norms, and the weights that route tokens to experts."""
    sizes = {"vocab_size": 4096, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    mlp = {"intermediate_size": 704} if family == "Llama" else {"intermediate_size": 176, "num_local_experts": 8}
    model = Tiny(family, {**sizes, **mlp, "num_hidden_layers": 4}).build()
    model.save_pretrained(tmp_path, max_shard_size="2500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 8
    monkeypatch.setattr("safetensors.safe_open", CountedFile)
    source = ModelSource.open(str(tmp_path))
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    for rank in range(size):
        CountedFile.num_bytes = 0
        group: Any = SimpleNamespace(rank=rank, size=size)
        load_on_torch(
            source,
            torch.device("cpu"),
            torch.float32,
            max_model_length=None,
            progress=lambda _fraction: None,
            group=group,
        )
        assert total / size <= CountedFile.num_bytes <= 1.05 * total / size


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_rejected(root: Path) -> None:
    source = ModelSource.open(str(saved("llama", root)))
    with pytest.raises(ConfigError, match=r"4 attention heads and 4 key-value heads .*: choose one of 1, 2, 4"):
        parts_of(source, 3)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "gemma4-unified",
            {"num_key_value_heads": 3, "num_attention_heads": 6},
            "6 attention heads and 3 or 1 key-value",
        ),
        ("qwen3-next", {"linear_num_value_heads": 6}, "6 value heads and 2 key heads of linear attention cannot be"),
    ],
)
def test_layers_with_heads_of_their_own_must_be_divisible_too(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    tiny = TINY[name]
    Tiny(tiny.family, tiny.settings | changes).build().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"--tensor-parallel 4: the model's {words}.* choose one of 1, "):
        parts_of(ModelSource.open(str(tmp_path)), 4)


def test_too_few_experts_or_too_narrow_mlps_are_rejected(root: Path) -> None:
    source = ModelSource.open(str(saved("mixtral", root)))
    whole = replace(source.architecture, num_heads=8, num_kv_heads=8)
    with pytest.raises(ConfigError, match="only 4 experts: lower it"):
        Partition.of(whole, open_checkpoint(source), 0, 8, 1)
    narrow = ModelSource.open(str(saved("llama", root)))
    with pytest.raises(ConfigError, match="MLPs of 80 columns have too few blocks of 32 for so many ranks"):
        Partition.of(narrow.architecture, open_checkpoint(narrow), 0, 4, 32)
