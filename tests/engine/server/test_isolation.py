"""The benchmark of isolation measures what it says, and one request behind long ones over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from benchmarks import isolation

from engine.server.serving import serving


@pytest.mark.slow
def test_a_short_prompt_has_its_first_token_long_before_the_long_ones_sent_before_it(tmp_path: Path) -> None:
    """Each long prompt takes 20 steps alone. They are long, so that a moment without a core matters little.

    A machine that stops the server or the client for longer may spoil one attempt.
    """
    options = ("--max-model-length", "4096", "--token-budget", "200", "--max-sequences", "8")
    shares: list[float] = []
    while len(shares) < 5 and (not shares or shares[-1] >= 1 / 4):
        with serving(tmp_path, *options, environment={"SCRIPT_STEP_SECONDS": "0.1", "SCRIPT_BLOCKS": "256"}) as server:
            server.wait_status("/ready", 200)
            short, longs = asyncio.run(isolation.short_behind_long(server.port, 4000, 0.05))
            assert server.metric("fastgen_prompt_tokens_total") == 4000 + 3999 + 5
        shares.append(short / max(longs))
    assert shares[-1] < 1 / 4, shares


def test_a_stream_that_is_not_served_fails_with_the_response(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_status("/ready", 200)
        with pytest.raises(RuntimeError, match="max_tokens"):
            asyncio.run(isolation.largest_gap(server.port, 0.01))
