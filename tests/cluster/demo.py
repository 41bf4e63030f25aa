"""`make up` and `make down`: start a cluster with a model that answers a question, and remove it."""

from __future__ import annotations

import json
import os
import shlex
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

from cluster import standin
from cluster.archive import write
from cluster.bed import Bed, Say, choose, close_bed, existing_bed, open_bed
from cluster.endpoint import PORT, service_url
from cluster.images import REPOSITORY
from cluster.kind import docker_answers
from cluster.progress import Progress
from cluster.waiting import wait_for

CHART = REPOSITORY / "charts" / "fastgen"
EXAMPLE = REPOSITORY / "examples" / "smollm2.yaml"
RELEASE, SYSTEM = "fastgen", "fastgen-system"
SPACE, NAME = "default", "smollm2"
RESOURCE = f"fgd/{NAME}"
CRD = "fastgendeployments.fastgen.dev"
LEASE = "fastgen-operator"
QUESTION = "What is the capital of Germany?"
READY_SECONDS = 600.0


class Endpoint(NamedTuple):
    """A Service with an OpenAI-compatible API."""

    title: str
    namespace: str
    name: str
    port: int


GATEWAY = Endpoint("Gateway, for all exposed models", SYSTEM, "fastgen-gateway", 80)
MODEL = Endpoint("Endpoint", SPACE, NAME, PORT)


def up(console: Console) -> None:
    """Start the cluster, the operator, the gateway and a small model, and send it a question. Reuses what already runs.

    On an external cluster, there is a gateway only if FASTGEN_GATEWAY_IMAGE is set.

    Raises the errors of open_bed(), and TimeoutError with the last Ready condition if the model is not ready in time.
    """
    progress = Progress(console, steps=4)
    with progress.step("Start Kubernetes and load the images"):
        bed = open_bed(progress.say)
    flags = gateway_flags(bed, progress.say)
    with progress.step(f"Install the operator{' and the gateway' if flags else ''} with the chart"):
        install(bed, RELEASE, *flags)
    with progress.step(f"Deploy a model: {EXAMPLE.relative_to(REPOSITORY)}"):
        bed.kubectl("-n", SPACE, "apply", "-f", str(EXAMPLE))
        if flags:
            bed.kubectl("-n", SPACE, "patch", RESOURCE, "--type=merge", '--patch={"spec":{"gateway":{"expose":true}}}')
        wait_until_ready(bed, progress)
    endpoints = [MODEL]
    if flags:
        endpoints.insert(0, GATEWAY)
    with progress.step(f"Ask a question: {QUESTION}"), ExitStack() as stack:
        urls = [stack.enter_context(service_url(bed, each.namespace, each.name, each.port)) for each in endpoints]
        progress.say(wait_for(f"a response from {urls[0]}", lambda: _ask(urls[0]), seconds=60, every=0.2))
    _print_next(console, bed, endpoints, urls)


def down(console: Console) -> None:
    """Remove everything that up() created.

    On an external cluster these are the model, the chart and the CRD. The chart and the CRD stay while there are other
    FastGenDeployments, which would be deleted with the CRD.
    """
    progress = Progress(console, steps=1)
    with progress.step("Removing the cluster" if _is_ours() else "Uninstalling from the cluster"):
        if _is_ours():
            close_bed(progress.say)
        else:
            bed = existing_bed(progress.say)
            remove_example(bed)
            if others := resources(bed):
                progress.say(f"The operator and its CRD stay, because there are {', '.join(others)}.")
            else:
                uninstall(bed)


def install(bed: Bed, release: str = RELEASE, *flags: str) -> None:
    """Install or upgrade the chart with the bed's images, and wait for the operator. `flags` are helm's."""
    images = [f"--set=operator.image={bed.operator_image}", f"--set=engine.image={bed.engine_image}"]
    where = ["--namespace", SYSTEM, "--create-namespace"]
    bed.helm("upgrade", "--install", release, str(CHART), *where, *images, "--wait", "--timeout=600s", *flags)


def gateway_flags(bed: Bed, say: Say) -> list[str]:
    """Load the gateway's images and return the helm flags that enable it; none if the cluster cannot have the images.

    The native cluster gets this machine's Envoy, kind pulls Envoy's own image.
    """
    if bed.kind == "external":
        image = os.environ.get("FASTGEN_GATEWAY_IMAGE")
        return ["--set=gateway.enabled=true", f"--set=gateway.image={image}"] if image else []
    flags = ["--set=gateway.enabled=true", f"--set=gateway.image={bed.build_image('gateway', say=say)}"]
    if bed.kind == "kind":
        return flags
    with TemporaryDirectory() as folder:
        archive = Path(folder) / "image.tar"
        write(standin.envoy_image(), archive)
        bed.load_image(standin.ENVOY, archive)
    return [*flags, f"--set=gateway.envoyImage={standin.ENVOY}"]


