"""The step loop of `ApproximateReplica`, compiled: a replica is one state record, a table of requests and four lists.

`run` and `drain` advance a replica. The lists hold rows of the table: waiting requests in order of arrival, those whose
prompt is partly computed in the order in which they began, decoding ones in no order, and those lost and those answered
since the caller last looked.

The prefix cache is a table of blocks and the chain of each request: the blocks of its prompt and answer, in order. It
is looked up when a request begins, and gets the blocks of a prompt with its first token and those of an answer at its
end.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np

from fastgen.core import chunking, step_times
from fastgen.core.step_times import StepCoefficients, StepWork

# The lists, and their counts in the state.
WAITING, PARTIAL, DECODING, LOST, ANSWERED = range(5)
NUM_LISTS: Final = 5

BLOCK_TOKENS: Final = 64  # as in the engine

# Steps kept for the fit of the step times: the first ones, then every 64th, at most `OBSERVED` between two scrapes.
OBSERVED: Final = 64
_EVERY: Final = 64
_LOOK_AHEAD: Final = 64  # steps of backlog that chunking considers, as in fastgen.core.scheduler
_MIN_PROMPT_TOKENS: Final = chunking.MIN_PROMPT_TOKENS
_ROW_MULTIPLE: Final = chunking.ROW_MULTIPLE

_SETTINGS = [*StepCoefficients._fields, "gap", "limit", "patience"]
_SIZES = ["token_budget", "max_sequences", "kv_capacity", "max_queued"]
_COUNTS = [
    "kv_tokens", "pending", "late", "steps", "prefilled", "decoded", "ended", "ended_prompt", "ended_generated",
    "rejected", "arrived_tokens", "rejected_tokens", "cancelled_tokens", "gaps", "late_gaps", "entered", "num_observed",
    "cached_tokens", "shared_tokens", "evictable",
]  # fmt: skip
# The settings of the engine (times in seconds), its clock, and its counters and gauges. `cached_tokens`: counter of
# prompt tokens found in the prefix cache; `shared_tokens`: resident tokens that several requests count but the cache
# holds once; `evictable`: cached blocks that no request uses.
STATE: Final = np.dtype(
    [(name, "f8") for name in (*_SETTINGS, "clock", "step_seconds")]
    + [(name, "i8") for name in (*_SIZES, *_COUNTS)]
    + [("num", "i8", (NUM_LISTS,)), ("observed", "f8", (OBSERVED, len(StepWork._fields) + 1))]
)
# One request. `ends`: the step of its last token; `late_before`: late steps before its first one; `met`: none after it;
# `chain`, `blocks`: place and number of its blocks in the chains; `used`: those that it uses; `hit`: its prompt tokens
# that were in the prefix cache.
REQUEST: Final = np.dtype(
    [(name, "f8") for name in ("time", "first", "end")]
    + [(name, "i8") for name in ("prompt", "generate", "left", "ends", "late_before", "met")]
    + [(name, "i8") for name in ("chain", "blocks", "used", "hit")]
)
# One block: whether it is cached, the requests that use it, and its neighbours among the evictable blocks. Row 0 is
# none: its `next` is the block that is evicted first, its `previous` the one that is evicted last.
BLOCK: Final = np.dtype([(name, "i8") for name in ("cached", "users", "previous", "next")])

_even_share: Any = numba.njit(cache=True)(chunking.even_share)
_whole_tiles: Any = numba.njit(cache=True)(chunking.whole_tiles)
_chunk_seconds: Any = numba.njit(cache=True)(step_times.chunk_seconds)
_chunk_tokens: Any = numba.njit(cache=True)(step_times.chunk_tokens)


@numba.njit(cache=True)
def run(states: Any, requests: Any, lists: Any, chains: Any, blocks: Any, rows: int, until: float) -> None:
    """Run all steps that start before `until`; the requests up to `rows` that have not entered do so at their time."""
    s = states[0]
    while s.entered < rows:
        row = s.entered
        _run_until(s, requests, lists, chains, blocks, requests[row].time)
        _enter(s, requests, lists, row)
        s.entered += 1
    _run_until(s, requests, lists, chains, blocks, until)


@numba.njit(cache=True)
def drain(states: Any, requests: Any, lists: Any, chains: Any, blocks: Any, deadline: float) -> None:
    """Finish all requests, or drop them at `deadline`."""
    s = states[0]
    while s.num[WAITING] + s.num[PARTIAL] + s.num[DECODING] > 0 and s.clock < deadline:
        if s.pending > 0:
            _step(s, requests, lists, chains, blocks)
        else:
            _decode(s, requests, lists, chains, blocks, deadline)
    for kind in (WAITING, PARTIAL, DECODING):
        for at in range(s.num[kind]):
            _push(s, lists, LOST, lists[kind, at])
        s.num[kind] = 0


@numba.njit(cache=True)
def cancel(states: Any, requests: Any, lists: Any, now: float) -> None:
    """Drop the waiting requests whose clients gave up."""
    _cancel(states[0], requests, lists, now)


@numba.njit(cache=True)
def _run_until(s: Any, requests: Any, lists: Any, chains: Any, blocks: Any, now: float) -> None:
    while s.clock < now:
        if s.pending > 0:
            _step(s, requests, lists, chains, blocks)
        elif s.num[DECODING] > 0:
            _decode(s, requests, lists, chains, blocks, now)
        else:
            s.clock = now


@numba.njit(cache=True)
def _enter(s: Any, requests: Any, lists: Any, row: int) -> None:
    """Queue or reject a request."""
    r = requests[row]
    s.arrived_tokens += r.prompt
    if s.num[WAITING] >= s.max_queued:
        s.rejected += 1
        s.rejected_tokens += r.prompt
        _push(s, lists, LOST, row)
        return
    s.clock = max(s.clock, r.time)
    r.left = r.prompt
    _push(s, lists, WAITING, row)
    s.pending += r.prompt


@numba.njit(cache=True)
def _step(s: Any, requests: Any, lists: Any, chains: Any, blocks: Any) -> None:
    """Run one step with all decodes and a share of the pending prompts."""
    _cancel(s, requests, lists, s.clock)
    decodes = s.num[DECODING]
    if s.pending == 0 and decodes == 0:
        return
    share, within, alone = _share(s, requests, lists, decodes)
    prompts, pairs = _fill(s, requests, lists, chains, blocks, share, within, alone)
    tokens = decodes + prompts
    s.kv_tokens += tokens
    _evict(s, blocks)
    seconds = s.base + s.token * tokens + s.kv_token * s.kv_tokens + s.context_pair * pairs
    s.clock += seconds
    _record(s, 1, decodes, tokens, pairs, seconds, int(seconds > s.limit))
    _end_decodes(s, requests, lists, chains, blocks)
    kept = 0
    for at in range(s.num[PARTIAL]):
        row = lists[PARTIAL, at]
        if requests[row].left > 0:
            lists[PARTIAL, kept] = row
            kept += 1
        else:
            _first_token(s, requests, lists, chains, blocks, row)
    s.num[PARTIAL] = kept


@numba.njit(cache=True)
def _cancel(s: Any, requests: Any, lists: Any, now: float) -> None:
    gone = 0
    while gone < s.num[WAITING] and now - requests[lists[WAITING, gone]].time > s.patience:
        row = lists[WAITING, gone]
        prompt = requests[row].prompt
        s.pending -= prompt
        s.cancelled_tokens += prompt
        s.ended += 1
        s.ended_prompt += prompt
        _push(s, lists, LOST, row)
        gone += 1
    if gone:
        s.num[WAITING] -= gone
        for at in range(s.num[WAITING]):
            lists[WAITING, at] = lists[WAITING, at + gone]


@numba.njit(cache=True)
def _costs(s: Any) -> Any:
    return StepCoefficients(s.base, s.token, s.kv_token, s.context_pair)


@numba.njit(cache=True)
def _share(s: Any, requests: Any, lists: Any, decodes: int) -> tuple[int, float, float]:
    """Return the most prompt tokens of the next step, their longest time, and the time of the step without them."""
    room = s.token_budget - decodes
    if room < 1:
        return 0, 0.0, 0.0
    free = s.max_sequences - decodes - s.num[PARTIAL]
    backlog = s.pending
    if free < s.num[WAITING]:
        backlog = 0
        for at in range(s.num[PARTIAL]):
            backlog += requests[lists[PARTIAL, at]].left
        if free > 0:
            backlog += requests[lists[WAITING, 0]].left * free
    backlog = min(backlog, room * _LOOK_AHEAD)
    if backlog == 0:
        return 0, 0.0, 0.0
    most, seconds, alone = room, math.inf, 0.0
    if decodes:
        kv_tokens = s.kv_tokens
        for at in range(s.num[PARTIAL]):
            r = requests[lists[PARTIAL, at]]
            kv_tokens -= r.prompt - r.left
        costs = _costs(s)
        alone = s.base + s.token * decodes + s.kv_token * (kv_tokens + decodes)
        seconds = s.gap - alone
        bound = max(_MIN_PROMPT_TOKENS, _chunk_tokens(costs, seconds, 0))
        seconds = max(seconds, _chunk_seconds(costs, 0, _MIN_PROMPT_TOKENS))
        if bound < min(room, backlog):
            most = min(room, _whole_tiles(decodes, bound, 0))
    share = _even_share(backlog, most)
    if decodes and share < backlog:
        share = min(most, share + -(decodes + share) % _ROW_MULTIPLE)
    return int(min(room, share, max(0, s.kv_capacity - s.kv_tokens + s.shared_tokens - decodes))), seconds, alone


@numba.njit(cache=True)
def _fill(
    s: Any, requests: Any, lists: Any, chains: Any, blocks: Any, share: int, seconds: float, alone: float
) -> tuple[int, int]:
    """Compute `share` prompt tokens, or those that fit in `seconds`; return them and their context pairs.

    Half is for the oldest prompt, the rest for the shortest ones. The first one has at least its least tokens, see
    `fastgen.core.chunking.Allowance`; without prompts the step takes `alone` seconds.
    """
    costs, given, pairs = _costs(s), share, 0
    only, least_tokens, taken = -1, 0, 0  # taken: tokens of the first prompt
    places = s.max_sequences - s.num[DECODING] - s.num[PARTIAL]
    oldest = -1
    for at in range(s.num[PARTIAL]):
        if oldest < 0 or lists[PARTIAL, at] < oldest:
            oldest = lists[PARTIAL, at]
    waiting = -1
    if s.num[WAITING] > 0 and places > 0 and (oldest < 0 or lists[WAITING, 0] < oldest):
        oldest, waiting = lists[WAITING, 0], 0
    most, within = -(-share // 2), seconds / 2
    while share > 0 and oldest >= 0:
        r = requests[oldest]
        cached, unused = 0, 0  # tokens of its prompt that it finds in the prefix cache, and those that nobody uses
        if waiting >= 0:
            cached, unused = _find(requests, chains, blocks, oldest)
            if unused and unused + share > s.kv_capacity - s.kv_tokens + s.shared_tokens - s.num[DECODING]:
                break
        start, size = r.prompt - r.left + cached, min(most, r.left - cached)
        if only < 0:
            longest = alone + 2 * _chunk_seconds(costs, start, 1)
            only, least_tokens = oldest, min(_MIN_PROMPT_TOKENS, _chunk_tokens(costs, longest, start))
        in_time = _chunk_tokens(costs, within, start)
        if only == oldest:
            in_time = max(in_time, least_tokens)
        is_full = in_time < size and most == share
        if is_full:
            # Products compute the rows of a step in tiles; attention computes those of a chunk.
            before = taken if only == oldest else 0
            is_mostly_attention = s.context_pair * (start - before) > s.token
            others = 0 if is_mostly_attention else s.num[DECODING] + given - share - before
            in_time = max(0, _whole_tiles(others, before + in_time, 0) - before)
        size = min(size, in_time)
        if size > 0:
            if waiting >= 0:
                _begin(s, requests, lists, chains, blocks, waiting)
                places -= 1
            least_tokens = least_tokens - size if only == oldest else 0
            taken += size if only == oldest else 0
            r.left -= size
            s.pending -= size
            share -= size
            seconds -= _chunk_seconds(costs, start, size)
            pairs += (size - 1) * start
        if is_full:
            break
        # From now on, the prompt with the fewest tokens left; a waiting one only if there is a place for it.
        most, within, oldest, waiting, least = share, seconds, -1, -1, 0
        for at in range(s.num[PARTIAL]):
            left = requests[lists[PARTIAL, at]].left
            if left > 0 and (oldest < 0 or left < least):
                oldest, least = lists[PARTIAL, at], left
        if places > 0 and share > 0:
            for at in range(s.num[WAITING]):
                left = requests[lists[WAITING, at]].left
                if oldest < 0 or left < least:
                    oldest, least, waiting = lists[WAITING, at], left, at
    return given - share, pairs


@numba.njit(cache=True)
def _begin(s: Any, requests: Any, lists: Any, chains: Any, blocks: Any, place: int) -> None:
    """Move a waiting request to those that are partly computed."""
    row = lists[WAITING, place]
    _use_cached(s, requests, chains, blocks, row)
    _push(s, lists, PARTIAL, row)
    s.num[WAITING] -= 1
    for at in range(place, s.num[WAITING]):
        lists[WAITING, at] = lists[WAITING, at + 1]


@numba.njit(cache=True)
def _decode(s: Any, requests: Any, lists: Any, chains: Any, blocks: Any, now: float) -> None:
    """Run decode-only steps, each a little longer than the one before, that start before `now`."""
    decodes = s.num[DECODING]
    ends = requests[lists[DECODING, 0]].ends
    for at in range(decodes):
        ends = min(ends, requests[lists[DECODING, at]].ends)
    first = s.base + s.token * decodes + s.kv_token * (s.kv_tokens + decodes)
    growth = s.kv_token * decodes
    steps = min(ends - s.steps, _steps_within(now - s.clock, first, growth))
    seconds = steps * first + growth * steps * (steps - 1) / 2
    if growth > 0:
        late = steps - min(steps, max(0, math.floor((s.limit - first) / growth) + 1))
    else:
        late = 0 if first <= s.limit else steps
    s.clock += seconds
    s.kv_tokens += steps * decodes
    _evict(s, blocks)
    _record(s, steps, decodes, steps * decodes, 0, seconds, late)
    _end_decodes(s, requests, lists, chains, blocks)


@numba.njit(cache=True)
def _steps_within(seconds: float, first: float, growth: float) -> int:
    """Return how many steps start within `seconds`; the first takes `first`, each next one `growth` more."""
    if growth * seconds <= 1e-9 * first * first:
        return max(1, math.ceil(seconds / first))
    half = first - growth / 2
    return max(1, math.ceil((-half + math.sqrt(half * half + 2 * growth * seconds)) / growth))


@numba.njit(cache=True)
def _record(s: Any, steps: int, decodes: int, tokens: int, pairs: int, seconds: float, late: int) -> None:
    if s.num_observed < OBSERVED and (s.steps < OBSERVED or s.steps // _EVERY != (s.steps + steps) // _EVERY):
        s.observed[s.num_observed, 0] = tokens // steps
        s.observed[s.num_observed, 1] = s.kv_tokens
        s.observed[s.num_observed, 2] = pairs
        s.observed[s.num_observed, 3] = seconds / steps
        s.num_observed += 1
    s.steps += steps
    s.step_seconds += seconds
    s.prefilled += tokens - steps * decodes
    s.decoded += steps * decodes
    s.gaps += steps * decodes
    s.late_gaps += late * decodes
    s.late += late


@numba.njit(cache=True)
def _first_token(s: Any, requests: Any, lists: Any, chains: Any, blocks: Any, row: int) -> None:
    r = requests[row]
    r.first, r.late_before = s.clock, s.late
    _publish(s, requests, chains, blocks, row, r.prompt)
    r.ends = s.steps + r.generate - 1
    if r.generate == 1:
        _end(s, requests, lists, chains, blocks, row)
    else:
        _push(s, lists, DECODING, row)


@numba.njit(cache=True)
def _end_decodes(s: Any, requests: Any, lists: Any, chains: Any, blocks: Any) -> None:
    kept = 0
    for at in range(s.num[DECODING]):
        row = lists[DECODING, at]
        if requests[row].ends <= s.steps:
            _end(s, requests, lists, chains, blocks, row)
        else:
            lists[DECODING, kept] = row
            kept += 1
    s.num[DECODING] = kept


@numba.njit(cache=True)
def _end(s: Any, requests: Any, lists: Any, chains: Any, blocks: Any, row: int) -> None:
    r = requests[row]
    _publish(s, requests, chains, blocks, row, r.prompt + r.generate - 1)
    _release(s, requests, chains, blocks, row)
    s.kv_tokens -= r.prompt + r.generate - 1
    s.ended += 1
    s.ended_prompt += r.prompt
    s.ended_generated += r.generate
    r.end, r.met = s.clock, int(s.late == r.late_before)
    _push(s, lists, ANSWERED, row)


@numba.njit(cache=True)
def _push(s: Any, lists: Any, kind: int, row: int) -> None:
    lists[kind, s.num[kind]] = row
    s.num[kind] += 1


@numba.njit(cache=True)
def _find(requests: Any, chains: Any, blocks: Any, row: int) -> tuple[int, int]:
    """Return the prompt tokens of a waiting request that are cached, and those of them that no request uses.

    At least one token is left to compute.
    """
    r, found, unused = requests[row], 0, 0
    while found < min(r.blocks, (r.prompt - 1) // BLOCK_TOKENS):
        block = blocks[chains[r.chain + found]]
        if not block.cached:
            break
        found += 1
        unused += block.users == 0
    return found * BLOCK_TOKENS, unused * BLOCK_TOKENS


@numba.njit(cache=True)
def _use_cached(s: Any, requests: Any, chains: Any, blocks: Any, row: int) -> None:
    """Have a request that begins use the cached blocks of its prompt."""
    r = requests[row]
    r.hit, _ = _find(requests, chains, blocks, row)
    r.left -= r.hit
    s.pending -= r.hit
    s.kv_tokens += r.hit
    s.cached_tokens += r.hit
    while r.used < r.hit // BLOCK_TOKENS:
        _use(s, blocks, chains[r.chain + r.used])
        r.used += 1


@numba.njit(cache=True)
def _publish(s: Any, requests: Any, chains: Any, blocks: Any, row: int, tokens: int) -> None:
    """Cache the full blocks of a request's first tokens; equal blocks that are cached already replace them."""
    r = requests[row]
    while r.used < min(r.blocks, tokens // BLOCK_TOKENS):
        _use(s, blocks, chains[r.chain + r.used])
        r.used += 1


@numba.njit(cache=True)
def _use(s: Any, blocks: Any, number: int) -> None:
    block = blocks[number]
    if block.users > 0:
        s.shared_tokens += BLOCK_TOKENS
    elif block.cached:
        _unlink(s, blocks, number)
    block.cached = 1
    block.users += 1


@numba.njit(cache=True)
def _release(s: Any, requests: Any, chains: Any, blocks: Any, row: int) -> None:
    """Release the blocks of a request, the last one first: it is evicted before those that it continues."""
    r = requests[row]
    while r.used > 0:
        r.used -= 1
        number = chains[r.chain + r.used]
        block = blocks[number]
        block.users -= 1
        if block.users > 0:
            s.shared_tokens -= BLOCK_TOKENS
        else:
            last = blocks[0].previous
            block.previous, block.next = last, 0
            blocks[last].next = blocks[0].previous = number
            s.evictable += 1


@numba.njit(cache=True)
def _evict(s: Any, blocks: Any) -> None:
    """Evict the least recently used blocks until those that are left fit beside the running requests."""
    most = max(0, s.kv_capacity - s.kv_tokens + s.shared_tokens) // BLOCK_TOKENS
    while s.evictable > most:
        number = blocks[0].next
        _unlink(s, blocks, number)
        blocks[number].cached = 0


@numba.njit(cache=True)
def _unlink(s: Any, blocks: Any, number: int) -> None:
    """Remove a block from the evictable ones."""
    block = blocks[number]
    blocks[block.previous].next = block.next
    blocks[block.next].previous = block.previous
    s.evictable -= 1
