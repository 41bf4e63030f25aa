"""`kubectl fastgen drain-test`: evict a pod under load; report whether a request was lost.

Streams run on the ready pods, each on one chosen at random, through a port-forward. While streams are open on one pod,
it is evicted, as by a drain of its node. These streams must complete. Later requests go to the pods that are then
ready, as from a Service.
How fast kube-proxy and gateways notice the eviction is not tested, because no request passes through them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from threading import Event, Thread
from typing import Any, Final, Literal

from fastgen.api_client.api_keys import own_key
from fastgen.api_client.http import RemoteError, event_of
from fastgen.setting_fields import ConfigError
from fastgen_operator.objects.container import HTTP_PORT
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import Cluster, PluginError, UsageError
from fastgen_operator.plugin.screen import Screen

_MOST_STREAMS: Final = 64
_POLL_SECONDS: Final = 0.2
# A stream is lost if it has no data for this long.
_SILENCE_SECONDS: Final = 60.0
# Time limit for as many pods to be ready as before.
_REPLACED_SECONDS: Final = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", metavar="NAME", help="the FastGenDeployment")
    parser.add_argument("--pod", help="the pod to evict; default: the newest that is ready")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="streams at a time (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="tokens of a stream (default: %(default)s)"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask before the eviction")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Test the drain; return 1 if a request was lost."""
    if not (1 <= options.streams <= _MOST_STREAMS and options.tokens >= 1):
        raise UsageError(f"--streams takes 1 to {_MOST_STREAMS}, --tokens 1 or more")
    resource, key = cluster.resource(options.name), _own_key()
    body = {
        "model": resource["spec"]["model"].get("servedName") or options.name,
        **{"prompt": "Once upon a time", "max_tokens": options.tokens, "ignore_eos": True, "stream": True},
    }
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    load = _Load(cluster, options.name, json.dumps(body), headers)
    before = load.ready()
    if not before:
        raise PluginError(f"no pod of {options.name} is ready: see kubectl fastgen status {options.name}")
    victim = options.pod or before[-1]
    if victim not in before:
        raise UsageError(f"--pod {victim}: not one of the ready pods {', '.join(before)}")
    if not options.yes:
        _confirm(victim, options.streams)
    with load.running(options.streams):
        report = _evict(load, victim, before)
    outcomes = Counter(result.outcome for result in load.results)
    lost = [{"pod": each.pod, "message": each.message} for each in load.results if each.outcome == "lost"]
    if options.output == "json":
        requests = {kind: outcomes[kind] for kind in ("complete", "refused", "lost")}
        screen.write_json({**report, "requests": requests, "lost": lost})
        return int(bool(lost))
    new = f" by {', '.join(report['replacement'])}" if report["replacement"] else ""
    seconds = [each.seconds for each in load.results if each.outcome == "complete"]
    complete = f"{len(seconds)} complete" + (f" (median {median(seconds):.1f} s)" if seconds else "")
    screen.write(
        [
            f"pod {victim}: evicted with {report['openStreams']} open streams, replaced{new} after "
            f"{report['readySeconds']} s",
            f"requests: {complete}, {outcomes['refused']} refused before the first token, {len(lost)} lost",
            *(f"lost on pod {each['pod']}: {each['message']}" for each in lost),
            screen.paint(f"{len(lost)} requests lost", "red") if lost else screen.paint("no request lost", "green"),
        ]
    )
    return int(bool(lost))


