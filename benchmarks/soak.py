"""Memory of server and engine over many random requests, half of them cancelled: it must stay flat within 2 %.

Prompts, generations, endpoints, streaming and sampling are random; the client of a cancelled request disconnects at a
random moment. The resident memory of both processes is printed and compared with its value after the first fifth of the
requests, when buffers and allocators are warm. Exits with code 1 if a process has grown.

    python benchmarks/soak.py [--engine tiny|demo|scripted] [--requests 20000] [--clients 32] [--seed 0] \
        [-- options of fastgen serve]

`tiny` is a random model of two small layers on the real engine with its kernels; `demo` is the real small model, which
takes hours for as many requests; `scripted` is the tests' engine: the real step loop and scheduler without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "tests")]

from engine.server.serving import REAL, SCRIPTED, Serving, serving  # noqa: E402

POINTS = 20
ALLOWED_GROWTH = 0.02


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def random_body(choose: random.Random, longest: int) -> tuple[str, dict[str, object]]:
    """Return a random endpoint and a request body for it."""
    words = " ".join(f"word{choose.randrange(1000)}" for _ in range(int(choose.expovariate(1 / 40)) % longest + 1))
    body: dict[str, object] = {
        "max_tokens": int(choose.expovariate(1 / 30)) % 200 + 1,
        "stream": choose.random() < 0.5,
        "ignore_eos": choose.random() < 0.5,
    }
    if choose.random() < 0.5:
        body |= {"temperature": choose.random() * 2, "top_p": 0.1 + choose.random() * 0.9, "seed": choose.randrange(99)}
    if choose.random() < 0.2:
        body["stop"] = [f"word{choose.randrange(1000)}" for _ in range(choose.randrange(1, 4))]
    if choose.random() < 0.5:
        return "/v1/completions", {"prompt": [words] * choose.choice((1, 1, 1, 3)), **body}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": words}], **body}


@dataclass
class Soak:
    """Requests left to send, and the results so far."""

    server: Serving
    choose: random.Random
    left: int
    every: int
    began: float = field(default_factory=time.monotonic)
    num_done: int = 0
    num_cancelled: int = 0
    num_rejected: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)

    async def client(self) -> None:
        """Send one request after the other."""
        while self.left > 0:
            self.left -= 1
            cancels = self.choose.random() < 0.5
            path, body = random_body(self.choose, longest=200)
            try:
                await asyncio.wait_for(self.send(path, body), self.choose.random() * 0.3 if cancels else 120)
            except TimeoutError:
                assert cancels, f"no answer within 120 s: {path} {body}"
                self.num_cancelled += 1
            self.num_done += 1
            if self.num_done % self.every == 0:
                self.sample_memory()

    async def send(self, path: str, body: dict[str, object]) -> None:
        """Send one request on its own connection, which is reset on cancellation."""
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            head = f"Host: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}"
            writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n".encode() + content)
            answer = await reader.read(-1)
            status = int(answer.split(b" ", 2)[1])
            assert status in (200, 429), answer[:1000]
            self.num_rejected += status == 429
        finally:
            writer.transport.abort()

    def sample_memory(self) -> None:
        """Append a point to the curve and print it."""
        http, engine = resident_mib(self.server.process.pid), resident_mib(self.server.engine_pid())
        self.curve.append((http, engine))
        seconds = time.monotonic() - self.began
        print(f"{self.num_done:9}{self.num_cancelled:11}{seconds:9.0f}{http:11.1f}{engine:13.1f}", flush=True)


def save_tiny_model(folder: Path) -> str:
    """Save a random model and a tokenizer for the words of the requests; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([f" word{number}" for number in range(1000)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=fast.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


async def run(soak: Soak, clients: int) -> None:
    """Send all requests."""
    print(f"{'requests':>9}{'cancelled':>11}{'seconds':>9}{'HTTP MiB':>11}{'engine MiB':>13}")
    soak.sample_memory()
    await asyncio.gather(*(soak.client() for _ in range(clients)))


def verdict(curve: list[tuple[float, float]]) -> bool:
    """Print the growth of each process since the first fifth; return whether both are flat."""
    baseline, flat = curve[len(curve) // 5], True
    for name, before, after in zip(("HTTP", "engine"), baseline, curve[-1], strict=True):
        growth = after / before - 1
        flat &= growth <= ALLOWED_GROWTH
        print(f"{name}: {before:.1f} -> {after:.1f} MiB, {growth:+.2%}")
    return flat


def main() -> int:
    """Run the soak test and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--engine", choices=("tiny", "demo", "scripted"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="options of fastgen serve")
    options = parser.parse_args()
    command = SCRIPTED if options.engine == "scripted" else REAL
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = save_tiny_model(Path(folder) / "tiny") if options.engine == "tiny" else None
        server = stack.enter_context(serving(Path(folder), *options.options, command=command, model=model))
        server.wait_status("/ready", 200, seconds=300)
        soak = Soak(server, random.Random(options.seed), options.requests, max(1, options.requests // POINTS))
        asyncio.run(run(soak, options.clients))
        print(f"rejected because the queue was full: {soak.num_rejected}")
        flat = verdict(soak.curve)
        assert "Traceback" not in server.log, server.log[-5000:]
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
