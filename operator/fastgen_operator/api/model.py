"""Which model is served, and where what is downloaded of it is kept."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import ConfigDict, Field

from fastgen_operator.api.fields import QUANTITY_PATTERN, ApiModel, ObjectName, ShortText, rules

_NAME: Final = "[A-Za-z0-9][-A-Za-z0-9._]*"
_SOURCES: Final = "|".join(
    (
        # A single GGUF file of a repository is named after it.
        rf"hf://{_NAME}/{_NAME}(/[^\\s]+[.]gguf)?",
        r"s3://[a-z0-9][-a-z0-9.]+/[^\\s]+",
        r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[^\\s]+",
        r"file:///[^\\s]+",
    )
)


class Model(ApiModel):
    """Which model is served, and by what name."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.revision) || self.source.startsWith('hf://')",
                "spec.model.revision is for sources on a hub, hf://owner/name: leave it out, or write the revision "
                "into the source's path",
            ),
            (
                "!has(self.secretName) || self.source.startsWith('hf://') || self.source.startsWith('s3://')",
                "spec.model.secretName is for sources that are downloaded, hf:// and s3://: leave it out",
            ),
        )
    )
    source: str = Field(
        max_length=1024,
        description="Where the model is, a GGUF file or a folder in Hugging Face's layout: hf://owner/name on a hub "
        "(hf://owner/name/file.gguf for one file of it), s3://bucket/prefix in an object store, pvc://claim/path in a "
        "PersistentVolumeClaim of the namespace, or file:///absolute/path in the engine's image.",
        json_schema_extra=rules(
            (
                f"self.matches('^({_SOURCES})$')",
                "spec.model.source must be hf://owner/name, hf://owner/name/file.gguf, s3://bucket/prefix, "
                "pvc://claim/path or file:///absolute/path of a GGUF file or a model folder, for example "
                "file:///models/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            (
                "!self.matches('/[.][.](/|$)')",
                "spec.model.source may not hold the path element ..: write the path that is meant",
            ),
        ),
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/]*$",
        description="Branch, tag or commit of a source on a hub; main where not given. A commit never changes: only "
        "with one do all replicas surely serve the same weights.",
    )
    served_name: ShortText | None = Field(
        default=None, description="The model name that requests use; the resource's name where not given."
    )
    secret_name: ObjectName | None = Field(
        default=None,
        description="Secret of the namespace whose keys are the download's environment variables: HF_TOKEN for hf://, "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and perhaps AWS_ENDPOINT_URL for s3://.",
    )


class Cache(ApiModel):
    """A volume that a model is downloaded to once, and that all replicas read."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || "
                "self.storageClassName == oldSelf.storageClassName) && self.accessMode == oldSelf.accessMode",
                "spec.cache.storageClassName and spec.cache.accessMode cannot change, because those of a volume "
                "cannot: take spec.cache out and add it again, and the model is downloaded to a new volume",
            ),
            (
                "!isQuantity(self.size) || !isQuantity(oldSelf.size) || "
                "quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0",
                "spec.cache.size can only grow, because volumes do not shrink: take spec.cache out and add it again, "
                "and the model is downloaded to a new volume",
            ),
        )
    )
    size: str = Field(
        max_length=20,
        pattern=QUANTITY_PATTERN,
        description="Size of the volume, for example 50Gi: room for two revisions of the model, so that one serves "
        "while the other is downloaded.",
        json_schema_extra=rules(
            (
                "isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
                "spec.cache.size must be a size above nothing, for example 50Gi",
            )
        ),
    )
    storage_class_name: ObjectName | None = Field(
        default=None, description="StorageClass of the volume; the cluster's default where not given."
    )
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        default="ReadWriteOnce",
        description="ReadWriteOnce: the volume is on one node at a time, and all replicas run there. ReadWriteMany: "
        "replicas on several nodes share it, where the StorageClass can do that.",
    )
    preload: bool = Field(
        default=True,
        description="Download a model with a Job before pods are made or changed for it; where false, the pods "
        "download it themselves as they start.",
    )
