"""`kubectl fastgen explain-scaling`: the last decisions, repeated from their recorded inputs."""

from __future__ import annotations

import argparse
import http.client
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from fastgen.version import VERSION
from fastgen_operator.autoscale.journal import Entry, Journal, journal_from_json, to_json
from fastgen_operator.kinds import Object
from fastgen_operator.plugin.arithmetic import Replay, steps_of
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.plugin.screen import Cell, Screen, age, wrapped
from fastgen_operator.pods import name_of
from fastgen_operator.runtime.decision_server import PATH
from fastgen_operator.runtime.settings import Settings

_SELECTOR: Final = "app.kubernetes.io/name=fastgen-operator"
_FLAG: Final = "--decisions-port"
_SECONDS: Final = 10.0
_WIDTH: Final = 120
_INDENT: Final = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", metavar="NAME", help="the FastGenDeployment")
    parser.add_argument(
        "--all", action="store_true", help="all recorded decisions, not only the last change and the last"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="json has the inputs as well")
    parser.add_argument(
        "--operator-namespace",
        default="fastgen-system",
        metavar="NAMESPACE",
        help="namespace of the operator (default: %(default)s)",
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an operator has recorded about a resource, with the operator's pod and version."""

    pod: str
    version: str
    journal: Journal


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Explain the decisions; return 1 if a replay differs from what was recorded."""
    resource = cluster.resource(options.name)
    if "autoscaling" not in resource["spec"]:
        raise PluginError(f"{options.name} has no spec.autoscaling: its size is spec.replicas")
    recorded = fetch(cluster, options.operator_namespace, (cluster.namespace, options.name))
    replays = [Replay.of(entry) for entry in _chosen(recorded.journal, everything=options.all)]
    if options.output == "json":
        found = {
            "operator": {"pod": recorded.pod, "version": recorded.version},
            "decisions": [_json(r) for r in replays],
        }
        screen.write([json.dumps(found, indent=2)])
    else:
        now = datetime.now(UTC)
        heading = f"{cluster.namespace}/{options.name}"
        lines = [f"{screen.paint(Cell(heading, 'bold'))}: decisions of operator pod {recorded.pod}, {recorded.version}"]
        for replay in replays:
            lines += ["", *explanation(replay, screen, now)]
        screen.write(lines)
    return 0 if all(replay.is_equal for replay in replays) else 1


def explanation(replay: Replay, screen: Screen, now: datetime) -> list[str]:
    """Return the lines about one decision."""
    entry, decision = replay.entry, replay.entry.decision
    when = datetime.fromtimestamp(entry.time, UTC)
    before = entry.case.state.replicas or entry.case.fleet.replicas
    what = f"{before} -> {decision.replicas}" if before != decision.replicas else f"{decision.replicas}, unchanged"
    mode = " (dry run)" if entry.case.is_dry_run else ""
    ago = age((now - when).total_seconds())
    lines = [f"{screen.paint(Cell(what, 'bold'))}{mode}   {when:%Y-%m-%d %H:%M:%S}Z, {ago} ago"]
    for step in steps_of(replay):
        for number, line in enumerate(step.lines):
            first, *rest = wrapped(line, _WIDTH, _INDENT)
            title = f"  {step.title if number == 0 else '':<{_INDENT - 2}}"
            lines += [f"{title}{first.strip()}", *rest]
    if replay.is_equal:
        return [*lines, f"  {'replay':<{_INDENT - 2}}" + screen.paint(Cell("equal to the recorded decision", "green"))]
    words = (
        f"differs: the operator decided {decision.replicas}, this policy {replay.decision.replicas}; the steps "
        f"above are of this policy, of fastgen {VERSION}: install the operator's version to see its own"
    )
    first, *rest = wrapped(words, _WIDTH, _INDENT)
    return [*lines, f"  {'replay':<{_INDENT - 2}}" + screen.paint(Cell(first.strip(), "red")), *rest]


def fetch(cluster: Cluster, namespace: str, key: tuple[str, str]) -> Recorded:
    """Return what the operator that leads has recorded about a resource.

    Raises:
        PluginError: no operator has decided on it, or the user may not ask.
    """
    pods = [pod for pod in cluster.pods_with(namespace, _SELECTOR) if pod["status"].get("phase") == "Running"]
    if not pods:
        raise PluginError(f'no operator runs in namespace "{namespace}": use --operator-namespace')
    for pod in pods:
        connection = cluster.connection(namespace, name_of(pod), _port(pod), _SECONDS)
        try:
            connection.request("GET", f"{PATH}/{'/'.join(key)}")
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise PluginError(f"operator pod {namespace}/{name_of(pod)} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status == 200:
            return _recorded(name_of(pod), json.loads(body))
        if answer.status != 404:
            raise PluginError(f"operator pod {namespace}/{name_of(pod)}: {answer.status} {answer.reason}")
    # Those on standby decide nothing.
    raise PluginError(
        f"no operator in namespace {namespace} has decided on {'/'.join(key)} since it started: wait for some scrapes"
    )


def _recorded(pod: str, body: Any) -> Recorded:
    try:
        return Recorded(pod, body["version"], journal_from_json(body["journal"]))
    except ValueError as error:
        raise PluginError(
            f"the operator is of version {body['version']} and records other inputs than this plugin, {VERSION}: "
            f"install fastgen[operator]=={body['version']}"
        ) from error


def _port(pod: Object) -> int:
    """Return the port of the decisions: a flag of the operator's container, or the default."""
    for container in pod["spec"]["containers"]:
        arguments = container.get("args", ())
        for number, argument in enumerate(arguments):
            if argument.startswith(f"{_FLAG}="):
                return int(argument.partition("=")[2])
            if argument == _FLAG:
                return int(arguments[number + 1])
    return Settings(engine_image="").decisions_port


def _chosen(journal: Journal, *, everything: bool) -> list[Entry]:
    """Return the decisions to explain, oldest first.

    All of them, or the last change and the last decision.
    """
    changes = list(journal.changes if everything else journal.changes[-1:])
    latest = [] if journal.latest is None or journal.latest in changes else [journal.latest]
    return [*changes, *latest]


def _json(replay: Replay) -> dict[str, Any]:
    entry = replay.entry
    recorded = to_json(Journal((entry,), None))["changes"][0]
    steps = {step.title: list(step.lines) for step in steps_of(replay)}
    return {**recorded, "replayed": to_json(replay.decision), "isEqual": replay.is_equal, "steps": steps}
