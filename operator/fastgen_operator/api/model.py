"""`spec.model` and `spec.cache`: which model is served, and the volume it is downloaded to."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import ConfigDict, Field

from fastgen_operator.api.fields import QUANTITY_PATTERN, ApiModel, ObjectName, ShortText, rules

_NAME: Final = "[A-Za-z0-9][-A-Za-z0-9._]*"
_SOURCES: Final = "|".join(
    (
        rf"hf://{_NAME}/{_NAME}(/[^\\s]+[.]gguf)?",
        r"s3://[a-z0-9][-a-z0-9.]+/[^\\s]+",
        r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[^\\s]+",
        r"file:///[^\\s]+",
    )
)


class Model(ApiModel):
    """The model to serve."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.revision) || self.source.startsWith('hf://')",
                "spec.model.revision applies to hf:// sources only: remove it, or put the revision into the path of "
                "spec.model.source",
            ),
            (
                "!has(self.secretName) || self.source.startsWith('hf://') || self.source.startsWith('s3://')",
                "spec.model.secretName applies to hf:// and s3:// sources only, because no other source is downloaded: "
                "remove it",
            ),
        )
    )
    source: str = Field(
        max_length=1024,
        description="Location of the model, a GGUF file or a folder in Hugging Face format: hf://owner/name on the "
        "Hugging Face Hub (hf://owner/name/file.gguf for a single file), s3://bucket/prefix in an object store, "
        "pvc://claim/path in a PersistentVolumeClaim of the same namespace, or file:///absolute/path in the engine "
        "image.",
        json_schema_extra=rules(
            (
                f"self.matches('^({_SOURCES})$')",
                "spec.model.source must be hf://owner/name, hf://owner/name/file.gguf, s3://bucket/prefix, "
                "pvc://claim/path or file:///absolute/path of a GGUF file or a model folder, for example "
                "file:///models/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            (
                "!self.matches('/[.][.](/|$)')",
                "spec.model.source must not contain the path element ..: use the resolved path",
            ),
        ),
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/]*$",
        description="Branch, tag or commit of an hf:// source. Defaults to main. Use a commit hash to guarantee that "
        "all replicas serve the same weights.",
    )
    served_name: ShortText | None = Field(
        default=None,
        description="Model name that clients use in requests. Defaults to the name of the FastGenDeployment.",
    )
    secret_name: ObjectName | None = Field(
        default=None,
        description="Name of a Secret in the same namespace with credentials for the download. Its keys become "
        "environment variables: HF_TOKEN for hf:// sources; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally "
        "AWS_ENDPOINT_URL for s3:// sources.",
    )


class Cache(ApiModel):
    """A persistent volume that the model is downloaded to once and that all replicas mount."""

    model_config = ConfigDict(
        json_schema_extra=rules(
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
    )
    size: str = Field(
        max_length=20,
        pattern=QUANTITY_PATTERN,
        description="Size of the volume, for example 50Gi. Allow for two revisions of the model: one is served while "
        "the other is downloaded. It can be increased later, but not decreased.",
        json_schema_extra=rules(
            (
                "isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
                "spec.cache.size must be a quantity greater than 0, for example 50Gi",
            )
        ),
    )
    storage_class_name: ObjectName | None = Field(
        default=None,
        description="Name of the volume's StorageClass. Defaults to the cluster's default StorageClass. Immutable.",
    )
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        default="ReadWriteOnce",
        description="Access mode of the volume. With ReadWriteOnce, all replicas run on one node. With ReadWriteMany, "
        "replicas on several nodes share the volume, which the StorageClass must support. Immutable.",
    )
    preload: bool = Field(
        default=True,
        description="Download the model with a Job before pods are created or updated for it. If false, the pods "
        "download it to the volume when they start.",
    )
