"""Which deployment answers for a name."""

from __future__ import annotations

from fastgen_gateway.model_list import model_list
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
