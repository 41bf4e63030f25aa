"""`kubectl fastgen explain-scaling`: repeat the last decisions from recorded inputs."""

from __future__ import annotations

import argparse
import http.client
import json
import re
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from fastgen.version import VERSION
from fastgen_operator.autoscale.journal import Entry, Journal, journal_from_json, to_json
from fastgen_operator.kinds import Key
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.arithmetic import Replay, steps_of
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.plugin.screen import Screen, age, wrapped
from fastgen_operator.runtime.http_servers import DECISIONS_PATH
from fastgen_operator.runtime.settings import Settings

_SELECTOR: Final = "app.kubernetes.io/name=fastgen-operator"
_SECONDS: Final = 10.0
_INDENT: Final = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", metavar="NAME", help="the FastGenDeployment")
    parser.add_argument(
        "--all", action="store_true", help="show all recorded decisions, not only the last one and the last change"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="json has the inputs as well")
    add_operator_argument(parser)


def add_operator_argument(parser: argparse.ArgumentParser, what: str = "namespace of the operator") -> None:
    """Add the argument for the namespace of the operator and the gateway."""
    parser.add_argument(
        "--operator-namespace",
        default="fastgen-system",
        metavar="NAMESPACE",
        help=f"{what} (default: %(default)s)",
    )


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Explain the decisions; return 1 if a replay differs from what was recorded."""
    resource = cluster.resource(options.name)
    if "autoscaling" not in resource["spec"]:
        raise PluginError(f"{options.name} has no spec.autoscaling: its size is spec.replicas")
    pod, version, journal = fetch(cluster, options.operator_namespace, (cluster.namespace, options.name))
    replays = [Replay.of(entry) for entry in _chosen(journal, everything=options.all)]
    if options.output == "json":
        learned = None if journal.learning is None else to_json(journal.learning)
        decisions = [_json(replay) for replay in replays]
        screen.write_json({"operator": {"pod": pod, "version": version}, "decisions": decisions, "learning": learned})
    else:
        now = datetime.now(UTC)
        heading = screen.paint(f"{cluster.namespace}/{options.name}", "bold")
        lines = [f"{heading}: decisions of operator pod {pod}, {version}"]
        for replay in replays:
            lines += ["", *explanation(replay, screen, now)]
        lines += ["", *learned_lines(journal)]
        screen.write(lines)
    return 0 if all(replay.is_equal for replay in replays) else 1


def explanation(replay: Replay, screen: Screen, now: datetime) -> list[str]:
    """Return the lines about one decision."""
    entry, decision = replay.entry, replay.entry.decision
    when = datetime.fromtimestamp(entry.time, UTC)
    before = entry.case.state.last(entry.case.fleet)
    change = f"{before} -> {decision.replicas}" if before != decision.replicas else f"{decision.replicas}, unchanged"
    mode = " (dry run)" if entry.case.is_dry_run else ""
    ago = age((now - when).total_seconds())
    lines = [f"{screen.paint(change, 'bold')}{mode}   {when:%Y-%m-%d %H:%M:%S}Z, {ago} ago"]
    for title, step in steps_of(replay).items():
        for number, line in enumerate(step):
            lines += wrapped(line, _INDENT, "" if number else f"  {title}")
    words, colour = "equal to the recorded decision", "green"
    if not replay.is_equal:
        words, colour = (
            (
                f"differs: the operator decided {decision.replicas}, this plugin {replay.decision.replicas}; the steps "
                f"above are of this plugin, of fastgen {VERSION}: install the operator's version to see its own"
            ),
            "red",
        )
    return [*lines, *(screen.paint(line, colour) for line in wrapped(words, _INDENT, "  replay"))]


def learned_lines(journal: Journal) -> list[str]:
    """Return the lines about the lower bound that the past requires."""
    latest, learning = journal.latest, journal.learning
    mode = "Disabled" if latest is None else latest.case.policy.learning
    if mode == "Disabled":
        words = "disabled by spec.autoscaling.learning"
    elif learning is None:
        words = "no rehearsal of the recorded arrivals yet: the first one comes ten minutes after the operator starts"
    else:
        effect = {"Apply": "applied", "Advise": "advice; spec.autoscaling.learning: Apply applies it"}[mode]
        words = f"{learning.message} ({effect})" if learning.floor or learning.plan.highest else learning.message
    return wrapped(words, _INDENT, "  learned")


def fetch(cluster: Cluster, namespace: str, key: Key) -> tuple[str, str, Journal]:
    """Return pod and version of the leading operator, and its decisions about a resource.

    Raises:
        PluginError: no operator runs there, answers or has decided on the resource, the user lacks the rights, or the
            operator's version records other inputs.
    """
    pods = [pod for pod in cluster.pods_with(namespace, _SELECTOR) if pod.phase == "Running"]
    if not pods:
        raise PluginError(f'no operator runs in namespace "{namespace}": use --operator-namespace')
    for pod in pods:
        name = pod.name
        try:
            with closing(cluster.connection(namespace, name, _port(pod), _SECONDS)) as connection:
                connection.request("GET", f"{DECISIONS_PATH}/{'/'.join(key)}")
                answer = connection.getresponse()
                body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise PluginError(f"operator pod {namespace}/{name} does not answer: {error}") from error
        if answer.status == 200:
            found = json.loads(body)
            return name, found["version"], _journal(found)
        if answer.status != 404:
            raise PluginError(f"operator pod {namespace}/{name}: {answer.status} {answer.reason}")
    # Operators on standby decide nothing.
    raise PluginError(
        f"no operator in namespace {namespace} has decided on {'/'.join(key)} since it started: wait for some scrapes"
    )


def _journal(found: dict[str, Any]) -> Journal:
    try:
        return journal_from_json(found["journal"])
    except ValueError as error:
        raise PluginError(
            f"the operator is of version {found['version']} and records other inputs than this plugin, {VERSION}: "
            f"install fastgen[operator]=={found['version']}"
        ) from error


def _port(pod: Pod) -> int:
    """Return the decisions port from the arguments of the operator's container, or the default."""
    for container in pod.obj["spec"]["containers"]:
        if found := re.search(r"--decisions-port[= ](\d+)", " ".join(container.get("args", ()))):
            return int(found[1])
    return Settings(engine_image="").decisions_port


def _chosen(journal: Journal, *, everything: bool) -> list[Entry]:
    """Return all recorded decisions, or the last change and the last decision, oldest first."""
    changes = list(journal.changes if everything else journal.changes[-1:])
    return changes if journal.latest is None or journal.latest in changes else [*changes, journal.latest]


def _json(replay: Replay) -> dict[str, Any]:
    recorded = to_json(Journal((replay.entry,)))["changes"][0]
    return {**recorded, "replayed": to_json(replay.decision), "isEqual": replay.is_equal, "steps": steps_of(replay)}
