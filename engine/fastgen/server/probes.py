"""GET endpoints: health, readiness, metrics, models and version; probes of load balancers may use HEAD."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from fastgen.server.http.api_error import APIError
from fastgen.server.openai.response_bodies import ModelCard, ModelList, json_response
from fastgen.server.serving.metrics_exchange import MetricsExchange
from fastgen.server.serving.service import Service
from fastgen.version import VERSION

router = APIRouter()


class Status(msgspec.Struct, frozen=True):
    """Status of the server, or the reason why it is unavailable."""

    status: str


class LoadedModel(msgspec.Struct, frozen=True):
    """The model of a server that is ready.

    `format` and `bytes` are those of its files, empty and 0 if unknown; `max_model_len` is the longest prompt plus
    generation, in tokens.
    """

    family: str
    format: str
    parameters: int
    bytes: int
    max_model_len: int


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the server is ready: the model that it serves, or the reason why it is not."""

    status: str
    model: LoadedModel | None = None


class Load(msgspec.Struct, frozen=True):
    """Open requests of the server, in vLLM's format."""

    server_load: int


class Version(msgspec.Struct, frozen=True):
    """Version of FastGen."""

    version: str


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """Return 200 while the engine is alive or loading; 503 once it has exited, failed or hung."""
    service: Service = request.app.state.service
    reason = service.lifecycle.why_not_healthy()
    return json_response(Status("ok")) if reason is None else json_response(Status(reason), 503)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Return 200 while requests are accepted, otherwise 503.

    The body gives the reason for 503, such as `loading weights 40 %`, and otherwise describes the model.
    """
    service: Service = request.app.state.service
    reason = service.lifecycle.why_not_ready()
    if reason is not None:
        return json_response(Readiness(reason), 503)
    info = service.lifecycle.model().engine.info
    parts = (info.architecture, info.weight_format, info.num_parameters, info.weight_bytes, info.max_model_length)
    return json_response(Readiness("ready", LoadedModel(*parts)))


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the number of open requests, as vLLM does."""
    service: Service = request.app.state.service
    return json_response(Load(service.lifecycle.total_open))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus text format, or in OpenMetrics if the scraper accepts it.

    With `--metrics-compat vllm`, the format is always Prometheus text. With `name[]` parameters, return only the
    samples of these names, as other exporters of the Prometheus client do.
    """
    service: Service = request.app.state.service
    accept, names = request.headers.get("accept", ""), request.query_params.getlist("name[]")
    exchange: MetricsExchange | None = request.app.state.exchange
    try:
        others = [] if exchange is None else await exchange.others()
    except OSError as error:
        raise APIError(
            503, f"the metrics of an API process are missing ({error}); try again", code="metrics_missing"
        ) from None
    body, content_type = service.metrics.expose(accept, service.lifecycle.num_open, names, others)
    return Response(body, headers={"Content-Type": content_type})


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> Response:
    """Return the version of FastGen."""
    return json_response(Version(VERSION))


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the served model names."""
    service: Service = request.app.state.service
    return json_response(ModelList([_card(service, name) for name in service.names]))


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """Return one served model name, with its limits; 404 for other names."""
    service: Service = request.app.state.service
    return json_response(_card(service, service.check_model(name)))


def _card(service: Service, name: str) -> ModelCard:
    model = service.lifecycle.model()
    info, defaults = model.engine.info, dict(model.generation_defaults)
    return ModelCard(name, service.created, service.names[0], info.max_model_length, info.deterministic, defaults)
