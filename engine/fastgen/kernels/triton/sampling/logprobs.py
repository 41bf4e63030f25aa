"""Triton kernels of log-probabilities; see `fastgen.kernels.gpu.sampling.logprobs`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.sampling.logits import CHUNK
from fastgen.kernels.gpu.sampling.logprobs import MOST_TOP
from fastgen.kernels.triton.sampling.top_tokens import VOCABULARIES, padded_chunks, top_tokens
from fastgen.kernels.triton.variant import Variant

_GROUP = 64
_WARPS = 8
_SIZES = {"CHUNK": CHUNK, "GROUP": _GROUP}


def token_logprobs(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Launch `_score_chunks` and `_score_rows`; see `fastgen.kernels.gpu.sampling.logprobs.token_logprobs`."""
    assert num_top <= MOST_TOP
    count, vocabulary = len(rows), logits.shape[1]
    num_chunks = triton.cdiv(vocabulary, CHUNK)
    packed = logits.new_empty(count, 2 + 2 * num_top, dtype=torch.float64)
    if count:
        chunk_max = logits.new_empty(count, num_chunks, dtype=torch.float32)
        chunk_sum = logits.new_empty(count, num_chunks, dtype=torch.float64)
        num_before = logits.new_empty(count, num_chunks, dtype=torch.int32)
        group_max = logits.new_empty(count, num_chunks * (CHUNK // _GROUP), dtype=torch.float32)
        groups = logits.new_empty(count, MOST_TOP, dtype=torch.int32)
        keys = logits.new_empty(count, MOST_TOP, dtype=torch.int64)
        _score_chunks[(count, num_chunks)](
            logits, rows, tokens, chunk_max, chunk_sum, num_before, group_max,
            vocabulary, num_chunks, logits.stride(0),
            **_SIZES, num_warps=_WARPS,
        )  # fmt: skip
        _score_rows[(count,)](
            logits, rows, tokens, chunk_max, chunk_sum, num_before, group_max, groups, keys, packed,
            vocabulary, num_chunks, logits.stride(0), num_top,
            **_SIZES, TOP=MOST_TOP, CHUNKS=padded_chunks(vocabulary), num_warps=_WARPS,
        )  # fmt: skip
    return packed


@triton.jit
def _score_chunks(
    logits, rows, tokens, chunk_max, chunk_sum, num_before, group_max, vocabulary, num_chunks, logits_stride,
    CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Summarise one chunk of one row: maxima, sum of exponentials, and the number of tokens that rank before one."""
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    if row < 0:
        return
    GROUPS: tl.constexpr = CHUNK // GROUP
    logits += row * logits_stride
    token = chunk * CHUNK + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    own = tl.load(tokens + index)
    own_logit = tl.load(logits + own).to(tl.float32)
    is_before = (logit > own_logit) | ((logit == own_logit) & (token < own))
    largest = tl.max(logit, 1)
    top = tl.max(largest)
    weight = tl.where(logit > float("-inf"), tl.exp(logit - top), 0.0)
    place = index * num_chunks + chunk
    tl.store(group_max + place * GROUPS + tl.arange(0, GROUPS), largest)
    tl.store(chunk_max + place, top)
    tl.store(chunk_sum + place, tl.sum(weight.to(tl.float64)))
    tl.store(num_before + place, tl.sum(is_before.to(tl.int32)))


@triton.jit(do_not_specialize=["num_top"])
def _score_rows(
    logits, rows, tokens, chunk_max, chunk_sum, num_before, group_max, groups, keys, packed,
    vocabulary, num_chunks, logits_stride, num_top,
    TOP: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of one row and find its top tokens."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    if row < 0:
        return
    logits += row * logits_stride
    packed += index * (2 + 2 * num_top)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    place = index * num_chunks + chunk
    maxima = tl.load(chunk_max + place, mask=inside, other=float("-inf"))
    sums = tl.load(chunk_sum + place, mask=inside, other=0.0)
    top = tl.max(maxima)
    scale = tl.where(sums > 0, tl.exp(maxima.to(tl.float64) - top), 0.0)
    norm = top.to(tl.float64) + tl.log(tl.sum(sums * scale))
    own_logit = tl.load(logits + tl.load(tokens + index)).to(tl.float64)
    rank = 1 + tl.sum(tl.load(num_before + place, mask=inside, other=0))
    tl.store(packed, own_logit - norm)
    tl.store(packed + 1, rank.to(tl.float64))
    if num_top > 0:
        token = top_tokens(
            logits, vocabulary, group_max + index * num_chunks * (CHUNK // GROUP), num_chunks * (CHUNK // GROUP),
            groups + index * TOP, keys + index * TOP, TOP, GROUP, CHUNKS * (CHUNK // GROUP),
        )  # fmt: skip
        logit = tl.load(logits + token, mask=token < vocabulary, other=0.0).to(tl.float64)
        order = tl.arange(0, TOP)
        tl.store(packed + 2 + order, tl.where(token < vocabulary, token, -1).to(tl.float64), mask=order < num_top)
        logprob = tl.where(token < vocabulary, logit - norm, -1.0)
        tl.store(packed + 2 + num_top + order, logprob, mask=order < num_top)


def _variants() -> Iterator[Variant]:
    """Yield both kernels for every type of logits, and for vocabularies of up to 32k, 64k, 128k, 256k, 512k tokens."""
    inputs = dict.fromkeys(("rows", "tokens", "num_before"), "*i32:16") | {"chunk_sum": "*fp64:16"}
    inputs |= dict.fromkeys(("chunk_max", "group_max"), "*fp32:16")
    inputs |= {"vocabulary": "i32:16", "num_chunks": "i32", "logits_stride": "i32:16"}
    results = {"groups": "*i32:16", "keys": "*i64:16", "packed": "*fp64:16", "num_top": "i32"}
    for dtype in ("bf16", "fp16", "fp32"):
        logits = {"logits": f"*{dtype}:16"}
        yield Variant(dtype, _score_chunks, logits | inputs, _SIZES, _WARPS)
        for vocabulary in VOCABULARIES:
            constants = _SIZES | {"TOP": MOST_TOP, "CHUNKS": padded_chunks(vocabulary)}
            yield Variant(f"{dtype}_v{vocabulary}", _score_rows, logits | inputs | results, constants, _WARPS)


VARIANTS = tuple(_variants())
