"""Every field of the resource: an edit is rejected with the field's name, or has an effect and can be undone."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.commands import CommandError
from fastgen_operator.api import Spec
from fastgen_operator.autoscale.policy import policy_of
from fastgen_operator.autoscale.rules.rate_limits import rate_limits_of
from fastgen_operator.autoscale.rules.schedules import faults, timetable
from fastgen_operator.children import build_children
from fastgen_operator.children.platform import Neighbours, Platform
from fastgen_operator.children.template import TemplateRefused, build_template
from fastgen_operator.kinds import CLAIM, Object
from fastgen_operator.plan.model_cache import plan_download
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import desired_state
from fastgen_operator.plan.situation import Situation
from harness.edits import Edit, dotted, edits_of, fields, spec_schema
from harness.everything import AUTOSCALED, BLOCK_STORAGE, EVERYTHING
from harness.objects import NOW, stored
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.waiting import eventually

GATEWAY = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "fastgen-gateway"}}}
PLATFORM = Platform("engine:test", neighbours=Neighbours(gateway=(GATEWAY,)), headroom_class="headroom")
# With a class, the operator of the other tests ignores it.
CLASSED = {**EVERYTHING, "operatorClass": "blue"}
BASES = {"fixed": EVERYTHING, "autoscaled": AUTOSCALED, "classed": CLASSED, "block storage": BLOCK_STORAGE}
# The parts of the spec that are edited in each of them; None for all.
PARTS = {"fixed": None, "autoscaled": ("autoscaling",), "classed": ("operatorClass",), "block storage": ("cache",)}


def effect(spec: Spec) -> Any:
    """Return everything derived from a spec: operator, children, download, scaling policy; or the refusal."""
    owner = stored()
    desired = desired_state(Situation(Observed(owner), spec, NOW), PLATFORM)
    try:
        template = build_template(desired)
    except TemplateRefused as refusal:
        return str(refusal)
    children, download = build_children(desired, template), None
    for claim in (child for kind, child in children if kind == CLAIM):
        claim["metadata"]["uid"] = "uid-of-claim"
        found = Situation(Observed(owner, {(CLAIM, "chat"): claim}), spec, NOW, nodes=())
        download = plan_download(desired, template, found).job
    scaling = spec.autoscaling
    schedules = faults(scaling), [timetable(scaling, datetime(2028, 2, 29, hour, 30, tzinfo=UTC)) for hour in (2, 12)]
    policies = policy_of(spec, 1, 5.0), rate_limits_of(scaling), schedules, spec.rollout.canary
    return spec.operator_class, children, download, policies


def resolved(spec: Spec) -> Spec:
    """Return a spec with the default of tensorParallel, which is the number of GPUs."""
    engine = spec.engine.model_copy(update={"tensor_parallel": spec.num_ranks})
    return spec.model_copy(update={"engine": engine})


def all_edits() -> Iterator[tuple[str, Edit]]:
    """Yield the edits of each base, with its name."""
    for name, base in BASES.items():
        parts = PARTS[name]
        yield from ((name, edit) for edit in edits_of(base) if parts is None or edit.path[0] in parts)


def test_every_field_is_edited() -> None:
    def plain(path: tuple[str | int, ...]) -> str:
        return dotted(tuple(0 if isinstance(part, int) else part for part in path))

    edited = {plain(edit.path) for _, edit in all_edits()}
    missing = {dotted(path) for path in fields(spec_schema())} - edited
    assert not missing, "give it a value in harness/everything.py"


def test_every_valid_edit_has_an_effect() -> None:
    for base, edit in all_edits():
        before = Spec.model_validate(BASES[base])
        try:
            after = Spec.model_validate(edit.spec)
        except ValidationError:
            continue  # rejected by the API server: tested below
        if after.autoscaling and after.autoscaling.min_replicas > after.autoscaling.max_replicas:
            continue  # rejected by the API server: tested below
        assert resolved(before) == resolved(after) or effect(before) != effect(after), f"{edit}: has no effect"


@pytest.mark.controlplane
def test_the_api_server_rejects_an_edit_by_the_fields_name_or_the_operator_acts_on_it(space: Space) -> None:
    edits = list(all_edits())
    assert len(edits) > 300
    stored_base = {name: _stored(space, [spec])[0] for name, spec in BASES.items()}
    answers = _stored(space, [edit.spec for _, edit in edits])
    rejected = 0
    for (base, edit), answer in zip(edits, answers, strict=True):
        if isinstance(answer, str):
            rejected += 1
            assert edit.field in answer, f"{edit}: {answer}"
            continue
        before = stored_base[base]
        assert not isinstance(before, str), before
        same = resolved(Spec.model_validate(before)) == resolved(Spec.model_validate(answer))
        assert same or effect(Spec.model_validate(before)) != effect(Spec.model_validate(answer)), str(edit)
    assert 100 < rejected < len(edits) - 100


def _stored(space: Space, specs: list[Object]) -> list[Object | str]:
    """Return what the API server would store for each spec, or its error message."""
    items = [
        {**resource(f"edit{number}"), "spec": spec, "metadata": {"name": f"edit{number}"}}
        for number, spec in enumerate(specs)
    ]
    body = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    command = ("create", "--validate=ignore", "--dry-run=server", "--output=json", "--filename", "-")
    try:
        said, refused = space.kubectl(*command, stdin=body), ""
    except CommandError as error:
        said, refused = error.stdout, error.stderr
    found = {item["metadata"]["name"]: item["spec"] for item in _documents(said)}
    words: dict[str, str] = {}
    name = ""
    for line in refused.splitlines():
        found_name = re.search(r"\bedit[0-9]+\b", line)
        name = found_name.group() if found_name else name
        words[name] = words.get(name, "") + line + "\n"
    return [found.get(f"edit{number}") or words[f"edit{number}"] for number in range(len(specs))]


def _documents(text: str) -> Iterator[Object]:
    """Yield the JSON objects of kubectl's concatenated output."""
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        document, end = decoder.raw_decode(rest)
        yield document
        rest = rest[end:].lstrip()


