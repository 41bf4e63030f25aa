"""The words of the scheduler on which conditions depend are those of the scheduler that the tests run."""

from __future__ import annotations

import mmap

import pytest

from cluster.programs import ensure_programs
from fastgen_operator.status.conditions.model_cached import REFUSALS
from fastgen_operator.status.scheduler_words import INSUFFICIENT, NODE_CONFLICT, VOLUME_MISSING, is_short_of


@pytest.mark.controlplane
def test_the_scheduler_says_these_words() -> None:
    with (ensure_programs() / "kube-scheduler").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=1) as program:
        missing = [
            words for words in (NODE_CONFLICT, *VOLUME_MISSING, INSUFFICIENT) if program.find(words.encode()) < 0
        ]
        assert program.find(b"node(s) had volume node affinity conflict") < 0, "the words of Kubernetes before 1.34"
    assert missing == [], "see k8s.io/kubernetes/pkg/scheduler/framework/plugins"


@pytest.mark.controlplane
def test_the_api_server_says_these_words_when_it_rejects_a_pod() -> None:
    with (ensure_programs() / "kube-apiserver").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=1) as program:
        missing = [words for words, _ in REFUSALS if program.find(words.encode()) < 0]
    assert missing == [], "see k8s.io/kubernetes/plugin/pkg/admission"


@pytest.mark.parametrize(
    ("words", "is_short"),
    [
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", True),
        ("0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 Too many pods. preemption: no", True),
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate", True),
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.shared.", False),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}.", False),
    ],
)
def test_a_shortage_is_not_taken_from_other_words_with_the_resource(words: str, is_short: bool) -> None:
    assert is_short_of("nvidia.com/gpu", words) is is_short
