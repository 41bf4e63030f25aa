"""The prompt of a completion as `echo` returns it: its text, and where each token begins in it."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text.detokenizer import Detokenizer
from fastgen.text.tokenizer import Tokenizer


def echoed(prompt: str | list[int], kept: Sequence[int], tokenizer: Tokenizer, hidden: frozenset[int]) -> str:
    """Return the text of the prompt tokens that the model got, without an incomplete character at the end.

    Args:
        prompt: the prompt as given.
        kept: its tokens, or those that `truncate_prompt_tokens` keeps of them.
        tokenizer: the model's.
        hidden: tokens without text if the prompt was given as tokens. If it was given as text, all tokens have text.
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
    encoding added. A token that continues a character begins where the character does.
    """
    drops = (True, False) if tokenizer.vocabulary.drops_first_space else (False,)
    adds = (True, False) if token_ids[0] in tokenizer.special_token_ids else (False,)
    alignments = [
        _aligned(text, token_ids, Detokenizer(tokenizer, hidden), tokenizer, skips_first, drops_space)
        for skips_first in adds
        for drops_space in drops
    ]
    return next((found for found, is_exact in alignments if is_exact), alignments[-1][0])


def _aligned(
    text: str, token_ids: Sequence[int], shown: Detokenizer, tokenizer: Tokenizer, skips_first: bool, drops_space: bool
) -> tuple[list[int], bool]:
    """Return where tokens begin, and whether they spell the text, up to an incomplete character at its end.

    Args:
        text: the prompt's text.
        token_ids: the prompt's tokens.
        shown: detokenizer of the prompt.
        tokenizer: the model's.
        skips_first: whether the text lacks the first token.
        drops_space: whether it lacks the first space.
    """
    offset, found, is_exact = 0, [], True
    for place, token_id in enumerate(token_ids):
        found.append(offset + shown.num_before(token_id))
        piece = shown.push([token_id])
        if skips_first and place == 0:
            continue
        if drops_space and piece:
            is_exact &= piece.startswith(" ") or token_id in tokenizer.special_token_ids
            if piece.startswith(" "):
                piece, drops_space = piece[1:], False
        if text.startswith(piece, offset):
            offset += len(piece)
        elif text.startswith(piece.removeprefix(" "), offset):
            offset += len(piece) - 1
        elif token_id not in tokenizer.special_token_ids:  # the normalizer changed the characters
            offset, is_exact = min(len(text), offset + len(piece)), False
    return found, is_exact and offset == len(text)


def _text(token_ids: Sequence[int], tokenizer: Tokenizer, hidden: frozenset[int]) -> str:
    text = Detokenizer(tokenizer, hidden).push(token_ids)
    return text.removeprefix(" ") if tokenizer.vocabulary.drops_first_space else text