def _own_key() -> str | None:
    try:
        return own_key()
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _confirm(victim: str, streams: int) -> None:
    if not sys.stdin.isatty():
        raise UsageError("drain-test evicts a pod: confirm it with --yes")
    words = f"This evicts pod {victim} while {streams} streams run. Continue? [y/N] "
    print(words, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise PluginError("not confirmed, so nothing was evicted")


def _evict(load: _Load, victim: str, before: list[str]) -> dict[str, Any]:
    """Evict a pod, wait until it is gone and as many are ready as before, and return what happened."""
    deadline = time.monotonic() + _SILENCE_SECONDS
    while victim not in load.open:
        failures = [f": {result.message}" for result in load.results if result.pod == victim and result.message]
        if failures or time.monotonic() > deadline:
            raise PluginError(f"no stream opened on pod {victim}, so nothing was evicted{''.join(failures[:1])}")
        time.sleep(_POLL_SECONDS)
    open_streams, began = load.open.count(victim), time.monotonic()
    load.cluster.evict(load.pods[victim])
    while len(load.ready()) < len(before) or victim in load.pods:
        if time.monotonic() > began + _REPLACED_SECONDS:
            raise PluginError(f"pod {victim} is not replaced after {_REPLACED_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    return {
        "evicted": victim,
        "replacement": sorted({*load.ready()} - {*before}),
        "openStreams": open_streams,
        "readySeconds": round(time.monotonic() - began, 1),
    }


@dataclass(frozen=True, slots=True)
class _Result:
    """The outcome of one request. A refused one got no token, so a client may send it to another pod."""

    pod: str
    outcome: Literal["complete", "refused", "lost"]
    seconds: float
    message: str


@dataclass
class _Load:
    """Threads that stream completions from the ready pods; `open` has the pod of each open stream."""

    cluster: Cluster
    name: str
    body: str
    headers: dict[str, str]
    pods: dict[str, Pod] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)

    def ready(self) -> list[str]:
        """List the pods; return the names of those to which a Service sends requests."""
        self.pods = {pod.name: pod for pod in self.cluster.pods(self.name)}
        return self._ready()

    def _ready(self) -> list[str]:
        return [name for name, pod in self.pods.items() if pod.is_ready and not pod.is_terminating]

    @contextmanager
    def running(self, streams: int) -> Iterator[None]:
        """Keep this number of streams open; at the end, wait for the last ones."""
        stopped = Event()

        def work() -> None:
            while not stopped.wait(_POLL_SECONDS / 2):
                if ready := self._ready():
                    self.results.append(self._send(random.choice(ready)))

        workers = [Thread(target=work, daemon=True) for _ in range(streams)]
        for worker in workers:
            worker.start()
        try:
            yield
        finally:
            stopped.set()
            for worker in workers:
                worker.join()

    def _send(self, pod: str) -> _Result:
        began = time.monotonic()
        outcome: Literal["complete", "refused", "lost"] = "lost"
        try:
            connection = self.cluster.connection(self.cluster.namespace, pod, HTTP_PORT, _SILENCE_SECONDS)
            with closing(connection):
                connection.request("POST", "/v1/completions", self.body, self.headers)
                answer = connection.getresponse()
                if answer.status == 200:
                    fault = self._read(pod, answer)
                    outcome = "lost" if fault else "complete"
                else:
                    fault = f"{answer.status}: {' '.join(answer.read().decode(errors='replace').split())[:200]}"
                    outcome = "refused" if answer.status in (429, 503) else "lost"
        except PluginError as error:  # no connection, so no pod received the request
            outcome, fault = "refused", str(error)
        except (OSError, http.client.HTTPException) as error:
            fault = f"the connection broke: {error or type(error).__name__}"
        return _Result(pod, outcome, time.monotonic() - began, fault)

    def _read(self, pod: str, answer: http.client.HTTPResponse) -> str:
        """Read a stream to its end; return what is wrong with it, else an empty string."""
        pieces, ended = 0, False
        self.open.append(pod)
        try:
            for data in (line[5:].strip() for line in answer if line.startswith(b"data:")):
                if data == b"[DONE]":
                    ended = True
                else:
                    event_of(data)
                    pieces += 1
        except (ValueError, RemoteError) as error:
            return f"error in the stream: {error}"
        finally:
            self.open.remove(pod)
        return "" if ended else f"the stream ended early, after {pieces} events"
