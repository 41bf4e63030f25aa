"""Which deployment answers for a name."""

from __future__ import annotations

from fastgen_gateway.model_list import model_list
from fastgen_gateway.routing.client import Client
from fastgen_gateway.routing.model_table import Exposed, ModelTable

OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def test_the_oldest_deployment_has_the_models_name() -> None:
    old, new = Exposed("b", "x", "m", OLD), Exposed("a", "x", "m", NEW)
    for deployments in ((old, new), (new, old)):
        table = ModelTable(deployments)
        assert table.find("m") is old
        assert table.names() == {"m": old, "a/x": new}


def test_of_two_that_are_as_old_the_first_by_name_has_it() -> None:
    one, two = Exposed("a", "y", "m", OLD), Exposed("b", "x", "m", OLD)
    assert ModelTable([two, one]).find("m") is one


def test_namespace_and_name_always_mean_that_deployment() -> None:
    target, rival = Exposed("a", "x", "m", NEW), Exposed("b", "y", "a/x", OLD)
    table = ModelTable([target, rival])
    assert table.find("a/x") is target
    assert table.find("b/y") is rival
    assert table.names() == {"m": target, "b/y": rival}


def test_a_resources_own_name_is_not_its_models() -> None:
    assert ModelTable([Exposed("a", "x", "m", OLD)]).find("x") is None


def test_a_creation_time_that_cannot_be_read_is_listed_as_0() -> None:
    assert model_list(ModelTable([Exposed("a", "x", "m", "yesterday")]))["data"][0]["created"] == 0


class CountingClient(Client):
    """Counts the deployments that are looked at for it."""

    def may_use(self, namespace: str) -> bool:
        looks.append(namespace)
        return super().may_use(namespace)


looks: list[str] = []


def test_many_deployments_of_one_model_in_another_namespace_delay_nobody() -> None:
    """With a look at each of them for each name, a thousand would stop the picker for seconds."""
    others = [Exposed("a", f"x{number}", "m", OLD) for number in range(300)]
    own = [Exposed("b", f"x{number}", "m", NEW) for number in range(300)]
    table, client = ModelTable([*others, *own]), CountingClient("b", namespaces=frozenset(["b", "c"]))
    looks.clear()
    assert table.find("m", client) is own[0]
    assert len(looks) <= 2
    assert list(table.names(client).values()) == [*sorted(own, key=lambda each: each.name)[1:], own[0]]
    assert len(looks) <= 2 * len([*others, *own])
    looks.clear()
    table.names(client)
    assert looks == []


def test_few_lists_of_names_are_kept() -> None:
    table = ModelTable([Exposed("a", "x", "m", OLD)])
    for number in range(200):
        assert len(table.names(Client("c", namespaces=frozenset([f"n{number}"])))) == 0
    assert len(table._names) <= 64
