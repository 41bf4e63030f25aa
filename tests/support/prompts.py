"""Twenty diverse prompts."""

from __future__ import annotations


def _chat(question: str, system: str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face") -> str:
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


_FACTS = "The lighthouse keeper of station {} counted {} ships on the {}th night and wrote it down in his grey book. "

PROMPTS = (
    "The",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++)",
    '{"name": "Ada", "born": 1815, "languages": ["',
    "La capitale de la France est",
    "Der schnelle braune Fuchs springt über den faulen",
    "Весной, когда тает снег, дети",
    "東京は日本の",
    "مرحبا، كيف",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 + 25?\nA:",
    _chat("What is the capital of France?"),
    _chat("Write a haiku about rain on a tin roof."),
    _chat("Explain in two sentences why the sky is blue.", system="You answer like a pirate."),
    "🙂🙃 Emoji mean",
    "".join(_FACTS.format(i, 7 * i % 31, i + 3) for i in range(4)) + "In all he",
    "".join(_FACTS.format(i, 11 * i % 37, i + 2) for i in range(11)),
    _chat("Summarise this log:\n" + "".join(_FACTS.format(i, 5 * i % 41, i + 1) for i in range(20))),
)
