"""How a Hugging Face checkpoint stores its quantised matrices: `quantization_config` of config.json. Needs no torch.

Which matrices are quantised, their tensors say: a matrix that is stored in a floating type is read as it is. The
description says what the packed ones mean. Fields that are not known may change that, so they are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.module_names import CompressedTensorsNames, ModuleNames, TransformersNames, WildcardNames

FIELD = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
_REMEDY = "use a checkpoint without it, or a GGUF file"


@dataclass(frozen=True, slots=True)
class Float8:
    """Matrices in float8 e4m3 with scales.

    Attributes:
        block: rows and columns that share a scale. None for one scale for the tensor or for each row: the shape of the
            scales says which.
        quantises_activations: whether the products were meant for activations in float8.
    """

    title: ClassVar[str] = "FP8"

    block: tuple[int, int] | None
    quantises_activations: bool


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers of compressed-tensors, packed into 32-bit words or one in a byte, as the file has them.

    Attributes:
        bits: of an integer.
        symmetric: whether there are no zero points.
        group_size: columns that share a scale; None for one scale for the tensor or for each row.
    """

    bits: int
    symmetric: bool
    group_size: int | None

    @property
    def title(self) -> str:
        """The format's name."""
        return f"INT{self.bits}"


@dataclass(frozen=True, slots=True)
class AWQ:
    """4-bit integers with zero points in the order of AutoAWQ's GEMM kernel; `group_size` as in `Integers`."""

    title: ClassVar[str] = "AWQ"

    group_size: int | None


@dataclass(frozen=True, slots=True)
class GPTQ:
    """4-bit or 8-bit integers with zero points and, for act-order, the group of each column.

    Attributes:
        bits: of an integer; None if it differs between matrices.
        zero_offset: what is added to the stored zero points: 1 in the first version of the format.
    """

    bits: int | None
    zero_offset: int

    @property
    def title(self) -> str:
        """The format's name."""
        return "GPTQ" if self.bits is None else f"GPTQ INT{self.bits}"


@dataclass(frozen=True, slots=True)
class MXFP4:
    """Experts in float4 (e2m1), with one power of two as the scale of every 32 columns."""

    title: ClassVar[str] = "MXFP4"


Format = Float8 | Integers | AWQ | GPTQ | MXFP4


@dataclass(frozen=True, slots=True)
class Group:
    """The format of some modules; `targets` are their names."""

    format: Format
    targets: ModuleNames


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which matrices of a checkpoint are quantised, and in which format.

    Attributes:
        groups: the first one with the module's name applies.
        excluded: modules that are not quantised.
        excluded_field: the field that lists them.
    """

    groups: tuple[Group, ...]
    excluded: ModuleNames
    excluded_field: str

    def format_of(self, module: str) -> Format:
        """Return the format of a module that the checkpoint stores quantised, for example model.layers.0.mlp.up_proj.

        Raises:
            ModelError: if the configuration excludes the module, or has no format for it.
        """
        if module in self.excluded:
            raise ModelError(f"{FIELD}.{self.excluded_field} names {shown(module)}, but its weights are quantised")
        for group in self.groups:
            if module in group.targets:
                return group.format
        raise ModelError(f"{FIELD} has no group for {shown(module)}, but its weights are quantised")


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return the description in a config.json, or None if no weights are quantised.

    Raises:
        ModelError: naming the field that is invalid or not supported.
    """
    described = Fields(config).mapping(FIELD)
    return _parse(described) if described else None


def quantization_of_modelopt(content: Mapping[str, Any]) -> Quantization | None:
    """Return the description in a hf_quant_config.json; None if it is empty.

    Raises:
        ModelError: as `quantization_of`.
    """
    described = Fields(content).mapping("quantization")
    return _parse({**described, "quant_method": "modelopt"}) if described else None


def _parse(described: Mapping[str, Any]) -> Quantization | None:
    fields = _within(FIELD, described)
    method = fields.text("quant_method")
    parse = _METHODS.get(method)
    if parse is None:
        known = ", ".join(sorted(_METHODS))
        raise ModelError(f"{FIELD}.quant_method is {shown(method)}: supported are {known}; otherwise use a GGUF file")
    return parse(fields)


def _within(name: str, values: Mapping[str, Any]) -> Fields:
    """Return the fields of a nested object, whose errors give full names."""
    return Fields({f"{name}.{key}": value for key, value in values.items()}, f"{name}.")


def _names(fields: Fields, *alternatives: str) -> tuple[tuple[str, ...], str]:
    """Return the modules that the first of some fields lists, and that field."""
    for name in alternatives:
        if (listed := fields.texts(name)) is not None:
            return tuple(listed), name
    return (), alternatives[0]


