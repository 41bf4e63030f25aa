"""Typed models of FastGenDeployment.

The CRD is generated from them (`crd.py`), and resources are parsed with them. Engine settings take their default,
bounds and help text from `fastgen.settings`. Every field has an effect.
"""

from fastgen_operator.api.model import DOWNLOADED
from fastgen_operator.api.scheduling import Scheduling
from fastgen_operator.api.spec import NAME_LIMIT, PodTemplate, Spec

__all__ = ["DOWNLOADED", "NAME_LIMIT", "PodTemplate", "Scheduling", "Spec"]
