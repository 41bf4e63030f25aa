"""`spec.model` and `spec.cache`: which model is served, and the volume it is downloaded to."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

from pydantic import Field, WithJsonSchema

from fastgen_operator.api.fields import (
    QUANTITY_PATTERN,
    ApiModel,
    ObjectName,
    Quantity,
    ShortText,
    model_rules,
    rule,
    rules,
)
from fastgen_operator.api.resources import within_limits

DEFAULT_REVISION: Final = "main"
_NAME: Final = "[A-Za-z0-9][-A-Za-z0-9._]*"
# An image, as distribution/reference parses it, but always with the registry's host: with a dot, a port or localhost.
_LABEL: Final = "[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_HOST: Final = rf"((localhost|{_LABEL}([.]{_LABEL})+)(:[0-9]{{1,5}})?|{_LABEL}:[0-9]{{1,5}})"
_REPOSITORY: Final = "(/[a-z0-9]+(([.]|_|__|-+)[a-z0-9]+)*)+"
_IMAGE: Final = rf"{_HOST}{_REPOSITORY}(:[A-Za-z0-9_][-A-Za-z0-9._]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
_OCI: Final = "oci://"
# Where KServe's images have the model, too.
_PATH_IN_IMAGE: Final = "/models"
# Scheme, pattern of what follows ://, examples, whether it is downloaded.
_SCHEMES: Final = (
    ("hf", rf"{_NAME}/{_NAME}(/[^\\s]+[.]gguf)?", "hf://owner/name, hf://owner/name/file.gguf", True),
    ("s3", r"[a-z0-9][-a-z0-9.]+/[^\\s]+", "s3://bucket/prefix", True),
    ("pvc", r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[^\\s]+", "pvc://claim/path", False),
    # Checked by a rule of its own.
    ("oci", r"[^\\s]+", "oci://registry/repository@digest", False),
    ("file", r"/[^\\s]+", "file:///absolute/path", False),
)
_PATTERN: Final = "|".join(f"{scheme}://{pattern}" for scheme, pattern, _, _ in _SCHEMES)
_EXAMPLES: Final = " or ".join(", ".join(examples for _, _, examples, _ in _SCHEMES).rsplit(", ", 1))
DOWNLOADED: Final = tuple(f"{scheme}://" for scheme, _, _, downloaded in _SCHEMES if downloaded)


def downloaded_only(path: str, source: str) -> tuple[str, str]:
    """Return the rule that the field `path` needs a downloaded source.

    `source` is relative to the field's parent.
    """
    is_downloaded = " || ".join(f"self.{source}.startsWith('{scheme}')" for scheme in DOWNLOADED)
    return (
        f"!has(self.{path.rpartition('.')[2]}) || {is_downloaded}",
        f"{path} applies to {' and '.join(DOWNLOADED)} sources only, because no other source is downloaded: remove it",
    )


class DownloadResources(ApiModel):
    """Compute resources of the container that downloads the model, in the Job of spec.cache or in each pod. Defaults to
    requests of 100m CPU and 256Mi memory, and limits of 1 CPU and 1Gi memory. If set, it replaces all of these."""

    model_config = model_rules(within_limits("spec.model.download.resources"))
    requests: dict[str, Quantity] = Field(default={}, max_length=16)
    """Resource requests of the container, for example {cpu: 500m, memory: 512Mi}."""
    limits: dict[str, Quantity] = Field(default={}, max_length=16)
    """Resource limits of the container, for example {cpu: 2, memory: 2Gi}."""


class Download(ApiModel):
    """How the model is downloaded. The download runs on nodes that the engine's pods can use (spec.scheduling), and its
    pod has the labels and annotations of spec.podTemplate."""

    resources: DownloadResources | None = None


class Model(ApiModel):
    """The model to serve."""

    model_config = model_rules(
        (
            "!has(self.revision) || self.source.startsWith('hf://')",
            "spec.model.revision applies to hf:// sources only: remove it, or put the revision into the path of "
            "spec.model.source",
        ),
        downloaded_only("spec.model.secretName", "source"),
        downloaded_only("spec.model.download", "source"),
    )
    source: str = Field(
        max_length=1024,
        description=f"Location of the model, a GGUF file or a folder in Hugging Face format: {_EXAMPLES}. "
        "The claim of a pvc:// source must exist in the same namespace. An oci:// source is an image with the model in "
        "its folder /models, or at another path that follows as #/path; nodes pull it with the pull secrets of the "
        "pods, and must support image volumes. The path of a file:// source is one in the engine container: in its "
        "image, or in a volume that spec.podTemplate mounts.",
        json_schema_extra=rules(
            (
                f"self.matches('^({_PATTERN})$')",
                f"spec.model.source must be {_EXAMPLES} of a GGUF file or a model folder, for example "
                "file:///models/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            (
                f"!self.startsWith('{_OCI}') || self.matches('^{_OCI}{_IMAGE}(#/[^\\\\s#]*)?$')",
                "spec.model.source must name an image by its registry's host and a lower-case repository, optionally "
                "with a tag and a digest, and with the path of the model in the image after a # unless it is /models, "
                "for example oci://registry.example/smollm2@sha256:DIGEST#/smollm2.gguf with the 64 digits of DIGEST",
            ),
            (
                "!self.matches('/[.][.](/|$)')",
                "spec.model.source must not contain the path element ..: use the resolved path",
            ),
        ),
    )
    revision: str | None = Field(default=None, min_length=1, max_length=255, pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/]*$")
    """Branch, tag or commit of an hf:// source. Defaults to main. Use a commit hash to guarantee that all replicas
    serve the same weights."""
    served_name: ShortText | None = None
    """Model name that clients use in requests. Defaults to the name of the FastGenDeployment."""
    secret_name: ObjectName | None = None
    """Name of a Secret in the same namespace with credentials for the download. Its keys become environment variables:
    HF_TOKEN and optionally HF_ENDPOINT for hf:// sources; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally
    AWS_REGION and AWS_ENDPOINT_URL for s3:// sources."""
    download: Download | None = None

    @property
    def is_downloaded(self) -> bool:
        """Whether it comes from a remote source."""
        return self.source.startswith(DOWNLOADED)

    @property
    def image(self) -> str | None:
        """Image reference of an oci:// source, with its tag and digest; None for other sources."""
        return self.source.removeprefix(_OCI).partition("#")[0] if self.source.startswith(_OCI) else None

    @property
    def path_in_image(self) -> str:
        """Absolute path of the model inside the image of an oci:// source."""
        return self.source.partition("#")[2] or _PATH_IN_IMAGE

    @property
    def address(self) -> str:
        """The name of the model's folder in a volume: a hash of the source and the revision."""
        return hashlib.sha256(f"{self.source}\n{self.revision or DEFAULT_REVISION}".encode()).hexdigest()[:16]


