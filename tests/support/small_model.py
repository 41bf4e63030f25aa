"""A small model with random weights and the demo model's tokenizer, which loads at once."""

from __future__ import annotations

import json
from pathlib import Path

from fastgen.model.source import ModelSource
from fastgen.text.tokenizer import Tokenizer
from support.demo_weights import demo_model


def save_small_model(folder: Path) -> Path:
    """Write the model to `folder`, as Hugging Face does, and return it. It has 16384 positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    tokenizer = Tokenizer.load(ModelSource.open(str(demo_model())).tokenizer)
    assert tokenizer.chat_template is not None
    shape = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template.source)
    return folder
