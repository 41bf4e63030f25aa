"""What Kubernetes, Prometheus and people look at: health, readiness, metrics, models, version."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from fastgen.server.openai.responses import ModelCard, ModelList
from fastgen.server.serving.service import Service
from fastgen.version import VERSION

router = APIRouter()


class Status(msgspec.Struct, frozen=True):
    """How the server is, in a word or with the reason."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """Which fastgen this is."""

    version: str


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the process and its engine are alive, loading included; 503 when the engine is dead."""
    service: Service = request.app.state.service
    wrong = service.lifecycle.why_not_healthy()
    return _json(Status("ok")) if wrong is None else _json(Status(wrong), 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken; else 503 with the reason, such as `loading weights 40 %`."""
    service: Service = request.app.state.service
    wrong = service.lifecycle.why_not_ready()
    return _json(Status("ready")) if wrong is None else _json(Status(wrong), 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format, or OpenMetrics where the scraper asks for it."""
    service: Service = request.app.state.service
    body, content_type = service.metrics.expose(request.headers.get("accept", ""), service.lifecycle.num_open)
    return Response(body, headers={"Content-Type": content_type})


@router.get("/version")
async def version() -> Response:
    """The engine's version."""
    return _json(Version(VERSION))


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names that requests may use."""
    service: Service = request.app.state.service
    return _json(ModelList([_card(service, name) for name in service.names]))


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One of these names."""
    service: Service = request.app.state.service
    return _json(_card(service, service.check_model(name)))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(name, service.created, service.lifecycle.model().engine.info.max_model_length)
