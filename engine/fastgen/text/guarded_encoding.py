"""Encode a prompt in which text of clients is marked, so that it gives no control token.

As transformers does it, text that spells a control token is encoded apart from what is around it, by the parts of the
tokenizer that know no added tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from fastgen.text.control_tokens import ControlTokens
from fastgen.text.tokenizer import Tokenizer


class GuardedEncoder:
    """Encodes prompts that contain the marks of `control`, for a model that takes `longest` tokens."""

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens, longest: int) -> None:
        self.control = control
        self._longest = longest
        self._tokenizer = tokenizer
        # Behind a line break, SentencePiece adds no space, which belongs to the beginning of a text.
        self._break_ids = tokenizer.encode("\n", add_special_tokens=False)

    def encode(self, rendered: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ValueError: if it has more spellings of control tokens than the model takes tokens, or if text of a client
                becomes a control token nevertheless, because the normalizer changed it.
        """
        pieces, most = self.control.parted(rendered)
        if len(pieces) // 2 > self._longest:
            raise ValueError(f"contains {len(pieces) // 2} texts of control tokens; send at most {self._longest}")
        ids, as_text = self._ordinary(pieces[0]), dict[str, list[int]]()
        for number, piece in enumerate(pieces[1:], 1):
            if number % 2 and piece not in as_text:
                as_text[piece] = self._behind(self._as_text, piece)
            ids += as_text[piece] if number % 2 else self._behind(self._ordinary, piece)
        if sum(token in self.control.ids for token in ids) > most:
            raise ValueError("contains text that the tokenizer turns into a control token; leave it out")
        added = self._tokenizer.encode("", add_special_tokens=True) if add_special_tokens else []
        num_first = int(bool(added) and added[0] == self._tokenizer.bos_token_id)
        return [*added[:num_first], *ids, *added[num_first:]]

    def _behind(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """Encode text that is not the beginning."""
        if not text:
            return []
        ids, num_break = encode("\n" + text), len(self._break_ids)
        return ids[num_break:] if ids[:num_break] == self._break_ids else encode(text)

    def _ordinary(self, text: str) -> list[int]:
        # Only batches release the interpreter lock.
        return self._tokenizer.backend.encode_batch([text], add_special_tokens=False)[0].ids

    def _as_text(self, text: str) -> list[int]:
        """Encode text without recognizing added tokens in it."""
        backend = self._tokenizer.backend
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        steps = backend.pre_tokenizer
        pieces = [normal] if steps is None else [piece for piece, _ in steps.pre_tokenize_str(normal)]
        return [token.id for piece in pieces for token in backend.model.tokenize(piece)]
