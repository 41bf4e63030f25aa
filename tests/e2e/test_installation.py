"""The chart's own test passes on a real node."""

from __future__ import annotations

import pytest

from cluster.bed import Bed
from cluster.demo import RELEASE, SYSTEM

pytestmark = pytest.mark.cluster


def test_helm_test_applies_a_resource_and_reads_it_back(bed: Bed) -> None:
    output = bed.helm("test", RELEASE, "--namespace", SYSTEM, "--timeout=120s")
    assert "Succeeded" in output
    assert bed.kubectl("get", "fgd", "--namespace", SYSTEM, "--output=name") == ""
