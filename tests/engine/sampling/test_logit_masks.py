"""Masks of logits."""

from __future__ import annotations

import random

import numpy as np
import torch
from transformers import NoBadWordsLogitsProcessor

from engine.sampling.drawing import Draw, parameters, sample
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import RowParameters
from fastgen.kernels.gpu.sampling.changes import Changes, Mask, change_logits, is_banned
from fastgen.sampling.parameters import bans_of


def allowing(*tokens: int, words: int = 1) -> Mask:
    """Return the mask of a grammar that allows these tokens."""
    return np.array(
        [sum(1 << token % 32 for token in tokens if token // 32 == word) for word in range(words)], np.uint32
    )


def banned(sampling: SamplingParams, generated: list[int], ends: frozenset[int] = frozenset()) -> list[int]:
    """Return the tokens that are banned after `generated`."""
    bans = bans_of(RowParameters(0, sampling, 0, 1, [6, *generated]), ends)
    return [token for token, word in bans if is_banned(word, generated, len(generated), sampling.min_tokens)]


def choose(logits: torch.Tensor, *draws: Draw) -> list[int]:
    return sample(logits, draws)[0]


def test_bad_words_in_the_generation_are_banned_as_in_transformers() -> None:
    source = random.Random(0)
    for _ in range(200):
        words = tuple(tuple(source.choices(range(6), k=source.randint(1, 3))) for _ in range(source.randint(1, 4)))
        generated = source.choices(range(6), k=source.randint(0, 5))
        logits = torch.zeros(1, 6)
        processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=5)
        # transformers 5.17 never bans a word that is longer than its input, so it gets one more token, of no word.
        wanted = processor(torch.tensor([[6, *generated]]), logits.clone())
        # transformers ignores a bad word that is the end-of-sequence token; here it is a word like any other.
        sampling = SamplingParams(bad_words=tuple(word for word in words if word != (5,)))
        change_logits(logits, parameters([sampling], 6), [Changes(banned=banned(sampling, generated))])
        assert torch.equal(logits, wanted)


def test_a_bad_word_that_begins_in_the_prompt_is_not_banned() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    sampling = SamplingParams(temperature=0, bad_words=((1, 2),))
    assert choose(logits, Draw(sampling, 0, [0, 1], num_prompt_tokens=2)) == [2]
    assert choose(logits, Draw(sampling, 0, [0, 1], num_prompt_tokens=1)) == [1]


def test_end_tokens_are_banned_before_min_tokens_unless_eos_is_ignored() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(2,))
    ends = frozenset({3})
    assert choose(logits, Draw(sampling, 0, [0, 0], 1, ends)) == [1]
    assert choose(logits, Draw(sampling, 0, [0, 0, 0], 1, ends)) == [3]
    assert [banned(sampling, [0] * count, ends) for count in (1, 2)] == [[2, 3], []]
    ignoring = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(2,), ignore_eos=True)
    assert choose(logits, Draw(ignoring, 0, [0, 0], 1, ends)) == [3]


def test_a_grammar_masks_only_its_own_row_for_any_vocabulary_size() -> None:
    for size in (31, 32, 33, 70):
        logits = torch.arange(float(size)).repeat(3, 1)
        constrained = Draw(SamplingParams(temperature=0), 0, (0,), mask=allowing(1, 7, 30, words=-(-size // 32)))
        free = Draw(SamplingParams(temperature=0), 0, (0,))
        assert choose(logits, free, constrained, free) == [size - 1, 30, size - 1]


def test_the_grammar_wins_over_min_tokens_and_bad_words_if_no_token_is_left() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    sampling = SamplingParams(temperature=0, min_tokens=5, max_tokens=9, bad_words=((1,),))
    ends = frozenset({2})
    assert choose(logits, Draw(sampling, 0, [0], 1, ends, allowing(1, 2))) == [2]
    assert choose(logits, Draw(sampling, 0, [0], 1, ends, allowing(0, 1, 2))) == [0]
    all_bad = SamplingParams(temperature=0, bad_words=((0,), (1,), (2,), (3,)))
    assert choose(logits, Draw(all_bad, 0, [0], 1)) == [3]
