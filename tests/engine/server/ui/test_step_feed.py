"""Watchers get the newest steps and delay nothing. Without a watcher, the engine sends no traces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from fastgen.core.stats import SchedulerStats, StepStats, StepTrace
from fastgen.core.step_times import StepCoefficients
from fastgen.link.messages import StepReport
from fastgen.server.http.api_error import APIError
from fastgen.server.ui import step_feed
from fastgen.server.ui.step_feed import StepFeed, Update


def report(prompt_tokens: int) -> StepReport:
    trace = StepTrace(decodes=["a"], prompts=[("b", prompt_tokens)], queue=[("c", 9)], blocks=[("a", 2)])
    return StepReport([], StepStats(step_seconds=0.5), SchedulerStats(num_running=2), StepCoefficients(), trace)


def first_update(updates: AsyncGenerator[Update]) -> asyncio.Task[Update]:
    async def following() -> Update:
        return await anext(updates)

    return asyncio.create_task(following())


async def begin(feed: StepFeed, switched: list[bool]) -> tuple[AsyncGenerator[Update], asyncio.Task[Update]]:
    updates = feed.watch(switched.append, batch_seconds=0.0)
    waiting = first_update(updates)
    await asyncio.sleep(0)
    return updates, waiting


async def test_the_engine_traces_from_the_first_watch_to_the_end_of_the_last() -> None:
    feed, switched = StepFeed(), list[bool]()
    feed.record(report(1))
    assert switched == []
    first, waiting_first = await begin(feed, switched)
    second, waiting_second = await begin(feed, switched)
    feed.record(report(7))
    for waiting in (waiting_first, waiting_second):
        update = await waiting
        assert [(step.number, step.prompts) for step in update.steps] == [(1, [("b", 7)])]
        assert (update.state["num_running"], update.queue, update.blocks) == (2, [("c", 9)], [("a", 2)])
    await first.aclose()
    assert False not in switched
    await second.aclose()
    assert switched == [True, True, False]


async def test_a_slow_watcher_gets_the_newest_steps_and_how_many_it_missed() -> None:
    feed = StepFeed()
    updates, waiting = await begin(feed, [])
    feed.record(report(0))
    await waiting
    most = step_feed._MOST_PENDING
    for tokens in range(1, most + 11):  # never waits
        feed.record(report(tokens))
    update = await anext(updates)
    assert [step.prompts[0][1] for step in update.steps] == list(range(11, most + 11))
    assert update.dropped == 10
    feed.record(report(5))
    assert (await anext(updates)).dropped == 0
    await updates.aclose()


async def test_a_report_without_a_step_updates_the_state_only() -> None:
    feed = StepFeed()
    updates, waiting = await begin(feed, [])
    trace = StepTrace(decodes=[], prompts=[], queue=[], blocks=[])
    feed.record(StepReport([], StepStats(), SchedulerStats(num_waiting=3), StepCoefficients(), trace))
    update = await waiting
    assert (update.steps, update.state["num_waiting"]) == ([], 3)
    await updates.aclose()


async def test_closing_the_feed_ends_every_watch() -> None:
    feed, switched = StepFeed(), list[bool]()
    _, waiting = await begin(feed, switched)
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    assert switched == [True, False]


async def test_the_number_of_watchers_is_limited() -> None:
    feed = StepFeed()
    open_watches = [await begin(feed, []) for _ in range(step_feed._MOST_WATCHERS)]
    with pytest.raises(APIError, match="too many watchers"):
        await anext(feed.watch(lambda _on: None))
    feed.close()
    for _, waiting in open_watches:
        with pytest.raises(StopAsyncIteration):
            await waiting
