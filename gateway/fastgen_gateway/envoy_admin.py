"""Drain Envoy through its admin interface, before the pod ends."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import aiohttp

# As engines do after SIGTERM: so long, endpoints that are gone may still get new connections.
_LEAST_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.5
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)
# After the first, Envoy is not ready, and its responses close their connections. With the second, its listeners
# close after its drain time; Envoy itself goes on.
_POSTS: Final = ("/healthcheck/fail", "/drain_listeners?graceful&skip_exit")
# Requests of clients, and calls of Gateways in front of InferencePools, which last as long as their requests.
_ACTIVE: Final = ("http.front.downstream_rq_active", "http.pools.downstream_rq_active")

logger = logging.getLogger(__name__)


async def drain_envoy(port: int) -> None:
    """Let Envoy end its connections; return once it has no request, at the earliest after 15 s.

    The kubelet bounds the time: it ends the containers after the pod's grace period.

    Args:
        port: of the admin interface, on the loopback interface.
    """
    began = time.monotonic()
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        for path in _POSTS:
            while not await _post(session, f"{url}{path}"):
                await asyncio.sleep(_POLL_SECONDS)
        while await _is_active(session, url) or time.monotonic() - began < _LEAST_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)


async def _post(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether Envoy has answered in time. Raises ClientError if it does not run, or answers with an error."""
    try:
        async with session.post(url) as response:
            response.raise_for_status()
    except TimeoutError:
        logger.warning("Envoy's admin interface is slow")
        return False
    return True


async def _is_active(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether Envoy has requests of clients, or is too slow to tell; False once it does not run any more."""
    try:
        async with session.get(
            f"{url}/stats", params={"filter": f"^({'|'.join(_ACTIVE)})$", "format": "json"}
        ) as response:
            stats = (await response.json(content_type=None))["stats"]
    except TimeoutError:
        logger.warning("Envoy's admin interface is slow")
        return True
    except (aiohttp.ClientError, OSError) as error:
        logger.warning("Envoy's admin interface does not answer: %s", error)
        return False
    return any(int(each["value"]) > 0 for each in stats if each.get("name") in _ACTIVE)
