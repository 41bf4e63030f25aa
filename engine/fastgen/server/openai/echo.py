"""The prompt of a completion as `echo` returns it: its text, and where each token begins in it."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text.detokenizer import Detokenizer
from fastgen.text.tokenizer import Tokenizer


def echoed(prompt: str | list[int], kept: Sequence[int], tokenizer: Tokenizer, hidden: frozenset[int]) -> str:
    """Return the text of the prompt tokens that the model got, without a character that its end leaves incomplete.

    Args:
        prompt: the prompt as given.
        kept: its tokens, or those that `truncate_prompt_tokens` keeps of them.
        tokenizer: the model's.
        hidden: tokens that give no text if the prompt was given as tokens; a given text is returned as it is.
    """
    if not isinstance(prompt, str):
        return _text(kept, tokenizer, hidden)
    added = tokenizer.encode("", add_special_tokens=True)[:1]
    is_added = kept[:1] == added == [tokenizer.bos_token_id] and not prompt.startswith(
        tokenizer.decode(added, skip_special_tokens=False)
    )
    return _text(kept[is_added:], tokenizer, frozenset())


def offsets(text: str, token_ids: Sequence[int], tokenizer: Tokenizer, hidden: frozenset[int]) -> list[int]:
    """Return where each token of a prompt echoed as `text` begins.

    The text may contain special tokens. It lacks those that encoding added or that are hidden, and a first space that
    encoding added. A token that goes on with a character begins where the character does.
    """
    shown, offset, found = Detokenizer(tokenizer, hidden), 0, []
    for token_id in token_ids:
        found.append(offset + shown.num_before(token_id))
        piece = shown.push([token_id])
        if text.startswith(piece, offset):
            offset += len(piece)
        elif text.startswith(piece.removeprefix(" "), offset):
            offset += len(piece) - 1
        elif token_id not in tokenizer.special_token_ids:  # the normalizer changed the characters
            offset = min(len(text), offset + len(piece))
    return found


def _text(token_ids: Sequence[int], tokenizer: Tokenizer, hidden: frozenset[int]) -> str:
    text = Detokenizer(tokenizer, hidden).push(token_ids)
    return text.removeprefix(" ") if tokenizer.vocabulary.drops_first_space else text
