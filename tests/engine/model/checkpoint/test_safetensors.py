"""Which tensors and files of a Hugging Face directory are read: as transformers decides, or rejected by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fastgen.core.sampling_params import SamplingParams
from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import Checkpoint
from fastgen.model.native import open_checkpoint
from fastgen.model.source import ModelSource
from support.driving import generate, load
from support.tiny_models import TINY, TINY_MULTIMODAL, prompt

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a head of its own, of which config.json says that it is tied."""
    TINY["llama"].build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return tmp_path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SINGLE)


def save(folder: Path, values: dict[str, torch.Tensor], name: str = SINGLE) -> None:
    save_file(values, folder / name, metadata={"format": "pt"})


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(ModelSource.open(str(folder)))


def assert_tokens_equal_transformers(folder: Path) -> None:
    """Compare greedy tokens, whose logits must differ enough to tell two heads apart."""
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = prompt(30)
    expected = theirs.generate(torch.tensor([start]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    runner = load(folder, kv_cache_memory=4 << 20, block_size=16)
    assert generate(runner, [start], GREEDY, token_budget=64, at_once=1).tokens == [expected[0, 30:].tolist()]


def test_a_head_with_its_own_values_is_used_although_the_model_ties_it(folder: Path) -> None:
    assert opened(folder).head == HEAD
    assert_tokens_equal_transformers(folder)


def test_a_head_that_repeats_the_embedding_is_not_read_twice(folder: Path) -> None:
    values = tensors(folder)
    save(folder, values | {HEAD: values[EMBEDDING].clone()})
    assert opened(folder).head == EMBEDDING
    assert_tokens_equal_transformers(folder)


def test_a_head_in_another_type_than_the_embedding_keeps_its_values(folder: Path) -> None:
    values = tensors(folder)
    save(folder, values | {HEAD: values[EMBEDDING].to(torch.bfloat16)})
    assert opened(folder).head == HEAD


@pytest.mark.parametrize("missing", [EMBEDDING, HEAD])
def test_either_of_two_tied_tensors_is_enough(folder: Path, missing: str) -> None:
    save(folder, {name: value for name, value in tensors(folder).items() if name != missing})
    assert opened(folder).head == EMBEDDING
    assert_tokens_equal_transformers(folder)


def test_a_tied_head_of_another_shape_is_named(folder: Path) -> None:
    save(folder, tensors(folder) | {HEAD: torch.zeros(7, 64)})
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \(7, 64\)"):
        opened(folder)


def shard(folder: Path, names: dict[str, str] | None = None) -> dict[str, str]:
    """Split the single file into two shards with an index, and keep the file."""
    values = tensors(folder)
    placed = names or {name: f"part-{number % 2}.safetensors" for number, name in enumerate(values)}
    for part in set(placed.values()):
        save(folder, {name: values[name] for name in values if placed[name] == part}, part)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return placed


def test_a_single_file_precedes_a_stale_index(folder: Path) -> None:
    shard(folder)
    values = tensors(folder)
    save(folder, values | {HEAD: values[HEAD].flip(0)})
    assert torch.equal(opened(folder).tensor(HEAD), values[HEAD].flip(0))
    assert_tokens_equal_transformers(folder)


def test_without_the_single_file_the_shards_of_the_index_are_read(folder: Path) -> None:
    shard(folder)
    (folder / SINGLE).unlink()
    assert_tokens_equal_transformers(folder)


def make_fifo(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def make_directory(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


def make_loop(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(SINGLE)


def cut(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-4])


def indexed(weight_map: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shard(folder)
        (folder / SINGLE).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / SINGLE).unlink()
    (folder / "part-1.safetensors").unlink()


def repeat_a_tensor(folder: Path) -> None:
    shard(folder)
    values = tensors(folder)
    (folder / SINGLE).unlink()
    save(folder, values, "part-0.safetensors")


def use_integers(folder: Path) -> None:
    save(folder, tensors(folder) | {"model.norm.weight": torch.ones(64, dtype=torch.int32)})


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (make_fifo, r"model\.safetensors is missing"),
    "directory": (make_directory, r"model\.safetensors is missing"),
    "symlink loop": (make_loop, r"model\.safetensors is missing"),
    "empty": (lambda folder: (folder / SINGLE).write_bytes(b"") and None, r"model\.safetensors: cannot be read"),
    "truncated": (cut, r"model\.safetensors: cannot be read"),
    "text": (lambda folder: (folder / SINGLE).write_text("no" * 99) and None, r"model\.safetensors: cannot be read"),
    "index of a number": (indexed(7), "weight_map must be an object"),
    "index without a map": (indexed(None), "weight_map must be an object"),
    "index of numbers": (indexed({HEAD: 7}), "weight_map must be an object"),
    "index above the folder": (indexed({HEAD: "../other.safetensors"}), r"names '\.\./other\.safetensors'"),
    "index of an absolute path": (indexed({HEAD: "/etc/x.safetensors"}), "names '/etc/x"),
    "index of another kind of file": (indexed({HEAD: "pytorch_model.bin"}), "names 'pytorch_model"),
    "index with a null byte": (indexed({HEAD: "a\0.safetensors"}), "weight_map names"),
    "empty index": (indexed({}), r"tensor \S+ is missing"),
    "lost shard": (lose_a_shard, r"part-1\.safetensors is missing"),
    "repeated tensor": (repeat_a_tensor, "is in another file of the checkpoint too"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_rejected_in_one_line_that_names_the_file(folder: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    change(folder)
    with pytest.raises(ModelError, match=words) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_tensor_of_integers_is_rejected_when_it_is_read(folder: Path) -> None:
    use_integers(folder)
    checkpoint = opened(folder)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int32"):
        checkpoint.tensor("model.norm.weight")


def test_keys_and_values_that_a_layer_does_not_compute_are_ignored(tmp_path: Path) -> None:
    TINY["gemma4-shared"].build().save_pretrained(tmp_path)
    unused = {f"self_attn.{part}.weight": torch.zeros(32, 64) for part in ("k_proj", "v_proj", "k_norm")}
    save(tmp_path, tensors(tmp_path) | {f"model.layers.4.{name}": value for name, value in unused.items()})
    opened(tmp_path)
    save(tmp_path, tensors(tmp_path) | {"model.layers.2.self_attn.v_norm.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"model\.layers\.2\.self_attn\.v_norm\.weight is not part of"):
        opened(tmp_path)


def test_stacked_experts_may_be_transposed(tmp_path: Path) -> None:
    """As in published files of Qwen3-VL's mixtures. Llama 4's are, even where they are square."""
    TINY_MULTIMODAL["multimodal-qwen3-vl-moe"].build().save_pretrained(tmp_path)
    shapes = ModelSource.open(str(tmp_path)).architecture.tensor_shapes()
    experts = [name for name in shapes if ".experts." in name]
    expected = [opened(tmp_path).tensor(name) for name in experts]
    stacks = {name: value for name, value in tensors(tmp_path).items() if ".experts." in name}
    assert all(value.ndim == 3 for value in stacks.values())
    transposed = {name: value.transpose(1, 2).contiguous() for name, value in stacks.items()}
    save(tmp_path, tensors(tmp_path) | transposed)
    checkpoint = opened(tmp_path)
    assert all(torch.equal(checkpoint.tensor(name), value) for name, value in zip(experts, expected, strict=True))


def test_layers_that_draft_tokens_are_ignored_by_their_number(tmp_path: Path) -> None:
    TINY["glm4-moe"].build().save_pretrained(tmp_path)
    layers = ModelSource.open(str(tmp_path)).architecture.num_layers
    save(tmp_path, tensors(tmp_path) | {f"model.layers.{layers}.eh_proj.weight": torch.zeros(2)})
    opened(tmp_path)
    save(tmp_path, tensors(tmp_path) | {f"model.layers.{layers + 1}.eh_proj.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=rf"model\.layers\.{layers + 1}\.eh_proj\.weight is not part of"):
        opened(tmp_path)
