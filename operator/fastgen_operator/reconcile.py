"""One visit to one FastGenDeployment: observe, plan, apply, status. It depends on nothing that an earlier one did."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from fastgen_operator.apiserver import KubeError
from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.children import Platform
from fastgen_operator.kinds import OPTIONAL_KINDS, Key, Kind, Object
from fastgen_operator.metrics import Metrics
from fastgen_operator.plan import Apply, Plan, Problem, make_plan, parse_spec
from fastgen_operator.summary import Notice, build_status, scaling_notice, transition_notice
from fastgen_operator.world import Reader, World, observe

logger = logging.getLogger(__name__)


class Cluster(Reader, Protocol):
    """What a visit needs of the API server; `kube.Kube` is the real one."""

    def look(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as it is now, watched or not; None where there is none."""
        ...

    def apply(self, kind: Kind, manifest: Object) -> Object:
        """Server-side apply; returns the live object."""
        ...

    def delete(self, kind: Kind, child: Object) -> None:
        """Deletes exactly this object, if it is still there."""
        ...

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object:
        """Replaces the resource's status."""
        ...

    def create_event(self, resource: Object, event: dict[str, Any]) -> None:
        """Records an Event."""
        ...


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Visits resources; safe to use from several threads, one resource at a time each.

    `platform` gives what the cluster offers at the time of a visit; `now` the time for transition times and Events,
    with a time zone.
    """

    cluster: Cluster
    metrics: Metrics
    platform: Callable[[], Platform]
    watchlist: Watchlist
    now: Callable[[], datetime]

    def reconcile(self, key: Key) -> Problem | None:
        """Brings the children to the spec and the status to the children.

        Returns what stands in the way, where a later visit may find it gone; None where nothing does.

        Raises:
            KubeError: the API server failed, or somebody else wrote first; to be tried again.
        """
        platform = self.platform()
        world = observe(self.cluster, key, platform.kinds)
        if world is None:
            self.watchlist.forget(key)
            self.metrics.forget(key)
            return None
        now = self.now()
        world = replace(world, at=now)
        spec = parse_spec(world.resource)
        if isinstance(spec, Problem):
            status = build_status(None, world, spec, now)
            self._show_conditions(key, status)
            self._report(world, status)
            return spec
        world = self.watchlist.look_up(spec, world)
        plan = make_plan(spec, world, platform)
        if (full := self._with_strangers(plan, world)) is not world:
            world = full
            plan = make_plan(spec, world, platform)
        world, problem = self._carry_out(plan, world)
        status = build_status(spec, world, problem, now)
        self._show_conditions(key, status)
        self._report(world, status)
        self.metrics.set_replicas(key, status["desiredReplicas"], status["readyReplicas"])
        return problem

    def _show_conditions(self, key: Key, status: dict[str, Any]) -> None:
        shown = [(condition["type"], condition["status"], condition["reason"]) for condition in status["conditions"]]
        self.metrics.set_conditions(key, shown)

    def _with_strangers(self, plan: Plan, world: World) -> World:
        """The world with what already has a name that the plan would create, which only the API server can tell.

        Somebody else's object bears no label of ours, and one of ours may have lost it: neither is watched.
        """
        for apply in plan.applies:
            name = apply.manifest["metadata"]["name"]
            if world.child(apply.kind, name) is None:
                stranger = self.cluster.look(apply.kind, world.key[0], name)
                world = world if stranger is None else world.with_child(apply.kind, stranger)
        return world

    def _carry_out(self, plan: Plan, world: World) -> tuple[World, Problem | None]:
        """Writes the plan; returns the world as it is then, and why the rest could not be written."""
        for apply in plan.applies:
            try:
                live = self.cluster.apply(apply.kind, apply.manifest)
            except KubeError as error:
                if error.status == 404 and apply.kind in OPTIONAL_KINDS:
                    continue  # its CRD has just gone
                if not error.is_refusal:
                    raise
                return world, Problem("ApplyRefused", f"the {apply.kind.name} was refused: {error}")
            self._announce_apply(apply, world, live)
            world = world.with_child(apply.kind, live)
        for delete in plan.deletes:
            self.cluster.delete(delete.kind, delete.child)
            name = delete.child["metadata"]["name"]
            self._announce(world, f"{delete.kind.name} {name} {delete.why}")
            world = world.without_child(delete.kind, name)
        return world, plan.problem

    def _announce_apply(self, apply: Apply, world: World, live: Object) -> None:
        before = world.child(apply.kind, live["metadata"]["name"])
        if before is not None and before["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]:
            return
        self._announce(world, f"{apply.kind.name} {live['metadata']['name']} {apply.why}")

    def _announce(self, world: World, message: str) -> None:
        logger.info("%s/%s: %s", *world.key, message)
        self._notify(world.resource, Notice("Normal", "Applied", message))

    def _report(self, world: World, status: dict[str, Any]) -> None:
        """Writes the status if it says anything new, and an Event if that is a transition."""
        if status == world.resource.get("status"):
            return
        notices = (scaling_notice(world.resource, status), transition_notice(world.resource, status))
        self.cluster.patch_status(world.resource, status)
        for notice in notices:
            if notice is None:
                continue
            logger.info("%s/%s: %s: %s", *world.key, notice.reason, notice.message)
            self._notify(world.resource, notice)

    def _notify(self, resource: Object, notice: Notice) -> None:
        time = self.now().isoformat()
        event = {
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message[:1000],
            "firstTimestamp": time,
            "lastTimestamp": time,
        }
        try:
            self.cluster.create_event(resource, event)
        except KubeError as error:
            # An Event is a courtesy: the state of the world does not hang on it.
            logger.warning("%s: recording an Event: %s", resource["metadata"]["name"], error)
