"""Choose the replica for a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fastgen_gateway.routing.replica import Replica
from fastgen_gateway.routing.request_body import BLOCK_BYTES
from fastgen_operator.autoscale.sample import StepCoefficients

# Without metrics, a replica that knows the prompt's prefix may have this many times the mean number of requests.
_AFFINITY_LOAD: Final = 1.25
# Replicas that are compared for a request, besides those that know its prefix: all would take a third of a millisecond
# with a hundred replicas. Which ones changes with each request.
_COMPARED: Final = 24
# Bytes of a prompt for a token, as in `RequestBody`.
_BLOCK_TOKENS: Final = BLOCK_BYTES // 4


def ranked(
    replicas: Sequence[Replica], prompt_tokens: int, matches: Mapping[str, int], now: float, turn: int, rate: float
) -> list[tuple[Replica, int]]:
    """Return the best replica for a prompt and the next best one, each with the prompt tokens in its prefix cache.

    With the step model of at least one replica, the best is the one where the request causes least waiting
    (`Replica.cost`): a known prefix saves time, so it counts as much as the load that it makes up for. Otherwise it
    is the one with fewest requests, or one that knows the prefix and has hardly more than the mean.

    Args:
        replicas: the ready replicas, at least one.
        prompt_tokens: tokens of the prompt.
        matches: number of the prompt's leading blocks that a replica knows, by address.
        now: the time.
        turn: a number that differs between calls, so that equal replicas take turns.
        rate: requests that arrive in a second for all of them.
    """
    cached = {address: min(prompt_tokens, count * _BLOCK_TOKENS) for address, count in matches.items()}
    start = turn % len(replicas)
    order = [*replicas[start:], *replicas[:start]]
    order = [*order[:_COMPARED], *(replica for replica in order[_COMPARED:] if replica.address in cached)]
    known = [(replica, model) for replica in order if (model := replica.step_model(now)) is not None]
    if known:
        typical = _typical([model for _, model in known])
        budgets = [sample.token_budget for replica, _ in known if (sample := replica.sample(now)) is not None]
        models, budget = dict(known), sorted(budgets)[len(budgets) // 2]
        share = rate / len(replicas)
        costs = [
            replica.cost(
                prompt_tokens, cached.get(replica.address, 0), now, models.get(replica, typical), budget, share
            )
            for replica in order
        ]
    else:
        requests = [replica.num_requests(now) for replica in order]
        most = _AFFINITY_LOAD * sum(requests) / len(requests) + 1
        costs = [
            number - (most + cached[replica.address] if replica.address in cached and number < most else 0.0)
            for replica, number in zip(order, requests, strict=True)
        ]
    best = sorted(range(len(order)), key=costs.__getitem__)[:2]
    return [(order[index], cached.get(order[index].address, 0)) for index in best]


def _typical(models: Sequence[StepCoefficients]) -> StepCoefficients:
    """Return the median of each coefficient."""
    return StepCoefficients(*(sorted(column)[len(column) // 2] for column in zip(*models, strict=True)))
