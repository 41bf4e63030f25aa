"""Checks the grammars of requests before the engine gets them, without blocking the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from fastgen.core.request import Grammar, RequestError
from fastgen.server.http.errors import APIError
from fastgen.text.rehearsals import RehearsalError, Rehearsals
from fastgen.text.tokenizer import Tokenizer

# Grammars that are rehearsed at once. Threads of their own wait for the verdicts.
_AT_ONCE = 4
_RETRY_SECONDS = 1


class GrammarChecker:
    """Has grammars rehearsed in another process, which remembers the verdicts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._rehearsals = Rehearsals(tokenizer)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "grammar")

    async def check(self, grammar: Grammar, param: str) -> None:
        """Check a grammar of the field `param`.

        Raises:
            RequestError: if the grammar is invalid, too large or too complex.
            APIError: if grammars cannot be checked now.
        """
        try:
            if not self._rehearsals.is_accepted(grammar):
                await asyncio.get_running_loop().run_in_executor(self._threads, self._rehearsals.check, grammar)
        except ValueError as error:
            raise RequestError(f"{param}: {error}", param) from None
        except RehearsalError as error:
            raise APIError(
                503, f"{error}; try again", code="grammars_unavailable", retry_after=_RETRY_SECONDS
            ) from None

    async def checked(self, structure: tuple[Grammar, str] | None) -> Grammar | None:
        """Return the grammar of a request after checking it.

        Args:
            structure: the grammar and the field that it came from, if any.

        Raises:
            RequestError: names the field.
            APIError: if grammars cannot be checked now.
        """
        if structure is None:
            return None
        await self.check(*structure)
        return structure[0]

    def close(self) -> None:
        """End the process that rehearses."""
        self._rehearsals.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
