"""What a list or watch that fails means for the namespaces."""

from __future__ import annotations

from fastgen_operator.kinds import JOB, POD
from fastgen_operator.kube.sources import ESSENTIAL, Sources


def listed(sources: Sources, namespace: str) -> None:
    for kind in ESSENTIAL:
        sources.succeeded((kind, namespace), "list")


def test_a_namespace_is_served_when_all_is_listed_from_which_replicas_are_counted_whatever_becomes_of_others() -> None:
    sources = Sources(("one", "two"))
    for kind in ESSENTIAL:
        assert not sources.serves_any()
        sources.succeeded((kind, "one"), "list")
    sources.failed((POD, "two"), "list", "gone")
    assert sources.serves_any()
    assert (sources.serves("one"), sources.serves("two")) == (True, False)
    assert not sources.all_fail()


def test_replicas_are_held_while_an_essential_kind_of_their_namespace_fails() -> None:
    sources = Sources(("one", "two"))
    listed(sources, "one")
    listed(sources, "two")
    sources.failed((JOB, "one"), "list", "no right")
    assert not sources.is_stale("one")
    sources.failed((POD, "one"), "watch", "no right")
    assert (sources.is_stale("one"), sources.is_stale("two")) == (True, False)
    assert sources.serves("one"), "what was listed once is still known"
    assert sources.failures() == {(JOB, "one"): "no right", (POD, "one"): "no right"}
    sources.succeeded((POD, "one"), "watch")
    assert not sources.is_stale("one")


def test_a_kind_whose_crd_was_removed_does_not_fail_any_more() -> None:
    shown: list[bool] = []
    sources = Sources((None,), lambda _, fails: shown.append(fails))
    sources.failed((JOB, None), "list", "no webhook")
    sources.failed((JOB, None), "list", "no webhook")
    sources.forget((JOB,))
    assert shown == [True, False]
    assert sources.first_failure() == ""