def _expect(fields: Fields, name: str, *expected: Any) -> None:
    """Reject a value that is neither missing nor one of the expected."""
    value = fields.value(name)
    if value is not None and value not in expected:
        raise ModelError(f"{fields.name_of(name)} is {shown(value)}: expected {_listed(expected)}; {_REMEDY}")


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(shown(value) for value in values) or "nothing"


def _reject_unread(fields: Fields, notes: frozenset[str] = frozenset()) -> None:
    """Reject fields that are set and not known; `notes` are those that change nothing."""
    for name, value in sorted(fields.unread().items()):
        if name not in notes and value not in (False, "", [], {}):
            raise ModelError(f"{fields.name_of(name)} is {shown(value)}: it is not supported; {_REMEDY}")


# transformers, class FineGrainedFP8Config, and vLLM's own FP8 with one scale for a tensor.
_FP8_NOTES = frozenset({"activation_scheme", "dequantize", "modules_to_convert"})


def _fp8(fields: Fields) -> Quantization:
    _expect(fields, "fmt", "e4m3", "float8_e4m3fn")
    _expect(fields, "scale_fmt", "float", "ue8m0")
    _expect(fields, "expert_dtype", "fp8")
    _expect(fields, "activation_scheme", "dynamic", "static")
    excluded, field = _names(fields, "modules_to_not_convert", "ignored_layers")
    found = Float8(_block(fields, "weight_block_size"), quantises_activations=True)
    _reject_unread(fields, _FP8_NOTES)
    return Quantization((Group(found, TransformersNames.all()),), TransformersNames(excluded), field)


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    sizes = fields.integers(name)
    if sizes is None:
        return None
    if len(sizes) != 2 or min(sizes) < 1:
        raise ModelError(f"{fields.name_of(name)} is {shown(sizes)}: expected the rows and columns of a block")
    return sizes[0], sizes[1]


# compressed-tensors 0.20, classes QuantizationConfig, QuantizationScheme and QuantizationArgs
_CT_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_CT_NOTES = frozenset({"global_compression_ratio", "quantization_status", "version", "run_compressed", "dequantize"})
_CT_WEIGHT_NOTES = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder"})
_CT_GROUP_NOTES = frozenset({"input_activations"})


