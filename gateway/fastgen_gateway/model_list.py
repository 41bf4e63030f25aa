"""The body of `GET /v1/models`: all exposed models."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import unquote

from fastgen_gateway.routing.client import Client
from fastgen_gateway.routing.model_table import Exposed, ModelTable
from fastgen_gateway.routing.refusal import Refusal, unknown_model


def model_list(models: ModelTable, client: Client | None = None) -> dict[str, Any]:
    """Return the list of models that a client may use, by name."""
    return {"object": "list", "data": [_model(name, exposed) for name, exposed in sorted(models.names(client).items())]}


def one_model(models: ModelTable, path: str, client: Client | None = None) -> dict[str, Any] | Refusal:
    """Return a model by its name in a URL's path, or the error for one that does not exist."""
    name = unquote(path)
    exposed = models.find(name, client)
    return unknown_model(name, models.names(client)) if exposed is None else _model(name, exposed)


def _model(name: str, exposed: Exposed) -> dict[str, Any]:
    try:
        created = int(datetime.fromisoformat(exposed.created).timestamp())
    except (ValueError, OverflowError):
        created = 0
    return {"id": name, "object": "model", "created": created, "owned_by": exposed.address}
