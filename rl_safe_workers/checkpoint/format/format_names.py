"""The names that a torch_dist checkpoint may hold: what torch 2.11-2.13 and megatron-core 0.15-0.20 write."""

from __future__ import annotations

from collections.abc import Mapping

Names = Mapping[str, tuple[str, ...]]
"""Module to names."""

ITEM_BITS: Mapping[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "bits8"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    # Each element packs two values into one byte.
    "float4_e2m1fn_x2": 8,
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16", "bits16"), 16),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 32),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 64),
    "complex128": 128,
}
"""Bits per element by dtype, as ``torch.dtype`` pickles its name."""

STORAGE_DTYPES: Mapping[str, str] = {
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
}
"""Dtype of each kind of storage that a tensor names."""

METADATA_RECORDS: Names = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
    ),
    # megatron-core keeps every rank's plan in .metadata, to compare the next save with (state_dict_saver.py:144).
    "torch.distributed.checkpoint.planner": ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # megatron-core up to 0.15 wrote its own (strategies/torch.py:87).
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}

METADATA_STATEFUL: Names = {
    "torch.distributed.checkpoint.metadata": ("TensorProperties",),
    # The checkpoint's own path, when it was given as one; Python 3.13 moved the class.
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
}

METADATA_ENUMS: Names = {
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.distributed.checkpoint.planner": ("WriteItemType",),
}

COMMON_RECORDS: Names = {
    "builtins": (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset"),
        *("getattr", "int", "list", "set", "str", "tuple"),
    ),
    "collections": ("OrderedDict", "defaultdict"),
    "_codecs": ("encode",),
    "argparse": ("Namespace",),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "io": ("BytesIO",),
    "_io": ("BytesIO",),
    "types": ("SimpleNamespace",),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "pathlib": METADATA_STATEFUL["pathlib"],
    "pathlib._local": METADATA_STATEFUL["pathlib._local"],
    "torch": (
        "Size",
        "device",
        *ITEM_BITS,
        *(f"{name}Storage" for name in STORAGE_DTYPES),
        "UntypedStorage",
    ),
    "torch.serialization": ("_get_layout",),
    "torch.storage": ("UntypedStorage",),
    "torch._utils": ("_rebuild_parameter", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    "megatron.core.optimizer.optimizer_config": ("AdamOptimizerConfig", "OptimizerConfig", "SGDOptimizerConfig"),
}

COMMON_ENUMS: Names = {
    "signal": ("Signals",),
    "megatron.core.enums": ("Fp4Recipe", "Fp8Recipe", "ModelType"),
    "megatron.core.transformer.enums": (
        "AttnBackend",
        "AttnMaskType",
        "AttnType",
        "CudaGraphModule",
        "CudaGraphScope",
        "InferenceCudaGraphScope",
        "LayerType",
        "ModelType",
    ),
    "megatron.core.rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus"),
}

TREE_NAMES = frozenset(
    f"{module}.{name}"
    for listed in (COMMON_RECORDS, COMMON_ENUMS)
    for module, found in listed.items()
    for name in found
)
"""Names that the pickle of an archive of ``torch.save`` may ask for, as ``module.name``."""

LAYER_RECIPES: Names = {
    "transformer_engine.common.recipe": (
        *("DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
        *("MMParams", "QParams"),
    ),
    "megatron.core.extensions.transformer_engine": ("TEDelayedScaling",),
}
"""Classes in the extra state of Transformer Engine's layers. Their objects are no more than their fields."""

LAYER_FORMAT = "transformer_engine.common.recipe.Format"
LAYER_FORMAT_VALUE = "transformer_engine.common.recipe._FormatHelper"
STORED = frozenset({"torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes"})
"""Functions that make a storage from bytes. A tensor that is pickled without ``torch.save`` names one of them.

megatron-core puts its own in torch's place since 0.19 (megatron/core/__init__.py:58).
"""

LAYER_NAMES = frozenset(
    {
        *(f"{module}.{name}" for module, found in LAYER_RECIPES.items() for name in found),
        *(LAYER_FORMAT, LAYER_FORMAT_VALUE, *STORED),
        *("builtins.getattr", "collections.OrderedDict", "torch._utils._rebuild_tensor_v2"),
    }
)
"""Names that the extra state of a layer may ask for, as ``module.name``."""
