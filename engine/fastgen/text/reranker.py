"""The prompt of rerankers that answer yes or no, as Qwen3-Reranker's model card has it."""

from __future__ import annotations

# The vocabulary's spelling of the two answers. The score is the probability of the second.
ANSWERS = ("no", "yes")

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

# What follows the document. It begins with a special token, so it can be encoded on its own.
ENDING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


def beginning(query: str, document: str, instruction: str | None) -> str:
    """Return the prompt up to the end of the document."""
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    )


# All text that the server writes into such a prompt.
LITERAL_TEXT = beginning("", "", "") + ENDING
