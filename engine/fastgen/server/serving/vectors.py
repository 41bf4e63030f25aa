"""Vectors and scores from the results of pooled requests. Pure functions."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

EmbeddingVector = npt.NDArray[np.float32]


def vector(pooled: bytes, dimensions: int | None, *, normalised: bool) -> EmbeddingVector:
    """Return the embedding [dimensions] of a pooled prompt.

    It is the first `dimensions` values of the pooled state, scaled to length 1 if `normalised`.

    Args:
        pooled: as in `TokenOutput`.
        dimensions: how many to keep; None for all.
        normalised: whether to scale. A vector of zeros stays as it is.
    """
    values = np.frombuffer(pooled, "<f4")[:dimensions]
    if not normalised:
        return values
    length = np.linalg.norm(values.astype(np.float64))
    scaled: EmbeddingVector = (values / max(float(length), 1e-12)).astype(np.float32)
    return scaled


def similarity(a: EmbeddingVector, b: EmbeddingVector) -> float:
    """Return the cosine of the angle between two vectors of length 1."""
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))


def probability_of_yes(pooled: bytes) -> float:
    """Return the probability of the second of two answers, given the log-probabilities of both."""
    no, yes = np.frombuffer(pooled, "<f4").tolist()
    return 1 / (1 + math.exp(min(700.0, no - yes)))
