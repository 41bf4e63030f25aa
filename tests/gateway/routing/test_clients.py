"""Which client a key belongs to, what it may use, and how its tokens and requests are counted."""

from __future__ import annotations

import pytest

from fastgen_gateway.routing.access import Access, Clients
from fastgen_gateway.routing.client import Client, ClientTable
from fastgen_gateway.routing.client_limits import ClientLimits
from fastgen_gateway.routing.held_requests import Held, HeldRequests, HoldLimits
from fastgen_gateway.routing.model_table import Exposed, ModelTable
from fastgen_gateway.routing.refusal import Refusal
from fastgen_gateway.routing.request_body import RequestBody

KEY = ("default", "m")
OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


class Bench:
    """Limits with a clock that the test sets."""

    def __init__(self, *clients: Client) -> None:
        self.now = 100.0
        self.limits = ClientLimits(lambda: self.now)
        self.limits.set_clients(clients)

    def charged(self, client: Client, tokens: int) -> int:
        charged = self.limits.admit(client, tokens)
        assert isinstance(charged, int)
        return charged

    def refusal(self, client: Client, tokens: int = 1) -> Refusal:
        refused = self.limits.admit(client, tokens)
        assert isinstance(refused, Refusal)
        return refused


def test_a_key_belongs_to_its_client() -> None:
    one, two = Client("one"), Client("two")
    table = ClientTable([("a", one), ("b", one), ("c", two)])
    assert (len(table), set(table.clients)) == (3, {"one", "two"})
    for key, client in (("a", one), ("b", one), ("c", two)):
        for scheme in ("Bearer", "bearer", "BEARER"):
            found = table.identify(f"{scheme} {key} ")
            assert found is not None
            assert found.client is client
    for value in ("", "a", "Bearer", "Bearer d", "Basic a", "Bearer a b", "Bearer \udcff"):
        assert table.identify(value) is None


def test_two_clients_cannot_have_the_same_key() -> None:
    with pytest.raises(ValueError, match="the clients one and two have the same key; give each its own"):
        ClientTable([("a", Client("one")), ("a", Client("two"))])
    ClientTable([("a", Client("one")), ("a", Client("one"))])


def test_without_clients_everybody_may_send_requests_and_with_none_left_nobody() -> None:
    access = Access(lambda: 0.0)
    assert access.identify(None) is None
    access.set_clients(Clients(ClientTable([]), {}))
    refused = access.identify("Bearer a")
    assert isinstance(refused, Refusal)
    assert refused.status == 401


def test_the_key_of_a_deployment_comes_before_that_of_its_namespace() -> None:
    access = Access(lambda: 0.0)
    access.set_clients(Clients(ClientTable([]), {"team": "a", "team.chat": "b", "other.chat": "c"}))
    assert access.engine_key(("team", "chat")) == "b"
    assert access.engine_key(("team", "code")) == "a"
    assert access.engine_key(("other", "chat")) == "c"
    assert access.engine_key(("other", "code")) is None


def test_tokens_come_back_within_a_minute() -> None:
    client = Client("c", tokens_per_minute=600)
    bench = Bench(client)
    assert bench.limits.admit(client, 600) == 600
    assert bench.refusal(client, 10).retry_after == 1
    assert bench.refusal(client, 300).retry_after == 30
    bench.now += 30
    assert bench.limits.admit(client, 300) == 300
    bench.now += 3600
    assert bench.limits.admit(client, 600) == 600
    assert bench.refusal(client), "no more than those of a minute are saved"


def test_a_prompt_beyond_a_minutes_tokens_takes_those_and_the_rest_once_it_has_ended() -> None:
    client = Client("c", tokens_per_minute=600)
    bench = Bench(client)
    charged = bench.charged(client, 6000)
    assert charged == 600
    assert bench.refusal(client, 6000).retry_after == 60
    bench.limits.correct("c", 6000 - charged)
    assert bench.refusal(client).retry_after == 541
    bench.now += 600
    assert bench.limits.admit(client, 6000) == 600


def test_a_prompt_that_is_estimated_too_high_pays_no_debt_of_others() -> None:
    client = Client("c", tokens_per_minute=1000)
    bench = Bench(client)
    small = [bench.charged(client, 1) for _ in range(20)]
    bench.now += 2
    padded = bench.charged(client, 17 << 18)
    assert sum(small) == 20
    for charged in small:
        bench.limits.correct("c", 8000 - charged)
    bench.limits.correct("c", 100 - padded)
    assert bench.refusal(client).retry_after == 547, "ten minutes of debt, less 900 tokens that the padded prompt took"


def test_what_a_response_uses_is_paid_before_the_next_request() -> None:
    client = Client("c", tokens_per_minute=600)
    bench = Bench(client)
    assert bench.limits.admit(client, 100) == 100
    bench.limits.correct("c", 1100)
    assert bench.refusal(client).retry_after == 61
    bench.limits.correct("c", -700)
    assert bench.limits.admit(client, 100) == 100