def remove_example(bed: Bed) -> None:
    """Delete the example and wait for its end, if there is one. The operator must still run."""
    if CRD in bed.kubectl("get", "crd", "--output=name"):
        bed.kubectl("-n", SPACE, "delete", "-f", str(EXAMPLE), "--ignore-not-found", "--wait=true")


def resources(bed: Bed) -> list[str]:
    """Return namespace/name of all FastGenDeployments that are not being deleted."""
    if CRD not in bed.kubectl("get", "crd", "--output=name"):
        return []
    found = json.loads(bed.kubectl("get", "fgd", "--all-namespaces", "--output=json"))["items"]
    live = (item["metadata"] for item in found if "deletionTimestamp" not in item["metadata"])
    return [f"{metadata['namespace']}/{metadata['name']}" for metadata in live]


def uninstall_release(bed: Bed, release: str = RELEASE) -> None:
    """Uninstall a release, which keeps the CRD and all resources."""
    bed.helm("uninstall", release, "--namespace", SYSTEM, "--wait", "--timeout=600s")
    free_lease(bed)


def free_lease(bed: Bed) -> None:
    """Delete the Lease of an operator that was removed with its permissions, so that the next one need not wait.

    It cannot release the Lease itself without them. It would expire after 15 seconds.
    """
    bed.kubectl("--namespace", SYSTEM, "delete", "lease", LEASE, "--ignore-not-found")


def uninstall(bed: Bed) -> None:
    """Remove the chart and the CRD."""
    bed.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--ignore-not-found", "--wait")
    bed.kubectl("delete", "crd", CRD, "--ignore-not-found")
    bed.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found")


def wait_until_ready(bed: Bed, progress: Progress) -> None:
    """Wait for the resource's Ready condition, and print its reason and message when they change."""
    said = ""

    def ready() -> bool:
        nonlocal said
        status, words = ready_condition(json.loads(bed.kubectl("-n", SPACE, "get", RESOURCE, "-o=json")))
        if words != said:
            progress.say(words)
            said = words
        return status == "True"

    try:
        wait_for(f"{RESOURCE} is Ready", ready, seconds=READY_SECONDS, every=0.5)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; last condition: {said}; see kubectl describe {RESOURCE}") from error


def ready_condition(resource: dict[str, Any]) -> tuple[str, str]:
    """Return the Ready condition's status, and its reason and message as text. Older generations count as Unknown."""
    conditions = resource.get("status", {}).get("conditions", [])
    generation = resource["metadata"].get("generation")
    for condition in conditions:
        if condition["type"] == "Ready" and condition.get("observedGeneration") == generation:
            return condition["status"], f"{condition['reason']}: {condition.get('message', '')}"
    return "Unknown", "waiting for the operator to observe it"


def _is_ours() -> bool:
    return choose(os.environ, docker_answers) != "external"


def _ask(url: str) -> str | None:
    body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None  # the gateway knows a model only a moment after it is exposed
        raise RuntimeError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError:
        return None  # the Service forwards to a pod only a moment after it is ready


def _print_next(console: Console, bed: Bed, endpoints: list[Endpoint], urls: list[str]) -> None:
    kubectl = shlex.quote(str(bed.programs / "kubectl"))
    forward: list[str] = []
    if bed.kind != "native":
        ports = range(8000, 8000 + len(endpoints))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        forward = [
            f"{kubectl} -n {each.namespace} port-forward service/{each.name} {port}:{each.port} &"
            for port, each in zip(ports, endpoints, strict=True)
        ]
    url, page = urls[0], urls[-1]
    message = json.dumps({"model": NAME, "messages": [{"role": "user", "content": QUESTION}]})
    lines = [
        f"export KUBECONFIG={shlex.quote(str(bed.kubeconfig))}",
        *forward,
        f"{kubectl} get fgd",
        "",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(message)}",
        "",
        ".venv/bin/python - <<'END'",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="none")',
        f'message = {{"role": "user", "content": "{QUESTION}"}}',
        f'for part in client.chat.completions.create(model="{NAME}", messages=[message], stream=True):',
        '    print(part.choices[0].delta.content or "", end="", flush=True)',
        "END",
        "",
        f"Page: {page}/ui",
        "Ask something there, and switch Long prompts on: their chunks share the steps with tokens of other answers.",
    ]
    console.print(Rule(f"{endpoints[0].title}: {url}/v1"))
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(Rule("To remove everything: make down"))
