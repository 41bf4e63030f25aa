"""Which rules have a match that ends, and which have none at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

# By rule: its alternatives, each with the symbols that it needs. Symbols that are not keys always have a match.
Needs = Mapping[str, Sequence[Sequence[str]]]


def with_an_end(needs: Needs) -> set[str]:
    """Return the symbols that have a match of finite length. It takes time in proportion to `needs`."""
    alternatives = [(rule, needed) for rule, found in needs.items() for needed in found]
    missing = [len(needed) for _, needed in alternatives]
    users: dict[str, list[int]] = defaultdict(list)
    for number, (_, needed) in enumerate(alternatives):
        for symbol in needed:
            users[symbol].append(number)
    ended = {rule for rule, needed in alternatives if not needed} | {*users} - {*needs}
    waiting = [*ended]
    while waiting:
        for number in users[waiting.pop()]:
            missing[number] -= 1
            rule = alternatives[number][0]
            if not missing[number] and rule not in ended:
                ended.add(rule)
                waiting.append(rule)
    return ended


def without_a_match(needs: Needs) -> set[str]:
    """Return the rules that nothing matches, not even a match of infinite length.

    These are rules without alternatives, and those of which each alternative needs one of them.
    """
    # A rule has no match if all of its alternatives have none, and an alternative if any of its symbols has none.
    opposite: dict[str, list[list[str]]] = {}
    for rule, alternatives in needs.items():
        names = [f"{rule} | {number}" for number in range(len(alternatives))]
        opposite[rule] = [names]
        opposite |= {
            name: [[symbol] for symbol in needed if symbol in needs]
            for name, needed in zip(names, alternatives, strict=True)
        }
    return with_an_end(opposite) & {*needs}