def test_no_response_puts_a_client_into_debt_for_more_than_ten_minutes() -> None:
    client = Client("c", tokens_per_minute=600)
    bench = Bench(client)
    bench.limits.correct("c", 10**12)
    assert bench.refusal(client).retry_after == 601
    bench.limits.correct("c", -(10**12))
    assert bench.limits.admit(client, 600) == 600
    assert bench.refusal(client)


def test_a_client_has_a_number_of_requests_at_a_time() -> None:
    client = Client("c", concurrent_requests=2)
    bench = Bench(client)
    assert bench.limits.admit(client, 10**9) == 0
    assert bench.limits.admit(client, 1) == 0
    assert bench.refusal(client).code == "concurrent_requests_exceeded"
    assert bench.limits.num_requests() == {"c": 2}
    bench.limits.end(client)
    assert bench.limits.admit(client, 1) == 0


def test_a_refused_request_is_not_counted() -> None:
    client = Client("c", tokens_per_minute=100, concurrent_requests=1)
    bench = Bench(client)
    assert bench.limits.admit(client, 50) == 50
    assert bench.refusal(client, 50).code == "concurrent_requests_exceeded"
    bench.limits.end(client)
    assert bench.refusal(client, 51).code == "tokens_per_minute_exceeded"
    assert bench.limits.admit(client, 50) == 50


def test_a_changed_limit_keeps_what_is_used() -> None:
    before = Client("c", tokens_per_minute=600, concurrent_requests=3)
    bench = Bench(before)
    assert bench.limits.admit(before, 500) == 500
    after = Client("c", tokens_per_minute=1200, concurrent_requests=1)
    bench.limits.set_clients([after])
    assert bench.refusal(after).code == "concurrent_requests_exceeded"
    bench.limits.end(before)
    assert bench.refusal(after, 101).code == "tokens_per_minute_exceeded"
    assert bench.limits.admit(after, 100) == 100
    lower = Client("c", tokens_per_minute=60)
    bench.now += 3600
    bench.limits.set_clients([lower])
    assert bench.limits.admit(lower, 60) == 60
    assert bench.refusal(lower).code == "tokens_per_minute_exceeded"
    unlimited = Client("c")
    bench.limits.set_clients([unlimited])
    assert bench.limits.admit(unlimited, 10**9) == 0
    bench.limits.set_clients([lower])
    assert bench.limits.admit(lower, 60) == 60, "a new limit begins with the tokens of a minute"


def test_a_client_that_is_gone_is_forgotten() -> None:
    client = Client("c", tokens_per_minute=600, concurrent_requests=1)
    bench = Bench(client)
    assert bench.limits.admit(client, 600) == 600
    bench.limits.set_clients([])
    assert bench.limits.num_requests() == {}
    bench.limits.correct("c", 5)
    bench.limits.set_clients([client])
    bench.limits.end(client)
    assert bench.limits.num_requests() == {"c": 0}
    assert bench.limits.admit(client, 600) == 600


def test_a_name_means_the_oldest_model_that_the_client_may_use() -> None:
    theirs, ours = Exposed("theirs", "x", "m", OLD), Exposed("ours", "x", "m", NEW)
    table = ModelTable([ours, theirs])
    restricted = Client("c", namespaces=frozenset({"ours"}))
    for client, found in ((None, theirs), (Client("c"), theirs), (restricted, ours)):
        assert table.find("m", client) is found
    assert table.names(restricted) == {"m": ours}
    assert table.find("theirs/x", restricted) is None
    assert table.find("ours/x", restricted) is ours


def held(number: int, priority: int = 0) -> Held:
    return Held(KEY, RequestBody("m", 1, 1, ()), float(number), Client("c", priority=priority))


def test_held_requests_leave_by_priority_and_then_in_their_order() -> None:
    queue = HeldRequests(HoldLimits())
    requests = [held(0, 5), held(1, 5), held(2, -1), held(3), held(4, -1)]
    for each in requests:
        assert queue.add(each) is None
    assert queue.oldest(KEY) == 0.0
    left = []
    while (first := queue.first(KEY)) is not None:
        queue.remove(first)
        left.append(first.time)
    assert left == [2, 4, 3, 0, 1]
    assert queue.keys() == ()


def test_a_request_of_a_low_precedence_expires_behind_others() -> None:
    queue = HeldRequests(HoldLimits(seconds=10))
    for each in (held(0, 5), held(8, 0), held(1, 5)):
        assert queue.add(each) is None
    assert [each.time for each in queue.expired(11.0)] == [0, 1]
    assert [each.time for each in queue.expired(11.0)] == []
    assert queue.total.requests == 1
