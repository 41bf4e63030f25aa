"""Which replica knows which prefixes."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from fastgen_gateway.routing import prefix_index
from fastgen_gateway.routing.prefix_index import MOST_GONE, PrefixIndex


def test_a_replica_matches_as_many_leading_blocks_as_it_was_sent() -> None:
    index = PrefixIndex(100)
    index.add([1, 2, 3], "a")
    index.add([1, 2], "b")
    index.add([1, 7], "c")
    assert index.matches([1, 2, 3, 4]) == {"a": 3, "b": 2, "c": 1}
    assert index.matches([2, 3]) == {"a": 2, "b": 1}
    assert index.matches([9]) == {}


def test_the_least_recently_sent_blocks_are_forgotten_and_the_last_ones_of_a_prompt_first() -> None:
    index = PrefixIndex(4)
    index.add([1, 2], "a")
    index.add([3, 4], "b")
    index.add([1, 2], "a")
    index.add([5], "b")
    assert index.matches([1, 2]) == {"a": 2}
    assert index.matches([3, 4]) == {"b": 1}
    assert len(index) == 4


def test_a_replica_that_is_gone_is_forgotten_and_its_place_used_again() -> None:
    index = PrefixIndex(100)
    for name in ("a", "b", "c"):
        index.add([1], name)
    index.forget("b")
    assert index.matches([1]) == {"a": 1, "c": 1}
    index.add([2], "d")
    assert index.matches([1]) == {"a": 1, "c": 1}
    assert index.matches([2]) == {"d": 1}
    for name in ("a", "c", "d", "never"):
        index.forget(name)
    assert len(index) == 0


def test_replicas_that_come_and_go_leave_nothing_behind() -> None:
    """The bits of those that are gone are cleared bit by bit: all at once would take as long as the index is large."""
    index = PrefixIndex(10_000)
    index.add(range(5000), "stays")
    for number in range(10 * MOST_GONE):
        index.add([1, 2, 10_000 + number], f"r{number}")
        assert index.matches([1, 2, 3]) == {"stays": 3, f"r{number}": 2}
        index.forget(f"r{number}")
        assert index.matches([1, 2, 3]) == {"stays": 3}
        assert index.matches([10_000 + number]) == {}
    assert max(index._replicas.values()).bit_length() <= 3 * MOST_GONE
    assert len(index) < 5000 + 3 * MOST_GONE


@given(
    st.lists(st.tuples(st.none() | st.lists(st.integers(0, 5), max_size=5), st.sampled_from("abc")), max_size=20),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_matches_are_those_of_a_search_block_by_block(
    sent: list[tuple[list[int] | None, str]], asked: list[int]
) -> None:
    """None stands for a replica that goes."""
    index, known = PrefixIndex(1000), {name: set[int]() for name in "abc"}
    with patch.object(prefix_index, "MOST_GONE", 2), patch.object(prefix_index, "_SWEPT", 1):
        for blocks, name in sent:
            if blocks is None:
                index.forget(name)
                known[name].clear()
            else:
                index.add(blocks, name)
                known[name] |= set(blocks)
    expected = {}
    for name, having in known.items():
        count = next((number for number, block in enumerate(asked) if block not in having), len(asked))
        if count:
            expected[name] = count
    assert index.matches(asked) == expected
