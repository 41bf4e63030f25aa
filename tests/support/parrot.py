"""A tiny model that says given texts, so that the real engine meets exact tokens.

After the token `<|sN|>` it generates the tokens of lane N, then its end token. Attention and feed-forward layers are
zero: the next token depends on the last one only, so no token may have two successors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fastgen.text.vocabulary import byte_alphabet

if TYPE_CHECKING:
    import torch

WIDTH = 256
END = "<|im_end|>"


@dataclass(frozen=True)
class Words:
    """What makes a model with embeddings of WIDTH say the lanes, whatever small values its layers add.

    Attributes:
        ids: id of each token by its name.
        embedding, head: [tokens, WIDTH] weights.
    """

    ids: dict[str, int]
    embedding: torch.Tensor
    head: torch.Tensor


def save_words(
    folder: Path,
    lanes: Sequence[Sequence[str]],
    *,
    special: Sequence[str] = (),
    tokenizer_config: dict[str, Any] | None = None,
) -> Words:
    """Write the tokenizer to `folder` and return the weights; for the arguments see `save_parrot`."""
    import torch

    alphabet = byte_alphabet()
    words = {word for lane in lanes for word in lane} - {*special, END}
    spelled = {word: "".join(alphabet[byte] for byte in word.encode()) for word in sorted(words)}
    tokens = [*alphabet.values(), *(token for token in spelled.values() if len(token) > 1)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    starts = [f"<|s{number}|>" for number in range(len(lanes))]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (END, *starts, *special)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))

    vocabulary, size = backend.get_vocab(), backend.get_vocab_size()
    torch.manual_seed(1)
    embedding = torch.randint(0, 2, (size, WIDTH)).float() * 2 - 1
    head = torch.zeros(size, WIDTH)
    followers: dict[int, int] = {}
    for start, lane in zip(starts, lanes, strict=True):
        ids = [vocabulary[spelled.get(token, token)] for token in (start, *lane, END)]
        for here, there in pairwise(ids):
            assert followers.setdefault(here, there) == there, f"{backend.id_to_token(here)!r} has two successors"
    for here, there in followers.items():
        head[there] += 0.5 * embedding[here]
    return Words(vocabulary, embedding, head)


def save_parrot(
    folder: Path,
    lanes: Sequence[Sequence[str]],
    *,
    special: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> Path:
    """Write the model to `folder` and return it.

    Args:
        folder: where to write it.
        lanes: the tokens of each text. Those of `special` are special tokens, all others words of the vocabulary.
        special: special tokens besides the end token and the starts of lanes.
        config: fields of config.json besides the usual ones.
        tokenizer_config: fields of tokenizer_config.json.
    """
    import torch
    from safetensors.torch import save_file

    words = save_words(folder, lanes, special=special, tokenizer_config=tokenizer_config)
    layer, zeros, ones = "model.layers.0.", torch.zeros, torch.ones
    weights = {
        "model.embed_tokens.weight": words.embedding,
        "lm_head.weight": words.head,
        "model.norm.weight": ones(WIDTH),
        **{f"{layer}{name}_layernorm.weight": ones(WIDTH) for name in ("input", "post_attention")},
        **{f"{layer}self_attn.{name}_proj.weight": zeros(WIDTH, WIDTH) for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": zeros(64, WIDTH) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": zeros(WIDTH, 64),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(words.ids),
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": words.ids[END],
    }
    (folder / "config.json").write_text(json.dumps(shape | (config or {})))
    return folder
