"""SECURITY.md and the pages on administration and limits: claims about authors, tenants and credentials are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECURITY = (ROOT / "SECURITY.md").read_text().partition("## Who reaches what")[2].partition("\n## ")[0]
PAGES = [(ROOT / "docs" / name).read_text() for name in ("administration.md", "limits.md")]
HEADERS = ("who", "promise", "what remains")

AUTHOR = "operator/api/test_author_policy.py"
REACHES = f"{AUTHOR}::test_an_author_reaches_only_what_the_author_may_reach"
ENOUGH = f"{AUTHOR}::test_rights_on_secrets_claims_or_pods_are_enough"
CHANGED = f"{AUTHOR}::test_what_another_author_named_cannot_be_reached_by_a_change_of_the_image"
WORDS = f"{AUTHOR}::test_a_rejection_names_the_field_the_user_and_the_right"
FIELDS = "operator/api/test_pod_fields.py::test_every_field_is_allowed_checked_or_refused"
ON_THE_NODE = "e2e/test_authors.py::test_an_author_without_rights_on_pods_serves_but_cannot_take_the_node"
VALUES = "operator/runtime/test_policies_of_other_values.py"
OF_THE_CHART = f"{VALUES}::test_authors_use_only_the_images_labels_and_annotations_of_the_chart"
ANY = f"{VALUES}::test_templates_of_any_kind_take_the_node"
CLASS = f"{VALUES}::test_an_operator_writes_only_children_and_statuses_of_its_class"
WITHOUT = "operator/runtime/test_without_policies.py"
OPERATOR = "operator/runtime/test_operator_policy.py"
HOSTILE = f"{OPERATOR}::test_a_hostile_deployment_is_refused"
OTHERS = f"{OPERATOR}::test_objects_of_others_are_neither_changed_adopted_nor_deleted"
KINDS = f"{OPERATOR}::test_children_cannot_reach_pods_traffic_or_data_of_others"
MONITORS = "chart/test_releases.py::test_monitors_and_pools_have_only_the_pods_of_their_resource_and_no_credentials"
PLACEHOLDERS = (
    "operator/children/test_node_headroom.py::test_the_operators_credentials_give_the_class_to_placeholders_only"
)
PICKERS = "operator/children/test_inference_pool.py::test_the_operators_credentials_allow_only_endpoints_of_pickers"
READS = f"{OPERATOR}::test_what_the_operators_role_reads_has_no_secret"
CHOOSES = f"{OPERATOR}::test_the_operators_credentials_choose_what_runs_beside_the_secrets_of_a_spec"
STATUS = f"{OPERATOR}::test_only_the_operators_own_events_and_lease_are_written"
RESERVED = f"{OPERATOR}::test_nothing_is_written_in_reserved_namespaces"
NOBODY = f"{OPERATOR}::test_an_owner_that_does_not_exist_lasts_until_the_garbage_collector_removes_the_deployment"
SCOPE = (
    "operator/runtime/test_namespace_scope.py"
    "::test_an_operator_of_one_namespace_waits_for_its_crd_and_permissions_and_needs_no_others"
)
RESTRICTED = f"{OPERATOR}::test_what_violates_the_restricted_standard_is_refused_also_from_the_operator"

DEEP = "operator/reconcile/test_deep_and_large_objects.py"
ANY_DEPTH = f"{DEEP}::test_resources_of_any_depth_are_reported_and_stop_nothing_else"
ADMITTED = f"{DEEP}::test_admission_rejects_what_the_operator_could_not_use_and_names_the_field"
CHILDREN = f"{DEEP}::test_children_with_large_metadata_and_large_pods_of_others_stop_nothing"
STUBS = "operator/kube/test_hostile_objects.py"

# The tests of each claim in these sections of the pages, by its beginning. No tests: it claims nothing.
CLAIMS: dict[str, dict[str, tuple[str, ...]]] = {
    "Who may create a FastGenDeployment": {
        "The operator creates pods with its own rights": (
            f"{WITHOUT}::test_an_author_reaches_what_any_pod_of_the_namespace_does",
        ),
        "The chart's admission policies do": (CHANGED, REACHES),
        "An author who **may create pods**": (ENOUGH,),
        "All other authors": (),
        "`spec.model.secretName`, `spec.apiKeySecretName`": (REACHES,),
        "Secrets in `spec.podTemplate.spec`": (REACHES, ENOUGH),
        "`serviceAccountName` in": (REACHES, ENOUGH),
        "`spec.model.source: pvc://CLAIM/…`": (REACHES, ENOUGH),
        "`spec.model.source: oci://…`": (OF_THE_CHART, REACHES),
        "`priorityClassName`, `runtimeClassName`": (REACHES,),
        "`spec.engine.image`": (OF_THE_CHART,),
        "labels and annotations of": (OF_THE_CHART, REACHES),
        "variables with a value": (FIELDS, REACHES),
        "every other field of a pod": (FIELDS, REACHES),
        "A rejection (": (WORDS,),
        "With GitOps": (WORDS,),
        "Test it with": (WORDS,),
        "A change of the replicas with": (CHANGED, STATUS),
        "[Decision 045]": (),
        "What an author without rights on pods reaches": (
            *(
                ON_THE_NODE,
                REACHES,
                "operator/children/test_policies.py::test_pods_use_their_own_service_account_without_a_token",
            ),
            f"{AUTHOR}::test_the_labels_of_an_author_decide_which_services_and_policies_select_the_pods",
            "operator/reconcile/test_adoption.py::test_orphaned_children_are_adopted_without_a_restart",
        ),
        "Keep what such an author": (),
        "**Namespaces.**": (),
        "The policies bind FastGenDeployments.": (ENOUGH,),
        "To bind all pods of a namespace": (
            "operator/reconcile/test_lifecycle.py::test_a_resource_gets_an_owned_deployment_and_service"
            "_and_pods_that_the_restricted_standard_admits",
            "operator/api/test_page_commands.py::test_the_commands_for_kubectl_succeed",
        ),
        "Where the policies cannot be installed": (
            f"{WITHOUT}::test_the_operator_still_refuses_templates_that_violate_the_restricted_standard",
        ),
        "`podTemplate: any` allows them": (ANY,),
    },
    "What the operator's credentials reach": {
        "RBAC lets the operator": (
            f"{WITHOUT}::test_the_operators_credentials_reach_every_secret_through_a_pod",
            SCOPE,
            "chart/test_chart.py::test_watched_namespaces_get_a_role_each_and_no_cluster_role",
        ),
        "Two policies on its user": (HOSTILE,),
        "It writes only objects whose controller": (HOSTILE, RESERVED),
        "It changes and deletes only such objects": (OTHERS,),
        "It adds no other owner": (HOSTILE, f"{OPERATOR}::test_children_are_deleted_with_their_dependents"),
        "Their Services, policies, budgets": (KINDS, MONITORS),
        "Services have no external": (KINDS,),
        "Deployments named `NAME-headroom`": (PLACEHOLDERS,),
        "Where the chart's gateway is installed": (PICKERS,),
        "Pod templates meet the restricted standard": (RESTRICTED, HOSTILE),
        "It annotates and deletes only pods": (
            f"{OPERATOR}::test_pods_are_only_annotated_and_deleted_and_only_those_of_resources",
            STATUS,
        ),
        "With `operatorClass`": (CLASS,),
        "What remains": (),
        "It reads what its role allows": (
            READS,
            "chart/test_chart.py::test_the_operator_has_exactly_the_rights_that_it_uses",
        ),
        "With `watchNamespaces`, only": (SCOPE,),
        "It cannot read Secrets": (READS,),
        "It chooses the images": (CHOOSES,),
        "It writes the status of every": (STATUS,),
        "It chooses the addresses behind": (PICKERS,),
        "An owner that does not exist": (NOBODY,),
        "Such a Deployment runs": (NOBODY,),
        "`watchNamespaces` keeps": (SCOPE, RESERVED),
    },
    "Objects in the cluster": {
        "A tenant may create any object": (ANY_DEPTH,),
        "These bounds keep one tenant": (
            "operator/reconcile/test_hostile_tenant.py::test_a_tenant_with_300_hostile_resources_delays_nobody",
        ),
        "64 Ki characters": (ADMITTED,),
        "128 Ki characters": (ADMITTED,),
        "32 levels, 1,000 items": (ADMITTED,),
        "32 levels, 256 KiB": (
            f"{STUBS}::test_a_resource_of_more_levels_than_the_limit_is_kept_as_a_stub_that_names_the_field",
            f"{STUBS}::test_a_large_resource_is_kept_as_a_stub_that_names_the_largest_field",
        ),
        "32 levels, 1 MiB": (f"{DEEP}::test_a_deployment_that_is_too_large_to_be_read_is_named_and_left_alone",),
        "32 levels, 64 KiB": (CHILDREN, f"{STUBS}::test_a_stub_of_a_child_keeps_what_tells_its_owner"),
        "50,000 exposed resources": (
            "operator/autoscale/scrape/test_gateways.py::test_an_answer_without_end_is_bounded",
        ),
        "The operator checks its own bounds": (ANY_DEPTH,),
        "Within them, 200 resources": (
            "operator/runtime/test_memory.py::test_200_of_the_largest_resources_fit_into_the_memory_limit",
        ),
        "Annotations and managedFields": (
            f"{STUBS}::test_what_the_operator_does_not_read_of_a_resource_does_not_count",
            f"{STUBS}::test_the_managed_fields_of_a_large_resource_are_dropped_before_it_is_decoded",
        ),
    },
}


def check(place: str) -> None:
    """Fail unless the test exists."""
    path, _, test = place.partition("::")
    assert f"def {test}(" in (ROOT / "tests" / path).read_text(), f"{path} has no {test}"


def test_each_promise_names_tests_that_exist() -> None:
    rows = [line.strip("| ").split(" | ") for line in SECURITY.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] not in HEADERS]
    assert len(rows) >= 24
    for *promise, tests in rows:
        named = re.findall(r"`([\w/]+\.py::\w+)`", tests)
        assert named, promise
        assert ", ".join(f"`{place}`" for place in named) == tests, promise
        for place in named:
            check(place)


def test_the_promises_stand_in_tables() -> None:
    paragraphs = [text for text in SECURITY.strip().split("\n\n") if not text.startswith("| ")]
    assert [text.split(maxsplit=2)[:2] for text in paragraphs] == [
        ["Each", "row"],
        ["The", "page"],
        ["Not", "promised,"],
    ]


def claims(section: str) -> list[str]:
    """Return the sentences of the section of that name, and the rows of its tables."""
    (text,) = [found for page in PAGES if (found := page.partition(f"\n## {section}\n")[2].partition("\n## ")[0])]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    rows = [line.strip("| ") for line in text.splitlines() if re.match(r"\| (?!what |bound )", line)]
    blocks = re.split(r"\n\n|\n- ", "\n" + re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE))
    prose = [" ".join(block.split()).removeprefix("- ") for block in blocks]
    return rows + [each for block in prose for each in re.split(r"(?<=[.*]) (?=[A-Z`*\[])", block) if each]


@pytest.mark.parametrize("section", CLAIMS)
def test_each_claim_about_authors_and_credentials_has_tests(section: str) -> None:
    expected, found = CLAIMS[section], claims(section)
    for claim in found:
        assert len([start for start in expected if claim.startswith(start)]) == 1, claim
    for start, tests in expected.items():
        assert any(claim.startswith(start) for claim in found), start
        for place in tests:
            check(place)
