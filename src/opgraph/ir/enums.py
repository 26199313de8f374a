"""The enumerations of the public API.

Every member prints as `data_type.HALF`, converts with `int()` and is hashed by identity. The numbers are
those of the cuDNN frontend where it publishes them, so that a recorded number keeps its meaning.
"""

from __future__ import annotations

from enum import Enum

__all__ = [
    "NodeType",
    "attention_implementation",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "cuda_graph_retention",
    "data_type",
    "diagonal_alignment",
    "heur_mode",
    "knob_type",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "reduction_mode",
    "reshape_mode",
    "scalar_type",
    "tensor_reordering",
]


class _Number(Enum):
    """An enum whose members convert with `int()`."""

    def __int__(self) -> int:
        return int(self._value_)

    # Members are singletons (copy and pickle return the same object), so identity is a correct hash, and it
    # is computed in C; Enum's own hashes the name in Python, which shows in tables keyed by data type.
    __hash__ = object.__hash__


class data_type(_Number):
    """Element types of tensors and of a node's arithmetic."""

    NOT_SET = 0
    FLOAT = 1
    DOUBLE = 2
    HALF = 3
    INT8 = 4
    INT32 = 5
    INT8x4 = 6
    UINT8 = 7
    UINT8x4 = 8
    INT8x32 = 9
    BFLOAT16 = 10
    INT64 = 11
    BOOLEAN = 12
    FP8_E4M3 = 14
    FP8_E5M2 = 15
    FAST_FLOAT_FOR_FP8 = 16
    FP8_E8M0 = 17
    FP8_E5M3 = 18
    FP4_E2M1 = 19
    INT4 = 20


class heur_mode(_Number):
    """Which ranked lists of plans to ask for."""

    A = 0
    B = 1
    FALLBACK = 2
    OPENSOURCE = 3


class build_plan_policy(_Number):
    """Build the first plan that can be built, or every plan."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class reduction_mode(_Number):
    """What `reduction` computes over the reduced axes."""

    NOT_SET = 0
    ADD = 1
    MUL = 2
    MIN = 3
    MAX = 4
    AMAX = 5
    AVG = 6
    NORM1 = 7
    NORM2 = 8
    MUL_NO_ZEROS = 9


class norm_forward_phase(_Number):
    """Whether a normalisation returns its statistics (TRAINING) or not (INFERENCE)."""

    NOT_SET = 0
    INFERENCE = 1
    TRAINING = 2


class convolution_mode(_Number):
    """CONVOLUTION flips the filter, CROSS_CORRELATION does not."""

    CONVOLUTION = 1
    CROSS_CORRELATION = 2


class reshape_mode(_Number):
    """VIEW_ONLY names the same memory again, LOGICAL refolds in row-major index order."""

    VIEW_ONLY = 1
    LOGICAL = 2


class scalar_type(_Number):
    """Whether an embedded scalar is a launch argument or a constant of the plan."""

    RUNTIME_PARAM = 0
    COMPILE_TIME_CONST = 1


class diagonal_alignment(_Number):
    """The corner of the score matrix that a diagonal band is anchored to."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class attention_implementation(_Number):
    """A hint for engines that have more than one attention path."""

    AUTO = 0
    COMPOSITE = 1
    UNIFIED = 2


class moe_grouped_matmul_mode(_Number):
    """How routed rows are read and written by a grouped matmul."""

    NONE = 1
    GATHER = 2
    SCATTER = 3
    COMBINE = 4


class numerical_note(_Number):
    """Numerical properties of a plan."""

    TENSOR_CORE = 1
    DOWN_CONVERT_INPUTS = 2
    REDUCED_PRECISION_REDUCTION = 3
    FFT = 4
    NONDETERMINISTIC = 5
    WINOGRAD = 6
    WINOGRAD_TILE_4x4 = 7
    WINOGRAD_TILE_6x6 = 8
    WINOGRAD_TILE_13x13 = 9
    STRICT_NAN_PROP = 10


class behavior_note(_Number):
    """Behavioural properties of a plan."""

    RUNTIME_COMPILATION = 1
    REQUIRES_FILTER_INT8x32_REORDER = 2
    REQUIRES_BIAS_INT8x32_REORDER = 3
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 4
    CUBLASLT_DEPENDENCY = 5


class cuda_graph_retention(_Number):
    """How long resources of a captured graph live."""

    PER_GRAPH = 0
    NONE = 1


class tensor_reordering(_Number):
    """Physical element orders that strides cannot express."""

    NONE = 0
    INT8x32 = 1
    F16x16 = 2
    F8_128x4 = 3


class knob_type(_Number):
    """Tuning knobs of plans. The numbers are opgraph's own; they are only ever appended to."""

    NOT_SET = 0
    SWIZZLE = 1
    TILE_SIZE = 2
    SPLIT_K_BUF = 3
    TILEK = 4
    STAGES = 5
    SPLIT_K_SLC = 6
    KERNEL_CFG = 7
    WORKSPACE = 8
    OCCUPANCY = 9
    TILE_M = 10
    TILE_N = 11
    TILE_ROWS = 12
    TILE_COLS = 13
    TILE_CGA = 14
    TILE_CGA_M = 15
    TILE_CGA_N = 16
    STREAM_K = 17
    SWAP_AB = 18
    PACK_GQA = 19
    SPLIT_KV = 20
    MMA_TILE_M = 21
    MMA_TILE_N = 22
    MMA_TILE_K = 23
    WARPS_M = 24
    WARPS_N = 25
    CTA_GROUP = 26
    SCHED_POLICY = 27


class NodeType(_Number):
    """The kind of a node. All pointwise methods share POINTWISE; `node.params["mode"]` names the method."""

    POINTWISE = 1
    MATMUL = 2
    REDUCTION = 3
    RESHAPE = 4
    TRANSPOSE = 5
    SLICE = 6
    CONCATENATE = 7
    LAYERNORM = 8
    LAYERNORM_BACKWARD = 9
    RMSNORM = 10
    RMSNORM_BACKWARD = 11
    SDPA = 12
    SDPA_BACKWARD = 13
    ROPE = 14
    ROPE_BACKWARD = 15
    GDN = 16
    GDN_BACKWARD = 17
    KDA = 18
    KDA_BACKWARD = 19
    GDN2 = 20
    GDN2_BACKWARD = 21
    CONV_FPROP = 22
    CONV_DGRAD = 23
    CONV_WGRAD = 24
    BATCHNORM = 25
    BATCHNORM_INFERENCE = 26
    BATCHNORM_BACKWARD = 27
    GENSTATS = 28
    INSTANCENORM = 29
    INSTANCENORM_BACKWARD = 30
    BLOCK_SCALE_DEQUANTIZE = 31
    BLOCK_SCALE_QUANTIZE = 32
    MOE_GROUPED_MATMUL = 33
    MOE_GROUPED_MATMUL_BACKWARD = 34
    SDPA_FP8 = 35
    SDPA_FP8_BACKWARD = 36
    GDN_SUMMARY = 37
    GDN_SUMMARY_BACKWARD = 38
    KDA_SUMMARY = 39
    KDA_SUMMARY_BACKWARD = 40
    GDN2_SUMMARY = 41
    GDN2_SUMMARY_BACKWARD = 42
