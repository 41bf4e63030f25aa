"""What a grammar may take: bytes of its text, work of the library, processor time and memory."""

from __future__ import annotations

import llguidance

# Most bytes of a grammar's text. With the limits below it bounds the time to compile it; see `docs/decisions/022`.
MOST_GRAMMAR_BYTES = 1 << 16
# Compiled grammars to cache: the requests of one application share a few.
GRAMMARS_KEPT = 32
# Most bytes of all grammars of an engine and their sequences; see `allocations`. What else the process allocates after
# its start counts, too, such as the buffers of a step.
MOST_BYTES = 1 << 30

# Most processor time and memory of a rehearsal. Those of applications' grammars take milliseconds and up to 30 MiB.
MOST_REHEARSAL_CPU_SECONDS = 2
MOST_REHEARSAL_BYTES = 64 << 20
# Longest time until it ends or is ended. Only a machine that is very busy needs more for the processor time above.
MOST_REHEARSAL_SECONDS = 60
# Longest time to compute a mask in a rehearsal. The engine computes one for each token.
MOST_REHEARSED_MASK_SECONDS = 0.1

# Longest time that a step waits for masks. A sequence whose mask is not known then waits alone.
WAIT_SECONDS = 0.03
# A grammar whose last mask took more processor time is slow: no step waits for its masks.
SLOW_SECONDS = 0.02
# Processor time that all masks of one sequence together may take, apart from the first 0.05 s of each.
MASK_SECONDS = 0.05
MOST_EXTRA_SECONDS = 2.0

# Items in one row of the library's parser. An object takes four for each optional property.
_ITEMS_IN_ROW = 8_000


def limits() -> llguidance.LLParserLimits:
    """Return the library's limits for generations.

    The time of a step grows with the square of the items. `MOST_BYTES` bounds the memory.
    """
    return _limits(lexer_states=50_000, step_lexer_fuel=2_000_000, step_items=160_000)


def rehearsal_limits() -> llguidance.LLParserLimits:
    """Return the library's limits for rehearsals, which are lower, so that generations have room for harder steps."""
    return _limits(lexer_states=25_000, step_lexer_fuel=200_000, step_items=20_000)


def _limits(*, lexer_states: int, step_lexer_fuel: int, step_items: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        verbose_errors=False,
        max_grammar_size=100_000,
        max_items_in_row=_ITEMS_IN_ROW,
        max_lexer_states=lexer_states,
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=step_items,
    )
