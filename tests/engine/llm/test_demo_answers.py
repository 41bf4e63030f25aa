"""The demo model's answers in the formats that the kinds of processors take by default.

The bound of the greedy tokens is transformers in bfloat16: of 200 prompts, at least as many next tokens are those of
float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.test_instruction_sets import compiled_for
from fastgen.model.processor import this_processor
from fastgen.model.source import ModelSource
from fastgen.runner.runner import ModelRunner
from fastgen.text.tokenizer import Tokenizer
from support.demo_weights import demo_model
from support.driving import load, run_in_chunks, transformers_twin

pytestmark = pytest.mark.slow

ANSWERS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "How many days are in a week?": "7 days",
    "What is the opposite of hot?": "cold",
    "What is the largest ocean on Earth?": "Pacific",
}
# As /proc/cpuinfo names them.
AVX2, AVX512 = "avx2", "avx2 avx512f"
PROCESSORS = {"AVX2": ("x86-64-v3", AVX2), "AVX-512": ("x86-64-v4", AVX512), "this one": (None, None)}

ASK = """
import json, sys
from pathlib import Path
from fastgen.model import processor
if sys.argv[3]:
    processor._CPUINFO = Path(sys.argv[3])
from fastgen import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_memory=64 << 20, quantization=sys.argv[2])
sampling = SamplingParams(temperature=0, max_tokens=16)
questions = json.load(sys.stdin)
print(json.dumps([llm.chat([{"role": "user", "content": text}], sampling).text for text in questions]))
"""

# 200 prompts: 20 subjects in ten sentences.
SUBJECTS = (
    "bread", "the moon", "a bicycle", "music", "rain", "the heart", "a lighthouse", "gold", "the desert", "chess",
    "a bridge", "coffee", "the brain", "winter", "a library", "the sea", "paper", "a volcano", "honey", "the wind",
)  # fmt: skip
SENTENCES = (
    "The most important thing about {} is", "A long time ago, people thought that {}", "She looked at {} and said",
    "In this chapter we explain how {} works. First,", "Question: what is {}?\nAnswer:", "There are two kinds of {}:",
    "My grandfather used to say that {} is like", "Le mot anglais pour {} est", "If you have never seen {}, imagine",
    "# A program that counts {}\ndef count",
)  # fmt: skip


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_five_plain_questions_are_answered_rightly(kind: str, quantization: str, tmp_path: Path) -> None:
    instructions, flags = PROCESSORS[kind]
    if kind == "AVX2" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip("it is this processor's kind")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name : {kind}\nflags : {flags}\n")
    environment = dict(os.environ) if instructions is None else compiled_for(instructions)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(demo_model()), quantization, "" if flags is None else str(cpuinfo)],
        input=json.dumps(list(ANSWERS)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for answer, expected in zip(json.loads(done.stdout), ANSWERS.values(), strict=True):
        assert expected in answer


@torch.inference_mode()
def test_greedy_tokens_of_200_prompts_agree_with_float32_at_least_as_often_as_those_of_transformers(
    demo_runner: ModelRunner, demo_source: ModelSource
) -> None:
    if this_processor().bfloat16_set is None:
        pytest.skip("the processor has no instructions for bfloat16: the default is float32")
    tokenizer, twin = Tokenizer.load(demo_source.tokenizer), transformers_twin(demo_source).bfloat16()
    rounded = load(demo_model(), dtype="bfloat16", kv_cache_memory=16 << 20)
    prompts = [sentence.format(subject) for sentence in SENTENCES for subject in SUBJECTS]
    ours, theirs = 0, 0
    for text in prompts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        exact = run_in_chunks(demo_runner, tokens, [0], [64]).argmax()
        ours += int(run_in_chunks(rounded, tokens, [0], [64]).argmax() == exact)
        theirs += int(twin(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax() == exact)
    assert len(prompts) == 200
    assert ours >= theirs, (ours, theirs)
    assert ours >= 190
