"""The ring in shared memory, and the messages in it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
from benchmarks.rank_steps import STEPS_BY_NAME

from fastgen.model.step_input import StepInput
from fastgen.runner.ranks.messages import MessageKind, pack, unpack
from fastgen.runner.ranks.ring import Ring, RingFiles
from support.waiting import HANG_SECONDS

CAPACITY = 64


def keep_waiting() -> None:
    """Never give up."""


@pytest.fixture
def files() -> Iterator[RingFiles]:
    made = RingFiles.create(3, CAPACITY)
    yield made
    made.close()


def test_every_reader_gets_every_message_in_order_whatever_its_length(files: RingFiles) -> None:
    rng = random.Random(0)
    lengths = [0, 1, CAPACITY - 1, CAPACITY, 10 * CAPACITY, *(rng.randint(0, 3 * CAPACITY) for _ in range(300))]
    messages = [np.arange(start, start + length, dtype=np.int32) for start, length in enumerate(lengths)]
    read: list[list[np.ndarray]] = [[] for _ in files.wakes]

    def take(reader: int) -> None:
        ring = Ring(files)
        read[reader] += [ring.receive(reader) for _ in messages]

    readers = [threading.Thread(target=take, args=(reader,), daemon=True) for reader in range(3)]
    for reader in readers:
        reader.start()
    ring = Ring(files)
    for message in messages:
        ring.publish(message, keep_waiting)
    for reader in readers:
        reader.join(HANG_SECONDS)
    for found in read:
        assert len(found) == len(messages)
        assert all(np.array_equal(one, other) for one, other in zip(found, messages, strict=True))


def test_a_writer_without_room_gives_up_when_its_check_fails(files: RingFiles) -> None:
    class Ended(Exception):
        """A reader has ended."""

    def check() -> None:
        raise Ended

    ring = Ring(files)
    ring.publish(np.zeros(CAPACITY - 1, np.int32), check)  # with its length it fills the ring
    with pytest.raises(Ended):
        ring.publish(np.zeros(1, np.int32), check)


def random_step(rng: np.random.Generator) -> StepInput:
    def array(*shape: int) -> np.ndarray:
        return rng.integers(-1, 1 << 31, shape, dtype=np.int32)

    shapes = {
        "swap_out": lambda n: (n, 2),
        "swap_in": lambda n: (n, 2),
        "table_updates": lambda n: (3, n),
        "window_updates": lambda n: (3, n),
        "state_saves": lambda n: (n, 3),
    }
    names = [field.name for field in fields(StepInput) if field.name not in ("new_rows", "num_decodes")]
    values = {name: array(*shapes.get(name, lambda n: (n,))(int(rng.integers(0, 9)))) for name in names}
    return StepInput(new_rows=(), num_decodes=int(rng.integers(0, 99)), **values)


def assert_arrives_as_it_was_sent(step: StepInput) -> None:
    message = pack(step)
    assert message.dtype == np.int32
    assert message[0] == MessageKind.STEP
    found = unpack(message)
    assert (found.num_decodes, found.new_rows) == (step.num_decodes, ())
    for field in fields(StepInput):
        assert np.array_equal(getattr(found, field.name), getattr(step, field.name)), field.name


def test_a_step_without_its_new_rows_arrives_as_it_was_sent() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert_arrives_as_it_was_sent(random_step(rng))


@pytest.mark.parametrize("name", STEPS_BY_NAME)
def test_the_steps_of_the_benchmark_arrive_as_they_were_sent(name: str) -> None:
    assert_arrives_as_it_was_sent(STEPS_BY_NAME[name])
