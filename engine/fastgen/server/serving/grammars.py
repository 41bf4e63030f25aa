"""Checks the grammars of requests before the engine gets them, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from fastgen.core.request import Grammar, RequestError
from fastgen.text.grammar import GRAMMARS_KEPT, check_grammar
from fastgen.text.tokenizer import Tokenizer

# Threads of their own: a grammar that takes long does not hold up other work of the server.
_CHECKING_THREADS = 2
# A grammar within the limits on its size takes far less.
_MOST_SECONDS = 10.0


class GrammarChecker:
    """Checks grammars in threads and remembers those that are valid."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_CHECKING_THREADS, "grammar")
        self._valid: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raise RequestError for the field `param` if the grammar is invalid, too large, or takes too long."""
        if grammar in self._valid:
            self._valid.move_to_end(grammar)
            return
        checking = asyncio.get_running_loop().run_in_executor(self._threads, check_grammar, grammar, self._tokenizer)
        try:
            await asyncio.wait_for(checking, _MOST_SECONDS)
        except TimeoutError:
            raise RequestError(
                f"{param}: checking this grammar takes more than {_MOST_SECONDS:g} s; simplify it", param
            ) from None
        except ValueError as error:
            raise RequestError(f"{param}: {error}", param) from None
        self._valid[grammar] = None
        if len(self._valid) > GRAMMARS_KEPT:
            self._valid.popitem(last=False)

    async def checked(self, structure: tuple[Grammar, str] | None) -> Grammar | None:
        """Return the grammar of a request after checking it.

        Args:
            structure: the grammar and the field that it came from, if any.

        Raises:
            RequestError: names the field.
        """
        if structure is None:
            return None
        await self.check(*structure)
        return structure[0]
