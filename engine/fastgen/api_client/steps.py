"""The last steps of a server that was started with --ui, read in a thread."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from fastgen.api_client.http import RemoteError, RemoteServer

_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One step: its number, duration in seconds, decode and prompt tokens, and number of prompts."""

    number: int
    seconds: float
    decode_tokens: int
    prompt_tokens: int
    num_prompts: int

    @classmethod
    def of(cls, step: dict[str, Any]) -> ShownStep:
        """Read a step of the stream /ui/steps."""
        prompts = step["prompts"]
        tokens = sum(tokens for _, tokens in prompts)
        return cls(step["number"], step["seconds"], len(step["decodes"]), tokens, len(prompts))


class StepWatch:
    """Keeps the last steps of a server.

    Attributes:
        last: oldest first.
        offered: whether the server has the stream.

    Raises:
        RemoteError: the server cannot be reached, or returns an error other than 404.
    """

    def __init__(self, remote: RemoteServer, most: int) -> None:
        self.last: deque[ShownStep] = deque(maxlen=most)
        self.offered = True
        self._remote = remote
        self._started = threading.Event()
        self._refusal: RemoteError | None = None
        threading.Thread(target=self._read, daemon=True).start()
        refusal = self._first_answer()
        if refusal is not None and refusal.status != _NOT_FOUND:
            raise refusal
        self.offered = refusal is None

    def _first_answer(self) -> RemoteError | None:
        """Wait for the server's response; return its error, if it is one."""
        self._started.wait()
        return self._refusal

    def _read(self) -> None:
        while True:
            try:
                for event in self._remote.events("/ui/steps"):
                    self._started.set()
                    self.last.extend(map(ShownStep.of, event.get("steps", ())))
            except RemoteError as error:
                if not self._started.is_set():
                    self._refusal = error
                    self._started.set()
                    return
            threading.Event().wait(1.0)  # the server may be restarting
