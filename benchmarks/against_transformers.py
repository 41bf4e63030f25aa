"""Tokens/s of a Qwen3.5-shaped model with 0.8 billion random weights, here and in transformers' `generate`.

`python benchmarks/against_transformers.py`: prompts of equal length are given at once and generate equally many tokens,
greedily; so transformers pads nothing and recomputes nothing. Each run is a process of its own, in the order of the
table. The time is that of prompts and generation, after a short warm-up; the rate counts both kinds of tokens. The
second ratio is of the processor time of all threads, which other load on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Sizes of Qwen3.5's smallest model.
TEXT = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
Generate = Callable[[list[list[int]], int], list[list[int]]]


def save_model(folder: Path) -> None:
    """Write the model in bfloat16, and a tokenizer that is not used."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT))
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} M parameters", flush=True)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def fastgen(folder: str, dtype: str) -> Generate:
    """Return how this engine generates; the prefix cache is off, because the warm-up has the same prompts."""
    from fastgen import LLM, SamplingParams

    llm = LLM(folder, device="cpu", dtype=dtype, max_model_length=2048, quantization="none", prefix_caching=False)

    def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [list(output.token_ids) for output in llm.generate(list(prompts), sampling)]

    return run


def transformers(folder: str, dtype: str) -> Generate:
    """Return how transformers generates."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        given = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        return [list(row) for row in found[:, given.shape[1] :].tolist()]

    return run


CONTENDERS = {"fastgen": fastgen, "transformers": transformers}


def measure(options: argparse.Namespace, contender: str, dtype: str) -> dict[str, Any]:
    """Load the model, generate, and return the seconds and the tokens."""
    random.seed(1)
    prompts = [random.choices(range(TEXT["vocab_size"]), k=options.prompt) for _ in range(options.clients)]
    generate = CONTENDERS[contender](options.folder, dtype)
    generate([prompt[:32] for prompt in prompts], 2)
    began, used = time.perf_counter(), time.process_time()
    tokens = generate(prompts, options.tokens)
    return {"seconds": time.perf_counter() - began, "used": time.process_time() - used, "tokens": tokens}


def compare(options: argparse.Namespace) -> None:
    """Run all contenders and print their rates."""
    total = options.clients * (options.prompt + options.tokens)
    print(f"{options.clients} clients, prompts of {options.prompt} tokens, {options.tokens} generated")
    for dtype in options.dtypes:
        rates, used, found = {}, {}, {}
        for contender in CONTENDERS:
            flags = [f"--{name}={getattr(options, name)}" for name in ("folder", "clients", "prompt", "tokens")]
            command = [sys.executable, __file__, "--run", contender, dtype, *flags]
            said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
            rates[contender], used[contender] = total / said["seconds"], said["used"]
            found[contender] = said["tokens"]
            words = f"{said['seconds']:8.1f} s {rates[contender]:8.1f} tokens/s {said['used']:8.1f} s of processors"
            print(f"{dtype}  {contender:<13}{words}", flush=True)
        pairs = [pair for rows in zip(*found.values(), strict=True) for pair in zip(*rows, strict=True)]
        equal = sum(here == there for here, there in pairs)
        ratios = rates["fastgen"] / rates["transformers"], used["transformers"] / used["fastgen"]
        print(f"{dtype}  fastgen : transformers {ratios[0]:.2f}, by processor time {ratios[1]:.2f}", end="")
        print(f"; {equal} of {len(pairs)} generated tokens equal", flush=True)


def main() -> None:
    """Write the model to a temporary folder and compare, or measure one contender."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="generated for each prompt")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--folder", help="the model, if it was written before")
    parser.add_argument("--run", nargs=2, metavar=("CONTENDER", "DTYPE"), help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="only write the model to --folder")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options, *options.run)))
    elif options.save:
        save_model(Path(options.folder))
    elif options.folder:
        compare(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            options.folder = folder
            # The memory of a model that was just built is not left to this process.
            subprocess.run([sys.executable, __file__, "--save", f"--folder={folder}"], check=True)
            compare(options)


if __name__ == "__main__":
    main()
