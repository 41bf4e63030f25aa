"""A folder as sentence-transformers saves it, served by the real engine: vectors equal transformers'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import LlamaForCausalLM

from engine.server.serving import REAL, Serving, serving
from fastgen.text.tokenizer import Tokenizer
from support.small_model import save_small_model

pytestmark = pytest.mark.slow

BOUND = 2e-5  # as in tests/engine/runner/test_pooling.py
END, END_ID = "<|im_end|>", 2
TEXTS = ["Where is Bern?", "Bern is the capital of Switzerland. " * 60, "x", "Bread is made of flour."]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def embedder(whole: Path, smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for the model without its head, whose tokenizer appends an end token as Qwen3-Embedding's does."""
    folder = tmp_path_factory.mktemp("embedder")
    tensors: dict[str, torch.Tensor] = load_file(whole / "model.safetensors")
    save_file({name.removeprefix("model."): values for name, values in tensors.items()}, folder / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    backend = type(smollm2.backend).from_str(smollm2.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, END_ID)])
    (folder / "tokenizer.json").write_text(backend.to_str())
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    options = ("--kv-cache-memory", "64MiB", "--max-model-length", "2048", "--served-model-name", "embedder")
    options += ("--dtype", "float32")
    with serving(folder, *options, command=REAL, model=str(folder)) as server:
        server.wait_status("/ready", 200, seconds=240)
        yield server


def test_vectors_equal_those_of_transformers(embedder: Serving, whole: Path, smollm2: Tokenizer) -> None:
    model = LlamaForCausalLM.from_pretrained(whole).eval()
    got = embedder.client().embeddings.create(model="embedder", input=TEXTS, dimensions=48)
    for text, entry in zip(TEXTS, got.data, strict=True):
        tokens = [*smollm2.encode(text, add_special_tokens=False), END_ID]
        with torch.inference_mode():
            state = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1, :48].double()
        expected = (state / state.norm()).numpy()
        assert np.abs(np.array(entry.embedding) - expected).max() < BOUND
    assert "this server embeds texts" in embedder.log
    response = embedder.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert response.json()["error"]["code"] == "wrong_task"


def test_texts_that_share_a_prefix_are_ranked_by_their_similarity(embedder: Serving) -> None:
    documents = [TEXTS[1] + "End.", TEXTS[1], TEXTS[0]]
    reply = embedder.post("/v1/rerank", {"query": TEXTS[1], "documents": documents}).json()
    assert reply["results"][0]["index"] == 1
    assert reply["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    assert embedder.metric("fastgen_prefix_cache_hit_tokens_total") > 0
