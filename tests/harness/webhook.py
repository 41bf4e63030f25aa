"""Admission webhooks at a real API server: an HTTPS server in this process, and its registration."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from cluster.pki import Authority
from fastgen_operator.kinds import DEPLOYMENT, SERVICE_ACCOUNT, Kind
from harness.probes import probe
from harness.space import Space
from support.namespace import Object
from support.waiting import eventually

# Changes an object in place.
Mutation = Callable[[Object], None]
# Returns what a webhook says about a request, without its uid.
Decision = Callable[[Object], Object]
# The operator's children, as the resources of a webhook's rule.
CHILDREN = ("serviceaccounts", "services", "networkpolicies", "poddisruptionbudgets", "deployments")


@dataclass
class Webhook:
    """A webhook; `seen` has the names of the objects that it was asked about."""

    decide: Decision
    seen: list[str] = field(default_factory=list)

    def review(self, request: Object) -> Object:
        """Return the response to an AdmissionReview's request."""
        self.seen.append(request["name"])
        return {"uid": request["uid"], **self.decide(request)}


class _Handler(BaseHTTPRequestHandler):
    webhook: Webhook

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        response = {**review, "response": self.webhook.review(review.pop("request"))}
        body = json.dumps(response).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Do not log."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Do not report connections that the API server has closed, after its timeout."""


def by_patch(mutate: Mutation) -> Decision:
    """Return the decision that changes the object."""

    def decide(request: Object) -> Object:
        changed = json.loads(json.dumps(request["object"]))
        mutate(changed)
        # One operation per field: a JSON patch cannot replace the whole object.
        patch = [{"op": "add", "path": f"/{name}", "value": value} for name, value in changed.items()]
        encoded = base64.b64encode(json.dumps(patch).encode()).decode()
        return {"allowed": True, "patchType": "JSONPatch", "patch": encoded}

    return decide


def mirror_image(deployment: Object) -> None:
    """Change only a value of the operator's, as a policy for a registry mirror does."""
    engine = deployment["spec"]["template"]["spec"]["containers"][0]
    if not engine["image"].startswith("mirror/"):
        engine["image"] = f"mirror/{engine['image']}"


@contextmanager
def mutating(space: Space, folder: Path, mutate: Mutation) -> Iterator[Webhook]:
    """Let a webhook change the Deployments in this namespace only; return when the API server calls it.

    Args:
        folder: where its certificate is written.
    """
    with _registered(space, folder, "Mutating", by_patch(mutate), ("deployments",)) as webhook:
        _wait_called(space, webhook, DEPLOYMENT)
        yield webhook


@contextmanager
def validating(space: Space, folder: Path, decide: Decision) -> Iterator[Webhook]:
    """Let a webhook decide on the operator's children in this namespace only; return when the API server calls it.

    Args:
        folder: where its certificate is written.
    """
    with _registered(space, folder, "Validating", decide, CHILDREN) as webhook:
        _wait_called(space, webhook, SERVICE_ACCOUNT)
        yield webhook


@contextmanager
def _registered(space: Space, folder: Path, kind: str, decide: Decision, resources: Sequence[str]) -> Iterator[Webhook]:
    Authority.open(folder).issue("webhook", "webhook", hosts=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "webhook.crt", folder / "webhook.key")
    webhook = Webhook(decide)
    handler = type("Handler", (_Handler,), {"webhook": webhook})
    with _Server(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        bundle = base64.b64encode((folder / "ca.crt").read_bytes()).decode()
        configuration = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": f"{kind}WebhookConfiguration",
            "metadata": {"name": space.name},
            "webhooks": [
                {
                    "name": "rewriter.fastgen.test",
                    "clientConfig": {"url": f"https://127.0.0.1:{server.server_port}/", "caBundle": bundle},
                    "rules": [
                        {
                            **{"apiGroups": ["*"], "apiVersions": ["v1"], "resources": list(resources)},
                            "operations": ["CREATE", "UPDATE"],
                        }
                    ],
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                }
            ],
        }
        space.kubectl("create", "--filename", "-", stdin=json.dumps(configuration))
        try:
            yield webhook
        finally:
            space.kubectl("delete", f"{kind}WebhookConfiguration", space.name)
            server.shutdown()
            thread.join()


def _wait_called(space: Space, hook: Webhook, kind: Kind) -> None:
    def is_called() -> bool:
        probe(space, kind)
        return bool(hook.seen)

    eventually(is_called, within=20, what="a call of the webhook")
    hook.seen.clear()
