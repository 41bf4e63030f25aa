"""Ask the pods of the gateway which deployments have requests.

The operator polls `GET /demand` of every pod. A pod that does not answer, or not as agreed, counts as one that may hold
requests or have had some: without its answer no last replica is removed. See docs/decisions/059.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from fastgen_operator.autoscale.sample import Traffic
from fastgen_operator.autoscale.scrape.exposition import UnusableError
from fastgen_operator.autoscale.scrape.scraper import Scraper
from fastgen_operator.kinds import Key

logger = logging.getLogger(__name__)

# The port of /demand.
GATEWAY_PORT: Final = 9003
POLL_SECONDS: Final = 0.5
# A pod is created long before it can hold a request.
_LIST_SECONDS: Final = 2.0
# An answer, or a list of the pods, that is older says nothing.
ANSWER_SECONDS: Final = 3.0
LIST_TRUST_SECONDS: Final = 10.0
# A page has up to 1,000 deployments, with about 150 bytes for each.
LIMIT_BYTES: Final = 1 << 20
# Deployments of an answer. Those on later pages are unknown, so they are never idle.
MOST_DEPLOYMENTS: Final = 50_000
_MOST_REQUESTS: Final = 10**9
_LONGEST_SECONDS: Final = 1e12


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one pod says about one deployment: requests that it holds, and seconds since the last one, if any."""

    held: int
    idle_seconds: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one pod says.

    Attributes:
        time: monotonic time of the request.
        started_seconds: age of the pod's process.
        next: the page after this one begins behind this deployment; empty for the last page.
    """

    time: float
    started_seconds: float
    deployments: Mapping[Key, Waiting]
    next: str = ""


def demand_path(after: str) -> str:
    """Return the path, without its first slash, of the page that follows a deployment."""
    return f"demand?after={quote(after)}"


def parse_answer(body: bytes, time: float) -> Answer:
    """Return a page of the answer of a pod. Raises UnusableError if any part of it is not as agreed."""
    try:
        found = json.loads(body)
        deployments = {
            _key(name): Waiting(_count(each["held"]), _seconds(each["idleSeconds"], optional=True))
            for name, each in found["deployments"].items()
        }
        started = _seconds(found["startedSeconds"])
        following = "/".join(_key(found["next"])) if "next" in found else ""
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        words = f"not the agreed JSON: {type(error).__name__}: {str(error)[:200]}"
        raise UnusableError("NotDemand", words) from error
    assert started is not None
    return Answer(time, started, deployments, following)


def _key(text: str) -> Key:
    namespace, name = text.split("/")
    return namespace, name


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_REQUESTS:
        raise ValueError(f"{value!r} is not a number of requests")
    return value


def _seconds(value: Any, *, optional: bool = False) -> float | None:
    if value is None and optional:
        return None
    if type(value) not in (int, float) or not 0 <= value <= _LONGEST_SECONDS:
        raise ValueError(f"{value!r} is not a time in seconds")
    return float(value)


@dataclass(slots=True)
class _Pod:
    """One pod: its address, and its last usable answer."""

    address: str
    answer: Answer | None = None

    def says(self, key: Key, now: float) -> tuple[Waiting, float] | str:
        """Return what it says about a deployment, and for how long there was no request; or why that is unknown."""
        answer = self.answer
        if answer is None or now - answer.time > ANSWER_SECONDS:
            return "does not answer"
        if (found := answer.deployments.get(key)) is None:
            return "does not route to this FastGenDeployment"
        idle = answer.started_seconds if found.idle_seconds is None else found.idle_seconds
        return found, idle


@dataclass(slots=True)
class Gateways:
    """The pods of the gateway, and what each said last.

    Attributes:
        list_pods: returns the addresses of the pods by name; called in a thread. It may raise any exception.
        scraper: whose connections are used.
        failed: called with the reason of each failed poll or list.
    """

    list_pods: Callable[[], Mapping[str, str]]
    scraper: Scraper
    failed: Callable[[str], object]
    port: int = GATEWAY_PORT
    _pods: dict[str, _Pod] = field(default_factory=dict)
    _listed_at: float = -math.inf
    _tried_at: float = -math.inf
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def begin(self, heard: Callable[[Answer], object]) -> None:
        """Begin to poll all pods, except those whose last poll runs, and to list them if it is time.

        Args:
            heard: called with each usable answer.
        """
        now = asyncio.get_running_loop().time()
        if now - self._tried_at >= _LIST_SECONDS:
            self._tried_at = now
            self._begin("", partial(self._list, now))
        for name, pod in self._pods.items():
            self._begin(name, partial(self._poll, pod, heard))

    def rest(self) -> None:
        """Forget the pods while no deployment needs them."""
        self._pods, self._listed_at, self._tried_at = {}, -math.inf, -math.inf

    def close(self) -> None:
        """End the running requests."""
        for task in self._running.values():
            task.cancel()

    def traffic(self, key: Key, now: float) -> Traffic:
        """Return what the pods say about a deployment at a monotonic time."""
        if now - self._listed_at > LIST_TRUST_SECONDS:
            faults = ["the pods of the gateway cannot be listed"]
        else:
            faults = [] if self._pods else ["the gateway has no pod"]
        said = {name: pod.says(key, now) for name, pod in sorted(self._pods.items())}
        faults += [f"pod {name} of the gateway {fault}" for name, fault in said.items() if isinstance(fault, str)]
        known = [each for each in said.values() if not isinstance(each, str)]
        held = sum(waiting.held for waiting, _ in known)
        idle = min((seconds for _, seconds in known), default=None)
        return Traffic(held, None, f"{faults[0]}{_more(faults)}") if faults else Traffic(held, idle)

    def _begin(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._running:
            self._running[name] = asyncio.create_task(make())
            self._running[name].add_done_callback(lambda _: self._running.pop(name))

    async def _list(self, now: float) -> None:
        try:
            found = await asyncio.to_thread(self.list_pods)
        except Exception as error:
            # Known pods are still asked: they may hold requests.
            self.failed("NotListed")
            logger.debug("listing the pods of the gateway: %s", error)
            return
        known, self._listed_at = self._pods, now
        self._pods = {
            name: known[name] if name in known and known[name].address == address else _Pod(address)
            for name, address in found.items()
        }

    async def _poll(self, pod: _Pod, heard: Callable[[Answer], object]) -> None:
        now = asyncio.get_running_loop().time()
        try:
            pod.answer = await self._read(pod.address, now)
        except Exception as error:
            # Whatever a pod sends, the others are asked.
            self.failed(error.reason if isinstance(error, UnusableError) else "NotDemand")
            logger.debug("asking the gateway at %s: %s", pod.address, error)
            return
        heard(pod.answer)

    async def _read(self, address: str, now: float) -> Answer:
        """Return all pages of a pod's answer. Raises UnusableError, or another exception, if one cannot be read."""
        page = parse_answer(await self.scraper.read(address, self.port, "demand", LIMIT_BYTES), now)
        started, deployments = page.started_seconds, {**page.deployments}
        while page.next and len(deployments) < MOST_DEPLOYMENTS:
            page = parse_answer(await self.scraper.read(address, self.port, demand_path(page.next), LIMIT_BYTES), now)
            if page.deployments.keys() <= deployments.keys():
                raise UnusableError("NotDemand", f"the page behind {page.next[:200]} has nothing new")
            # The pod may have been restarted since the first page.
            started = min(started, page.started_seconds)
            deployments |= page.deployments
        return Answer(now, started, deployments)


def _more(faults: list[str]) -> str:
    return f", and {len(faults) - 1} more" if len(faults) > 1 else ""
