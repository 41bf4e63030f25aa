"""Fixtures for the chart, rendered by the real helm."""

from __future__ import annotations

import pytest

from cluster.programs import ensure_programs
from harness.chart import Helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm(ensure_programs() / "helm")
