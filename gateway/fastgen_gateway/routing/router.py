"""The picker's state: models, replicas and held requests, and what happens to a request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastgen_gateway.routing.arrival_rate import ArrivalRate
from fastgen_gateway.routing.choice import ranked
from fastgen_gateway.routing.client import Client
from fastgen_gateway.routing.held_requests import Held, HeldRequests, HoldLimits
from fastgen_gateway.routing.model_table import Exposed, ModelTable
from fastgen_gateway.routing.prefix_index import PrefixIndex
from fastgen_gateway.routing.refusal import (
    Refusal,
    gateway_draining,
    held_too_long,
    hold_displaced,
    no_replica_of_pool,
    unknown_model,
)
from fastgen_gateway.routing.replica import Replica, Sent
from fastgen_gateway.routing.request_body import RequestBody
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.kinds import Key

# Prefix hashes of all models together: about 60 MB. Each model that has replicas gets an equal share.
_MOST_PREFIXES: Final = 400_000
# Deployments in one answer of `/demand`. Requests wait while it is written, for about 5 ms.
DEMAND_PAGE: Final = 1000


@dataclass(slots=True)
class _Fleet:
    """The replicas of one deployment.

    Attributes:
        model: the name under which they serve their model.
        arrivals: how often requests arrive.
        last: when a request arrived or ended; None if none did.
        in_flight: number of requests that were sent and have not ended, to replicas that are gone too.
        canaries: addresses of the canary's replicas.
        canary_percent: the canary's share of the requests.
        canary_due: percent of a request that the canary is owed.
    """

    model: str
    arrivals: ArrivalRate = field(default_factory=ArrivalRate)
    replicas: dict[str, Replica] = field(default_factory=dict)
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(_MOST_PREFIXES))
    last: float | None = None
    in_flight: int = 0
    turn: int = 0
    canaries: frozenset[str] = frozenset()
    canary_percent: int = 0
    canary_due: int = 0

    def usable(self, now: float) -> Iterator[list[Replica]]:
        """Yield the candidates for the next request: the canary's replicas if it is their turn, then the stable ones.

        Ejected replicas are left out, unless all stable ones are ejected. The stable share never goes to the canary.
        """
        if self.canary_percent and self.canary_due + self.canary_percent >= 100:
            canaries = (each for each in self.replicas.values() if each.address in self.canaries)
            yield [each for each in canaries if not each.is_ejected(now)]
        replicas = [each for each in self.replicas.values() if each.address not in self.canaries]
        yield [each for each in replicas if not each.is_ejected(now)] or replicas

    def count_share(self, *, to_canary: bool) -> None:
        """Count a request that is sent, so that the canary gets its share of each sequence of requests.

        While the canary is not ready, full or ejected, it is owed no more than one request.
        """
        due = self.canary_due + self.canary_percent - (100 if to_canary else 0)
        self.canary_due = min(100, due) if self.canaries else 0


@dataclass(slots=True, eq=False)
class Choice:
    """A request that is sent to a replica.

    Attributes:
        key: the FastGenDeployment.
        fleet: its replicas, which count the request. The router has another fleet if the FastGenDeployment was not
            exposed in between.
        model: the name under which the replica serves its model.
        address: the replica's IP address and port.
        pod: name of the replica's pod.
        fallback: the replica for a retry; None if there is no other.
        sent: what the replica has to compute.
        reason: why this replica: `canary` (the request is of the canary's share), `only-replica`, `prefix` (it knows a
            prefix of the prompt), `least-waiting` (by its metrics), or `fewest-requests` (it has none).
    """

    key: Key
    fleet: _Fleet = field(repr=False)
    model: str
    address: str
    pod: str
    fallback: str | None
    sent: Sent
    reason: str


class Router:
    """Decides what happens to requests. Not thread-safe.

    Args:
        clock: monotonic time in seconds.
        limits: of held requests.

    Attributes:
        models: the exposed deployments.
        held: the requests that wait.
        is_draining: whether this gateway pod ends. It holds nothing then: another pod can hold the request.
    """

    def __init__(self, clock: Callable[[], float], limits: HoldLimits) -> None:
        self._clock = clock
        self._limits = limits
        self._started = clock()
        self._fleets: dict[Key, _Fleet] = {}
        self._sorted: list[Key] = []
        # Whether other models than before have replicas.
        self._shares_change = False
        self.models = ModelTable()
        self.held = HeldRequests(limits)
        self.is_draining = False

    def set_deployments(self, deployments: Iterable[Exposed]) -> None:
        """Take the exposed deployments. Those that are gone, and all that is known of them, are forgotten."""
        exposed = {each.key: each for each in deployments}
        self.models = ModelTable(exposed.values())
        for key in self._fleets.keys() - exposed.keys():
            self._shares_change |= bool(self._fleets.pop(key).replicas)
        self._sorted = sorted(exposed)
        for key, each in exposed.items():
            if (fleet := self._fleets.get(key)) is None:
                fleet = self._fleets[key] = _Fleet(each.model)
            fleet.model = each.model
            if fleet.canary_percent != each.canary_percent:
                fleet.canary_percent, fleet.canary_due = each.canary_percent, 0

    def set_endpoints(
        self,
        key: Key,
        addresses: Collection[str],
        pods: Mapping[str, str] | None = None,
        canaries: Collection[str] = (),
    ) -> None:
        """Take the addresses of the ready replicas of a deployment. One that is not exposed is ignored.

        Args:
            key: the deployment.
            addresses: IP addresses and ports.
            pods: names of pods by address.
            canaries: IP addresses and ports of the canary's ready replicas.
        """
        fleet = self._fleets.get(key)
        if fleet is None:
            return
        self._shares_change |= bool(fleet.replicas) != bool(addresses or canaries)
        fleet.canaries = frozenset(canaries)
        for gone in fleet.replicas.keys() - {*addresses, *canaries}:
            del fleet.replicas[gone]
            fleet.prefixes.forget(gone)
        for address in (*addresses, *canaries):
            if address not in fleet.replicas:
                fleet.replicas[address] = Replica(address, (pods or {}).get(address, ""))

    def endpoints(self) -> Iterator[tuple[Key, str, tuple[str, ...]]]:
        """Yield each deployment with its model and the addresses of its ready replicas."""
        for key, fleet in self._fleets.items():
            yield key, fleet.model, tuple(fleet.replicas)

    def observe(self, key: Key, address: str, sample: Sample, began: float) -> None:
        """Take a scrape of a replica that began at `began`."""
        fleet = self._fleets.get(key)
        if fleet is not None and (replica := fleet.replicas.get(address)) is not None:
            replica.observe(sample, began)

    def arrive(self, body: RequestBody, client: Client | None = None) -> Choice | Held | Refusal:
        """Send a request to a replica, hold it, or refuse it. Without keys, `client` is None."""
        exposed = self.models.find(body.model, client)
        if exposed is None:
            return unknown_model(body.model, self.models.names(client))
        now, key = self._clock(), exposed.key
        fleet = self._fleets[key]
        fleet.last = now
        fleet.arrivals.count(now)
        # A request that arrives later does not overtake the held ones, except by its priority.
        if self.held.first(key) is None and (replicas := next(filter(None, fleet.usable(now)), None)):
            return self._send(key, fleet, body, replicas, now)
        if self.is_draining:
            return gateway_draining()
        held = Held(key, body, now, client)
        return self.held.add(held) or held

    def choose(self, key: Key, body: RequestBody, subset: Collection[str] | None = None) -> Choice | Refusal:
        """Choose the replica for a request of a Gateway to the InferencePool of a deployment, or refuse it.

        A canary's replicas are not in the pool. The share of a canary is one of the requests to the gateway.

        Args:
            key: an exposed deployment.
            body: the request.
            subset: addresses, with or without a port, of the replicas that may get it; None for all.
        """
        now, fleet = self._clock(), self._fleets[key]
        fleet.last = now
        fleet.arrivals.count(now)
        *_, replicas = fleet.usable(now)
        if subset is not None:
            members = (each for each in fleet.replicas.values() if each.address not in fleet.canaries)
            allowed = [each for each in members if {each.address, each.address.rpartition(":")[0]} & {*subset}]
            replicas = [each for each in allowed if not each.is_ejected(now)] or allowed
        return self._send(key, fleet, body, replicas, now, shared=False) if replicas else no_replica_of_pool()

    def release(self) -> Iterator[tuple[Held, Choice | Refusal]]:
        """Yield the held requests that replicas have room for now, and those that cannot be answered any more."""
        now = self._clock()
        for held in self.held.expired(now):
            yield held, held_too_long(self._limits.seconds)
        displaced, self.held.displaced = self.held.displaced, []
        for held in displaced:
            yield held, hold_displaced()
        if self.is_draining:
            for held in self.held.removed():
                yield held, gateway_draining()
        for key in self.held.keys():  # noqa: SIM118  # not a mapping
            fleet = self._fleets.get(key)
            while (first := self.held.first(key)) is not None:
                if fleet is None:
                    self.held.remove(first)
                    yield first, unknown_model(first.body.model, self.models.names(first.client))
                    continue
                tokens = first.body.prompt_tokens
                with_room = ([each for each in some if each.has_room(tokens, now)] for some in fleet.usable(now))
                if not (replicas := next(filter(None, with_room), None)):
                    break
                self.held.remove(first)
                yield first, self._send(key, fleet, first.body, replicas, now)

    def abandon(self, held: Held) -> None:
        """Forget a held request whose client is gone."""
        if self.held.remove(held) and (fleet := self._fleets.get(held.key)) is not None:
            fleet.last = self._clock()

    def served_by(self, choice: Choice, address: str) -> None:
        """Count a request for the replica that answers it, which is another one after a retry."""
        replicas = choice.fleet.replicas
        chosen, serving = replicas.get(choice.address), replicas.get(address)
        if serving is not None:
            serving.succeed()
        if address == choice.address:
            return
        if chosen is not None:
            chosen.remove(choice.sent)
            chosen.fail(self._clock())
        if serving is not None:
            serving.add(choice.sent)
        choice.address, choice.pod = address, "" if serving is None else serving.pod

    def end(self, choice: Choice) -> None:
        """Count the end of a request, whatever it was."""
        fleet = choice.fleet
        fleet.last = self._clock()
        fleet.in_flight -= 1
        if (replica := fleet.replicas.get(choice.address)) is not None:
            replica.remove(choice.sent)

    def demand(self, after: str = "") -> Mapping[str, Any]:
        """Return a page of the answer of `/demand`, for the operator and `kubectl fastgen status`.

        Args:
            after: `next` of the page before; empty for the first page. The last page has no `next`.
        """
        now = self._clock()
        namespace, _, name = after.partition("/")
        start = bisect_right(self._sorted, (namespace, name))
        keys = self._sorted[start : start + DEMAND_PAGE]
        following = {"next": "/".join(keys[-1])} if start + DEMAND_PAGE < len(self._sorted) else {}
        return {
            "startedSeconds": round(now - self._started, 3),
            "deployments": {"/".join(key): self._demand_of(key, self._fleets[key], now) for key in keys},
            **following,
        }

    def num_ready(self) -> Iterator[tuple[Key, int, int]]:
        """Yield each deployment with its numbers of ready replicas and of requests in flight."""
        for key, fleet in self._fleets.items():
            yield key, len(fleet.replicas), fleet.in_flight

    def _demand_of(self, key: Key, fleet: _Fleet, now: float) -> dict[str, Any]:
        held, oldest = self.held.of(key), self.held.oldest(key)
        idle = None if fleet.last is None else 0.0 if fleet.in_flight or held.requests else now - fleet.last
        return {
            "held": held.requests,
            "heldTokens": held.tokens,
            "oldestHeldSeconds": 0.0 if oldest is None else round(now - oldest, 3),
            "idleSeconds": None if idle is None else round(idle, 3),
            "readyReplicas": len(fleet.replicas),
            "running": fleet.in_flight,
        }

    def _share_prefixes(self) -> None:
        """Give each model that has replicas an equal share: models without any cannot take it from others."""
        serving = [fleet.prefixes for fleet in self._fleets.values() if fleet.replicas]
        for index in serving:
            index.bound(_MOST_PREFIXES // len(serving))
        self._shares_change = False

    def _send(
        self, key: Key, fleet: _Fleet, body: RequestBody, replicas: list[Replica], now: float, *, shared: bool = True
    ) -> Choice:
        """Send a request to one of the replicas; `shared` says whether it counts for the canary's share."""
        if self._shares_change:
            self._share_prefixes()
        fleet.turn += 1
        matches = fleet.prefixes.matches(body.blocks)
        best, *others = ranked(replicas, body.prompt_tokens, matches, now, fleet.turn, fleet.arrivals.rate(now))
        replica, cached = best
        sent = Sent(now, body.prompt_tokens, max(1, body.prompt_tokens - cached))
        replica.add(sent)
        fleet.prefixes.add(body.blocks, replica.address)
        fleet.in_flight += 1
        is_canary = replica.address in fleet.canaries
        if shared:
            fleet.count_share(to_canary=is_canary)
        fallback = others[0][0].address if others and not is_canary else None
        if fallback is None:
            known = (address for address in fleet.replicas if address not in fleet.canaries)
            fallback = next((address for address in known if address != replica.address), None)
        reason = "canary" if is_canary else "only-replica" if len(replicas) == 1 else "prefix" if cached else ""
        reason = reason or ("fewest-requests" if replica.step_model(now) is None else "least-waiting")
        return Choice(key, fleet, fleet.model, replica.address, replica.pod, fallback, sent, reason)
