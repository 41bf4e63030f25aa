"""Typed models of FastGenDeployment, from which the CRD is generated (`crd.py`) and resources are parsed.

Engine settings take their default, bounds and help text from `fastgen.config`. Every field has an effect.
"""

from fastgen_operator.api.autoscaling import Autoscaling, ScaleDown, ScaleUp, Targets
from fastgen_operator.api.engine import OPERATOR_FLAGS, Engine, KVCache
from fastgen_operator.api.model import DOWNLOADED, Cache, Model
from fastgen_operator.api.network import IPBlock, LabelSelector, Network, Peer, Requirement
from fastgen_operator.api.resources import GPU, GPU_RESOURCE, Resources
from fastgen_operator.api.rollout import Disruption, Rollout
from fastgen_operator.api.scheduling import Scheduling, Toleration, TopologySpread
from fastgen_operator.api.spec import INTER_TOKEN_TARGET, NAME_LIMIT, PodTemplate, Spec, TemplateMetadata

__all__ = [
    "DOWNLOADED",
    "GPU",
    "GPU_RESOURCE",
    "INTER_TOKEN_TARGET",
    "NAME_LIMIT",
    "OPERATOR_FLAGS",
    "Autoscaling",
    "Cache",
    "Disruption",
    "Engine",
    "IPBlock",
    "KVCache",
    "LabelSelector",
    "Model",
    "Network",
    "Peer",
    "PodTemplate",
    "Requirement",
    "Resources",
    "Rollout",
    "ScaleDown",
    "ScaleUp",
    "Scheduling",
    "Spec",
    "Targets",
    "TemplateMetadata",
    "Toleration",
    "TopologySpread",
]
