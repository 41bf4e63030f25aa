"""`kubectl fastgen drain-test`: evict a pod under load; report whether a request was lost.

Streams run on all ready pods, each through a port-forward. While streams are open on one pod, it is evicted, as by a
drain of its node. These streams must complete. Later requests go to the pods that are then ready, as from a Service.
How fast kube-proxy and gateways notice the eviction is not tested, because no request passes through them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any, Final

from fastgen.api_client.api_keys import own_key
from fastgen_operator.kinds import POD
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plugin.cluster import Cluster, PluginError, UsageError
from fastgen_operator.plugin.screen import Screen
from fastgen_operator.plugin.streams import POLL_SECONDS, SILENCE_SECONDS, Load
from fastgen_operator.pods import Pod

_MOST_STREAMS: Final = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", metavar="NAME", help="the FastGenDeployment")
    parser.add_argument("--pod", help="the pod to evict; default: the newest that is ready")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="streams at a time (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=128, metavar="N", help="tokens of a stream (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="until a new pod is ready (default: %(default)s)"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask before the eviction")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Test the drain; return 1 if a request was lost."""
    if not (1 <= options.streams <= _MOST_STREAMS and options.tokens >= 1 and options.timeout > 0):
        raise UsageError(f"--streams takes 1 to {_MOST_STREAMS}, --tokens 1 or more, --timeout more than 0 seconds")
    resource, key = cluster.resource(options.name), own_key()
    body = {
        "model": resource["spec"]["model"].get("servedName") or options.name,
        **{"prompt": "Once upon a time", "max_tokens": options.tokens, "ignore_eos": True, "stream": True},
    }
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    load = Load(cluster, options.name, body, headers)
    before = load.ready()
    if not before:
        raise PluginError(f"no pod of {options.name} is ready: see kubectl fastgen status {options.name}")
    victim = options.pod or before[-1]
    if victim not in before:
        raise UsageError(f"--pod {victim}: not one of the ready pods {', '.join(before)}")
    _confirm(options, victim)
    first = load.send(victim)
    if first.outcome != "complete":
        raise PluginError(f"pod {victim} answers no request, so nothing was evicted: {first.message}")
    with load.running(options.streams):
        report = _evict(load, victim, before, options.timeout)
    _tell(report, load, screen, options.output)
    return int(any(result.outcome == "lost" for result in load.results))


def _confirm(options: argparse.Namespace, victim: str) -> None:
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("drain-test evicts a pod: confirm it with --yes")
    print(
        f"This evicts pod {victim} while {options.streams} streams run. Continue? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise PluginError("not confirmed, so nothing was evicted")


def _evict(load: Load, victim: str, before: list[str], timeout: float) -> dict[str, Any]:
    """Evict a pod and wait until as many are ready as before; return what happened."""
    _wait(lambda: load.num_open(victim) > 0, SILENCE_SECONDS, f"no stream began on pod {victim}")
    (pod,) = (pod for pod in load.pods() if pod.name == victim)
    open_streams = load.num_open(victim)
    load.cluster.evict(pod)
    began = time.monotonic()
    _wait(lambda: _is_gone(load.cluster, pod), timeout, f"pod {victim} still exists")
    gone = time.monotonic() - began
    # The cached list of pods may still contain the evicted one.
    _wait(
        lambda: len({*load.ready()} - {victim}) >= len(before),
        max(0.0, timeout - gone),
        f"fewer than {len(before)} pods are ready after {timeout:g} s",
    )
    return {
        "evicted": victim,
        "replacement": sorted({*load.ready()} - {*before}),
        "openStreams": open_streams,
        "goneSeconds": round(gone, 1),
        "readySeconds": round(time.monotonic() - began, 1),
    }


def _wait(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise PluginError(failure)
        time.sleep(POLL_SECONDS / 5)


def _is_gone(cluster: Cluster, pod: Pod) -> bool:
    try:
        live = cluster.request("GET", POD.path(pod.namespace, pod.name))
    except KubeError as error:
        if error.status == 404:
            return True
        raise PluginError(str(error)) from error
    return bool(live["metadata"]["uid"] != pod.uid)


def _tell(report: dict[str, Any], load: Load, screen: Screen, output: str) -> None:
    outcomes = Counter(result.outcome for result in load.results)
    lost = [result for result in load.results if result.outcome == "lost"]
    if output == "json":
        requests = {kind: outcomes[kind] for kind in ("complete", "refused", "lost")}
        failures = [{"pod": result.pod, "message": result.message} for result in lost]
        screen.write_json({**report, "requests": requests, "lost": failures})
        return
    new = f" by {', '.join(report['replacement'])}" if report["replacement"] else ""
    times = f"gone after {report['goneSeconds']} s, replaced{new} after {report['readySeconds']} s"
    seconds = median(result.seconds for result in load.results if result.outcome == "complete")
    complete = f"{outcomes['complete']} complete (median {seconds:.1f} s)"
    screen.write(
        [
            f"pod {report['evicted']}: evicted with {report['openStreams']} open streams, {times}",
            f"requests: {complete}, {outcomes['refused']} refused before the first token, {len(lost)} lost",
            *(f"lost on pod {result.pod}: {result.message}" for result in lost),
            screen.paint(f"{len(lost)} requests lost", "red") if lost else screen.paint("no request lost", "green"),
        ]
    )