# One edit per part of the spec that the running operator must apply and undo.
SAMPLE: dict[str, Object] = {
    "model": {"servedName": "other"},
    "engine": {"kvCache": {"memoryPercent": 51}},
    "resources": {"requests": {"cpu": "0.6"}},
    "replicas": {},  # a number, not a map: see PLAIN_SAMPLE
    "rollout": {"maxSurge": 2},
    "drainSeconds": {},
    "startupDeadlineSeconds": {},
    "scheduling": {"nodeSelector": {"disk": "slow"}},
    # Lower bounds: raised replicas stay until the load decreases.
    "autoscaling": {"minReplicas": 1, "maxReplicas": 1, "schedules": []},
    "cache": {"preload": True},
    "disruption": {"minAvailable": 2},
    "network": {"allowFrom": []},
    "gateway": {"expose": False},
    "apiKeySecretName": {},
    "podTemplate": {"metadata": {"labels": {"team": "other"}}},
}
# A canary needs the gateway.
SAMPLE_BASES = {
    "autoscaling": AUTOSCALED,
    "cache": BLOCK_STORAGE,
    "gateway": {**EVERYTHING, "rollout": {"maxSurge": 1}},
}
PLAIN_SAMPLE: Object = {"replicas": 3, "drainSeconds": 31, "startupDeadlineSeconds": 400, "apiKeySecretName": "others"}


@pytest.mark.controlplane
def test_edits_reach_the_children_and_undoing_them_restores_the_children(
    space: Space, operator: OperatorProcess
) -> None:
    # operatorClass: see runtime/test_operator_class.py.
    assert SAMPLE.keys() | {"operatorClass"} == spec_schema()["properties"].keys(), "a part of the spec is not tried"
    names = {part: part.lower() for part in SAMPLE}
    bases = {part: SAMPLE_BASES.get(part, EVERYTHING) for part in SAMPLE}
    _apply_all(space, {names[part]: bases[part] for part in SAMPLE})
    eventually(lambda: len(space.items("deployments")) == len(SAMPLE), within=60, what="every Deployment")
    operator.let_resyncs_pass(1)
    before = _children(space)
    edited = {part: _merged(bases[part], part) for part in SAMPLE}
    _apply_all(space, {names[part]: spec for part, spec in edited.items()})

    def unchanged() -> list[str]:
        after = _children(space)
        return [part for part, name in names.items() if after.get(name) == before[name]]

    assert eventually_empty(unchanged, within=60) == []
    _apply_all(space, {names[part]: bases[part] for part in SAMPLE})

    def left() -> list[str]:
        after = _children(space)
        return [part for part, name in names.items() if after.get(name) != before[name]]

    assert eventually_empty(left, within=60) == []


def eventually_empty(remaining: Callable[[], list[str]], within: float) -> list[str]:
    """Wait until the list is empty; return what is left after `within` seconds."""
    with contextlib.suppress(TimeoutError):
        eventually(lambda: remaining() == [], within=within, what="nothing left")
    return remaining()


def _merged(base: Object, part: str) -> Object:
    if part in PLAIN_SAMPLE:
        return {**base, part: PLAIN_SAMPLE[part]}
    merged: Object = {**base[part], **SAMPLE[part]}
    if part in ("engine", "resources"):
        merged |= {name: {**base[part][name], **value} for name, value in SAMPLE[part].items()}
    return {**base, part: merged}


def _apply_all(space: Space, specs: dict[str, Object]) -> None:
    items = [{**resource(name), "spec": spec} for name, spec in specs.items()]
    space.kubectl(
        *("apply", "--server-side", "--filename", "-"),
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
    )


def _children(space: Space) -> dict[str, dict[str, Object]]:
    """Return the specs of all children by resource, and by kind and name."""
    kinds = "deployments,services,networkpolicies,poddisruptionbudgets,persistentvolumeclaims,jobs"
    found: dict[str, dict[str, Object]] = {}
    for child in space.items(kinds):
        owner, metadata = child["metadata"]["ownerReferences"][0]["name"], child["metadata"]
        if not metadata.get("deletionTimestamp"):
            found.setdefault(owner, {})[f"{child['kind']}/{metadata['name']}"] = child["spec"]
    return found