class Cache(ApiModel):
    """A persistent volume that the model is downloaded to once and that all replicas mount."""

    model_config = model_rules(
        (
            "has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || "
            "self.storageClassName == oldSelf.storageClassName) && self.accessMode == oldSelf.accessMode",
            "spec.cache.storageClassName and spec.cache.accessMode are immutable: to change them, remove "
            "spec.cache and add it again; the model is then downloaded to a new volume",
        ),
        (
            "!isQuantity(self.size) || !isQuantity(oldSelf.size) || "
            "quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0",
            "spec.cache.size can only grow, because volumes do not shrink: to shrink it, remove spec.cache and add "
            "it again; the model is then downloaded to a new volume",
        ),
    )
    size: str = Field(
        max_length=20,
        pattern=QUANTITY_PATTERN,
        json_schema_extra=rule(
            "isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
            "spec.cache.size must be a quantity greater than 0, for example 50Gi",
        ),
    )
    """Size of the volume, for example 50Gi. Allow for two revisions of the model: one is served while the other is
    downloaded. It can be increased later, but not decreased."""
    storage_class_name: ObjectName | None = None
    """Name of the volume's StorageClass. Defaults to the cluster's default StorageClass. Immutable."""
    # Not an enum in the CRD: its message could not say why the other modes are rejected.
    access_mode: Annotated[
        Literal["ReadWriteOnce", "ReadWriteMany"], WithJsonSchema({"type": "string", "maxLength": 63})
    ] = Field(
        default="ReadWriteOnce",
        json_schema_extra=rules(
            (
                "self != 'ReadOnlyMany'",
                "spec.cache.accessMode must not be ReadOnlyMany, because the model is downloaded to the volume: use "
                "ReadWriteMany, or fill a ReadOnlyMany claim yourself and set spec.model.source to pvc://claim/path",
            ),
            (
                "self != 'ReadWriteOncePod'",
                "spec.cache.accessMode must not be ReadWriteOncePod, because the download and all replicas mount the "
                "volume: use ReadWriteOnce, with all replicas on one node, or ReadWriteMany",
            ),
            (
                "self in ['ReadWriteOnce', 'ReadWriteMany', 'ReadOnlyMany', 'ReadWriteOncePod']",
                "spec.cache.accessMode must be ReadWriteOnce or ReadWriteMany",
            ),
        ),
    )
    """Access mode of the volume: ReadWriteOnce or ReadWriteMany. A ReadWriteOnce volume is attached to one node at a
    time, so the download and all replicas run on one node. Pods that do not fit on that node stay pending, and
    the condition PodsScheduled is False with the reason VolumeOnOneNode. With ReadWriteMany, replicas on several nodes
    share the volume, if the StorageClass supports it. Immutable."""
    preload: bool = True
    """Download the model with a Job before pods are created or updated for it. If false, the pods download it to the
    volume when they start."""
