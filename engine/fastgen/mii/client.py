"""`fastgen.client`: connect to a running server.

Any program of the same user can have started it with `fastgen.serve`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastgen.api_client.api_keys import own_key
from fastgen.api_client.http import RemoteError, RemoteServer
from fastgen.core.request_error import RequestError
from fastgen.mii import deployments
from fastgen.mii.arguments import GenerateArguments, Response, as_list
from fastgen.mii.deployments import Deployment, DeploymentError

_MOST_AT_ONCE = 64
_POLL_SECONDS = 0.05
# In addition to the drain: the server's limits for its last responses and for its engine's exit.
_EXIT_SECONDS = 20.0
# A killed process closes its connections up to this long before it disappears.
_DISAPPEAR_SECONDS = 1.0

StreamingFunction = Callable[[list[Response]], Any]


def client(deployment_name: str, *, api_key: str | None = None) -> Client:
    """Return a client of a deployment on this machine.

    Args:
        deployment_name: as given to `fastgen.serve`.
        api_key: API key, if the server requires one; defaults to the environment variable FASTGEN_API_KEY.

    Raises:
        DeploymentError: as `deployments.find`, or the server process has not been started yet or has ended.
    """
    deployment = deployments.find(deployment_name)
    if not deployment.alive:
        deployments.forget(deployment_name)
        raise DeploymentError(
            f"deployment {deployment_name!r} has ended (its log: {deployment.log}): start it again with fastgen.serve"
        )
    if not deployment.url:
        raise DeploymentError(
            f"deployment {deployment_name!r} is not ready yet: try again when fastgen.serve has returned"
        )
    return Client(deployment, api_key=api_key)


class Client:
    """Generates on a deployment, and terminates it. Thread-safe.

    Attributes:
        deployment: record of the server process; other clients can use `deployment.url`.
    """

    def __init__(self, deployment: Deployment, *, api_key: str | None = None) -> None:
        self.deployment = deployment
        # The variable may hold several keys.
        self._remote = RemoteServer(deployment.url, api_key or own_key())

    def generate(
        self, prompts: str | Sequence[str], streaming_fn: StreamingFunction | None = None, **arguments: Any
    ) -> list[Response]:
        """Generate for all prompts concurrently; `arguments` are those of `GenerateArguments`.

        `streaming_fn` requires a single prompt. It is called once for each streamed chunk, with a list of one
        `Response`: the text of this chunk, 0 as `prompt_length`, the number of chunks so far as `generated_length`, and
        a `finish_reason` only in the last one. The complete response is returned as well.

        Raises:
            RequestError: an argument is invalid, or the server returned an HTTP status 4xx, for example 401 without a
                valid API key or 429 while its queue is full.
            DeploymentError: the server cannot be reached, returned 5xx, or ended a stream early or with an error.
        """
        asked = GenerateArguments.of(arguments)
        texts = as_list(prompts)
        if streaming_fn is not None and len(texts) != 1:
            raise RequestError(f"streaming_fn takes one prompt at a time, not {len(texts)}", "streaming_fn")
        try:
            if streaming_fn is not None:
                return [self._stream(texts[0], asked, streaming_fn)]
            with ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(texts)))) as pool:
                return list(pool.map(lambda text: self._whole(text, asked), texts))
        except RemoteError as error:
            if error.status is not None and 400 <= error.status < 500:
                raise RequestError(str(error), "prompts") from error
            deadline = time.monotonic() + _DISAPPEAR_SECONDS
            while error.status is None and self._running() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if self._running():
                raise DeploymentError(str(error)) from error
            raise DeploymentError(
                f"deployment {self.deployment.name!r} has ended ({error}; its log: {self.deployment.log}): start it "
                "again with fastgen.serve"
            ) from error

    def terminate_server(self) -> None:
        """Terminate the server for all clients; running requests can finish during its drain.

        Raises:
            DeploymentError: the server does not exit in time.
        """
        self._end(signal.SIGTERM, self.deployment.drain_seconds + _EXIT_SECONDS)

    def kill(self) -> None:
        """Kill the server. Running requests are lost."""
        self._end(signal.SIGKILL, math.inf)

    def _whole(self, text: str, asked: GenerateArguments) -> Response:
        answer = self._remote.post("/v1/completions", self._body(text, asked))
        choice, usage = answer["choices"][0], answer["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return asked.response(text, choice["text"], *counts, choice["finish_reason"])

    def _stream(self, text: str, asked: GenerateArguments, streaming_fn: StreamingFunction) -> Response:
        body = self._body(text, asked) | {"stream_options": {"include_usage": True}}
        pieces: list[str] = []
        reason, counts = None, (0, 0)
        for event in self._remote.stream("/v1/completions", body):
            if usage := event.get("usage"):
                counts = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
                pieces.append(choice["text"])
                streaming_fn([Response(choice["text"], 0, len(pieces), choice["finish_reason"])])
        return asked.response(text, "".join(pieces), *counts, reason)

    def _body(self, text: str, asked: GenerateArguments) -> dict[str, Any]:
        counted = 0
        if asked.max_new_tokens is None:
            counted = int(self._remote.post("/tokenize", {"prompt": text})["count"])
        return {"model": self.deployment.name, "prompt": text, **asked.body(counted)}

    def _running(self) -> bool:
        # If this program started the server, reap it.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.deployment.pid, os.WNOHANG)
        return self.deployment.alive

    def _end(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal, wait at most `seconds` until the process has exited, and release its name."""
        deadline = time.monotonic() + seconds
        if self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.deployment.pid, number)
        while self._running():
            if time.monotonic() > deadline:
                raise DeploymentError(
                    f"deployment {self.deployment.name!r} (process {self.deployment.pid}) does not exit: see "
                    f"{self.deployment.log}, or end it with kill()"
                )
            time.sleep(_POLL_SECONDS)
        deployments.forget(self.deployment.name)
