"""The queue, the settings and the log lines, without a cluster."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass

import pytest

from fastgen.logs import JSONFormatter
from fastgen_operator.runtime.settings import Settings, parse_settings
from fastgen_operator.runtime.workqueue import WorkQueue

A, B = ("space", "a"), ("space", "b")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def queue_of(clock: Clock | None = None, *, first: float = 60.0, jitter: float = 1.0) -> WorkQueue:
    return WorkQueue(first=first, limit=240.0, jitter=lambda: jitter, clock=clock or Clock(), workers=64)


async def take(queue: WorkQueue) -> tuple[str, str]:
    return await asyncio.wait_for(queue.take(), 60)


def is_idle(queue: WorkQueue) -> bool:
    return queue.oldest_wait() == 0.0


async def test_additions_before_processing_are_coalesced() -> None:
    clock = Clock()
    queue = queue_of(clock)
    for _ in range(5):
        queue.add(A)
    clock.now = 1.0
    assert await take(queue) == A
    assert is_idle(queue)


async def test_refused_keys_are_taken_last_and_not_by_all_workers() -> None:
    clock, refused = Clock(), {(f"bad{number}", "chat") for number in range(4)}
    queue = WorkQueue(
        first=60.0,
        limit=240.0,
        jitter=lambda: 1.0,
        clock=clock,
        yields=lambda key: key in refused,
        workers=4,
    )
    for key in sorted(refused):
        queue.add(key)
        clock.now += 1.0
    assert queue.oldest_wait() == 4.0
    queue.add(A)
    assert await take(queue) == A
    queue.done(A)
    taken = [await take(queue), await take(queue)]
    assert taken == [("bad0", "chat"), ("bad1", "chat")]
    waiting = asyncio.create_task(take(queue))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "a worker is kept free"
    queue.add(B)
    assert await waiting == B
    queue.done(B)
    waiting = asyncio.create_task(take(queue))
    queue.retry(taken[0])
    assert await waiting == ("bad2", "chat"), "one that ends makes room for the next"
    refused.remove(("bad3", "chat"))
    queue.add(("bad3", "chat"))
    assert await take(queue) == ("bad3", "chat"), "a changed one does not wait any longer"
    assert queue.oldest_wait() == 0.0


async def test_a_namespace_gets_half_of_the_workers_that_others_leave() -> None:
    """Each reconcile in the slow namespaces takes minutes: other namespaces have workers all the same."""
    queue = WorkQueue(first=60.0, limit=240.0, jitter=lambda: 1.0, clock=Clock(), workers=10)
    for namespace in ("slow", "slower"):
        for number in range(20):
            queue.add((namespace, str(number)))
    taken = [await take(queue) for _ in range(8)]
    assert [namespace for namespace, _ in taken] == ["slow"] * 5 + ["slower"] * 3
    waiting = asyncio.create_task(take(queue))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "two workers are kept free"
    for namespace in ("one", "two"):
        queue.add((namespace, "chat"))
    assert await waiting == ("one", "chat")
    assert await take(queue) == ("two", "chat")
    for key in (("one", "chat"), ("two", "chat"), *taken[:2]):
        queue.done(key)
    assert (await take(queue))[0] == "slow", "those that end make room for the next"


async def test_new_resources_do_not_delay_changed_ones_and_wait_for_a_limited_time() -> None:
    new = {("space", f"new{number}") for number in range(100)}
    queue = WorkQueue(
        first=60.0, limit=240.0, jitter=lambda: 1.0, clock=Clock(), is_new=lambda key: key in new, workers=64
    )
    for key in sorted(new):
        queue.add(key)
    for name in ("a", "b", "c", "d"):
        queue.add(("space", name))
    taken = [(await take(queue))[1] for _ in range(6)]
    assert taken == ["a", "b", "c", "new0", "d", "new1"]


async def test_the_only_worker_serves_each_namespace() -> None:
    queue = WorkQueue(first=60.0, limit=240.0, jitter=lambda: 1.0, clock=Clock(), workers=1)
    queue.add(A)
    queue.add(B)
    assert await take(queue) == A
    queue.done(A)
    assert await take(queue) == B


async def test_a_changed_key_does_not_wait_for_those_of_a_list_and_these_wait_for_a_limited_time() -> None:
    queue, listed = queue_of(), [("space", f"listed{number}") for number in range(5)]
    for key in listed:
        queue.add_listed(key)
    queue.add(B)
    queue.add(listed[4])
    assert [await take(queue) for _ in range(3)] == [B, listed[4], listed[0]]
    changed = [("space", f"changed{number}") for number in range(8)]
    for key in changed:
        queue.add(key)
    taken = [await take(queue) for _ in range(11)]
    assert taken == [*changed[:3], listed[1], *changed[3:6], listed[2], *changed[6:], listed[3]]
    assert is_idle(queue)


async def test_a_key_that_changes_during_its_processing_or_fails_keeps_its_place_before_those_of_a_list() -> None:
    queue = queue_of(first=0.0)
    queue.add(A)
    assert await take(queue) == A
    queue.add_listed(B)
    queue.add_listed(A)
    queue.add(A)
    queue.add_listed(A)
    queue.done(A)
    assert await take(queue) == A
    queue.retry(A)
    await asyncio.sleep(0.01)
    assert [await take(queue), await take(queue)] == [A, B]


async def test_a_resync_does_not_hasten_a_retry_but_an_event_does() -> None:
    queue = queue_of()
    queue.add(A)
    queue.retry(await take(queue))
    queue.add_idle(A)
    queue.add_idle(B)
    assert await take(queue) == B
    assert is_idle(queue)
    queue.add(A)
    assert await take(queue) == A


async def test_a_key_added_during_processing_is_processed_again_and_never_concurrently() -> None:
    clock = Clock()
    queue = queue_of(clock)
    queue.add(A)
    await take(queue)
    queue.add(A)
    queue.add(A)
    clock.now = 1.0
    assert is_idle(queue), "a resource is never reconciled concurrently"
    queue.done(A)
    assert await take(queue) == A
    queue.done(A)
    assert is_idle(queue)


async def test_the_key_that_has_waited_longest_is_taken_first() -> None:
    queue = queue_of()
    queue.add(B)
    queue.add(A)
    queue.add(B)
    assert [await take(queue), await take(queue)] == [B, A]


async def test_a_key_that_is_due_at_a_time_is_queued_then_and_only_the_last_time_counts() -> None:
    clock = Clock()
    queue = queue_of(clock)
    queue.add_after(A, 3600.0)
    queue.add_after(A, 0.0)
    queue.add_after(B, 0.0)
    queue.add_after(B, None)
    assert await take(queue) == A
    clock.now = 1.0
    assert is_idle(queue)
    # The end of a reconcile does not cancel the time of the next one.
    queue.add_after(A, 0.0)
    queue.done(A)
    assert await take(queue) == A


async def test_the_backoff_doubles_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def record(delay: float, *_: object) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(3600, lambda: None)

    queue = queue_of()
    for _ in range(5):
        queue.add(A)
        await queue.take()
        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_later", record)
            queue.retry(A)
    assert delays == [60, 120, 240, 240, 240]
    queue.add(A)
    await queue.take()
    queue.done(A)
    queue.add(A)
    await queue.take()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_later", record)
        queue.retry(A)
    assert delays[-1] == 60, "a completed reconcile resets the backoff"


async def test_a_retry_waits_at_least_for_the_given_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    queue = queue_of(first=1.0)
    queue.add(A)
    await queue.take()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, *_: delays.append(delay))
    queue.retry(A, after=17.0)
    assert delays == [17.0]


async def test_a_retry_needs_no_event_and_an_event_does_not_wait_for_the_retry() -> None:
    quick = queue_of(first=0.01, jitter=0.0)
    quick.add(A)
    await take(quick)
    quick.retry(A)
    assert await take(quick) == A
    slow = queue_of()
    slow.add(A)
    await take(slow)
    slow.retry(A)
    slow.add(A)
    assert await take(slow) == A


def test_settings_are_parsed_from_the_command_line_with_the_documented_defaults() -> None:
    assert parse_settings(["--engine-image", "e:1"]) == Settings(engine_image="e:1")
    given = parse_settings(
        ["--engine-image", "e", "--namespace", "a", "--namespace", "b", "--resync-seconds", "5", "--log-format", "json"]
    )
    assert given.namespaces == given.scopes == ("a", "b")
    assert (given.resync_seconds, given.log_format) == (5, "json")
    assert Settings(engine_image="e").scopes == (None,)


def test_the_default_lease_of_each_class_has_a_name_of_its_own() -> None:
    plain, blue = (parse_settings(["--engine-image", "e", *more]) for more in ([], ["--operator-class", "blue"]))
    assert (plain.operator_class, blue.operator_class) == (None, "blue")
    assert (plain.lease, blue.lease) == ("fastgen-operator", "fastgen-operator-blue")
    named = ["--engine-image", "e", "--operator-class", "blue", "--lease-name", "mine"]
    assert parse_settings(named).lease == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--engine-image"),
        (["--engine-image", "e", "--resync-seconds", "0"], "give a number of seconds above 0"),
        (["--engine-image", "e", "--retry-seconds", "nan"], "give a number of seconds above 0"),
        (["--engine-image", "e", "--workers", "0"], "--workers"),
        (["--engine-image", "e", "--metrics-port", "65536"], "--metrics-port: 65536: give a port, from 0 to 65535"),
        (["--engine-image", "e", "--health-port", "-1"], "--health-port: -1: give a port, from 0 to 65535"),
        (["--engine-image", "e", "--decisions-port", "http"], "--decisions-port: http: give a port, from 0 to 65535"),
        (["--engine-image", "e", "--operator-class", "Blue"], "--operator-class"),
        (["--engine-image", "e", "--operator-class", ""], "--operator-class"),
        (["--engine-image", "e", "--lease-seconds", "9"], "must be below --lease-renew-seconds, and that below"),
    ],
)
def test_invalid_settings_exit_with_code_2_and_name_the_flag(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_json_logs_hold_the_message_and_the_traceback_on_one_line() -> None:
    try:
        raise ValueError("broken\nthing")
    except ValueError as error:
        record = logging.LogRecord("op", logging.ERROR, "f", 1, "reconcile %s", ("a",), (ValueError, error, None))
    line = JSONFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["level"], parsed["logger"], parsed["message"]) == ("error", "op", "reconcile a")
    assert "broken" in parsed["traceback"]