def _compressed_tensors(fields: Fields) -> Quantization | None:
    groups = fields.mapping("config_groups")
    _check_kv_scheme(fields)
    if not groups:
        _expect_only_kv_cache(fields)
        return None
    _expect(fields, "format", *_CT_FORMATS)
    sparsity = fields.mapping("sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise ModelError(f"{FIELD}.sparsity_config.format is {shown(sparsity['format'])}: expected 'dense'; {_REMEDY}")
    excluded, field = _names(fields, "ignore")
    described = tuple(
        group for name in groups if (group := _compressed_group(fields.name_of("config_groups"), name, groups[name]))
    )
    _reject_unread(fields, _CT_NOTES)
    return Quantization(described, CompressedTensorsNames(excluded), field)


def _compressed_group(path: str, name: str, values: Any) -> Group | None:
    if not isinstance(values, Mapping):
        raise ModelError(f"{path}.{shown(name)} is {shown(values)}: expected an object with targets and weights")
    fields = _within(f"{path}.{name[:80]}", values)
    targets, weights = fields.texts("targets"), fields.mapping("weights")
    activations = fields.mapping("input_activations")
    _expect(fields, "format", *_CT_FORMATS)
    _reject_unread(fields, _CT_GROUP_NOTES)
    if not weights:
        return None
    arguments = _within(fields.name_of("weights"), weights)
    kind, bits = arguments.text("type", "int"), arguments.integer("num_bits", 8)
    strategy, symmetric = arguments.text("strategy", "tensor"), arguments.flag("symmetric", True)
    group_size = arguments.value("group_size")
    block = _block(arguments, "block_structure")
    _expect(arguments, "dynamic", False)
    _reject_unread(arguments, _CT_WEIGHT_NOTES)
    found: Format
    if kind == "float" and bits == 8 and symmetric and strategy in ("tensor", "channel", "block"):
        found = Float8(block, quantises_activations=bool(activations))
    elif kind == "int" and bits in (4, 8) and strategy in ("tensor", "channel", "group"):
        found = Integers(bits, symmetric, arguments.integer("group_size") if strategy == "group" else None)
    else:
        shape = f"{bits}-bit {kind} with strategy {shown(strategy)}, group_size {shown(group_size)}"
        raise ModelError(f"{fields.name_of('weights')} is {shape}: it is not supported; {_REMEDY}")
    return Group(found, CompressedTensorsNames(tuple(targets or ())))


# The only scheme of a KV cache whose scales `fastgen.model.checkpoint.kv_scales` reads.
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def _check_kv_scheme(fields: Fields) -> None:
    """Reject another KV cache than float8 with one static scale for each layer."""
    scheme = fields.mapping("kv_cache_scheme")
    for name, value in _KV_SCHEME.items():
        if scheme.get(name, value) != value:
            field = f"{fields.name_of('kv_cache_scheme')}.{name}"
            raise ModelError(f"{field} is {shown(scheme[name])}: expected {shown(value)}; {_REMEDY}")


def _expect_only_kv_cache(fields: Fields) -> None:
    if not fields.mapping("kv_cache_scheme"):
        raise ModelError(f"{FIELD} has neither config_groups nor a kv_cache_scheme: {_REMEDY}")
    _reject_unread(fields, _CT_NOTES | {"format", "ignore", "producer", "kv_cache_quant_algo"})


# NVIDIA's ModelOpt; the algorithms of tensors that `Float8` describes
_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_MODELOPT_NOTES = frozenset({"producer", "config_groups", "quant_method", "kv_cache_quant_algo", "version"})


def _modelopt(fields: Fields) -> Quantization | None:
    _check_kv_scheme(fields)
    _expect(fields, "kv_cache_quant_algo", "FP8")
    algorithm = fields.value("quant_algo")
    if algorithm is None and not fields.mapping("config_groups"):
        _expect_only_kv_cache(fields)
        return None
    if algorithm not in _MODELOPT_ALGORITHMS:
        expected = _listed(_MODELOPT_ALGORITHMS)
        raise ModelError(f"{fields.name_of('quant_algo')} is {shown(algorithm)}: expected {expected}; {_REMEDY}")
    excluded, field = _names(fields, "ignore", "exclude_modules")
    _reject_unread(fields, _MODELOPT_NOTES)
    found = Float8(None, quantises_activations=True)
    return Quantization((Group(found, TransformersNames.all()),), WildcardNames(excluded), field)


# Fields about calibration and about kernels of AutoAWQ, AutoGPTQ, GPTQModel and transformers, classes AwqConfig and
# GPTQConfig
_CALIBRATION_NOTES = frozenset(
    {
        *("act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs"),
        *("damp_auto_increment", "damp_percent", "dataset", "desc_act", "do_fuse", "exllama_config"),
        *("fuse_max_seq_len", "hyb_act", "max_input_length", "meta", "model_file_base_name", "model_name_or_path"),
        *("model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse"),
        *("mse", "pad_token_id", "quant_method", "static_groups", "sym", "tokenizer", "true_sequential"),
        *("use_cuda_fp16", "use_exllama", "method", "group_size", "q_group_size", "lm_head"),
    }
)


def _awq(fields: Fields) -> Quantization:
    for name in ("bits", "w_bit"):
        _expect(fields, name, 4)
    for name in ("version", "format", "checkpoint_format"):
        value = fields.value(name)
        if value is not None and str(value).lower() != "gemm":
            raise ModelError(f"{fields.name_of(name)} is {shown(value)}: expected 'gemm'; {_REMEDY}")
    _expect(fields, "zero_point", True)
    _expect(fields, "pack_dtype", "int32")
    excluded, field = _names(fields, "modules_to_not_convert")
    found = AWQ(_group_size(fields, "group_size" if fields.has("group_size") else "q_group_size"))
    _reject_unread(fields, _CALIBRATION_NOTES)
    return Quantization((Group(found, TransformersNames.all()),), TransformersNames(excluded), field)


def _group_size(fields: Fields, name: str) -> int | None:
    """Return the columns of a group; None for -1, all of a row."""
    return None if fields.value(name) == -1 else fields.integer(name, 128)


def _gptq(fields: Fields) -> Quantization:
    bits = fields.integer("bits", 4)
    if bits not in (4, 8):
        raise ModelError(f"{fields.name_of('bits')} is {bits}: expected 4 or 8; {_REMEDY}")
    version = "gptq"
    for name in ("checkpoint_format", "format"):
        _expect(fields, name, "gptq", "gptq_v2")
        version = fields.text(name, version)
    _expect(fields, "pack_dtype", "int32")
    _group_size(fields, "group_size")
    overrides = fields.mapping("dynamic")  # other bits and groups, which the tensors' shapes give
    found = GPTQ(None if overrides else bits, zero_offset=0 if version == "gptq_v2" else 1)
    _reject_unread(fields, _CALIBRATION_NOTES)
    return Quantization((Group(found, TransformersNames.all()),), TransformersNames(()), "dynamic")


def _mxfp4(fields: Fields) -> Quantization:
    excluded, field = _names(fields, "modules_to_not_convert")
    _reject_unread(fields, frozenset({"dequantize"}))
    return Quantization((Group(MXFP4(), TransformersNames.all()),), TransformersNames(excluded), field)


_METHODS: Mapping[str, Callable[[Fields], Quantization | None]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
