"""CUDA C++ for a graph of pointwise operators: one kernel, whatever the length of the chain.

Every tensor is read or written through strides relative to the one broadcast shape of the graph; axes over which all
tensors run alike are merged, and the fastest axis is vectorised where every tensor is dense or constant along it.
The source needs no headers: half and bfloat16 are converted by the instructions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opgraph.ir.datatypes import scalar_bytes
from opgraph.ir.enums import data_type

if TYPE_CHECKING:
    from opgraph.ir.program import GraphSpec, NodeSpec, TensorSpec

__all__ = ["FORMULAS", "STORAGE", "Kernel", "generate", "shape_of"]

# data type -> (C type of its storage, bytes)
STORAGE: Mapping[data_type, tuple[str, int]] = {
    data_type.FLOAT: ("float", 4),
    data_type.DOUBLE: ("double", 8),
    data_type.HALF: ("half_t", 2),
    data_type.BFLOAT16: ("bf16_t", 2),
    data_type.INT8: ("signed char", 1),
    data_type.UINT8: ("unsigned char", 1),
    data_type.INT32: ("int", 4),
    data_type.INT64: ("long long", 8),
    data_type.BOOLEAN: ("bool_t", 1),
}

_ARITHMETIC = {
    data_type.DOUBLE: "double",
    data_type.INT8: "long long",
    data_type.UINT8: "long long",
    data_type.INT32: "long long",
    data_type.INT64: "long long",
}

# Operator -> expression over its inputs {0}, {1}, {2} in the arithmetic type C. Helpers are in the prelude.
FORMULAS: Mapping[str, str] = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "quotient({0}, {1})",
    "add_square": "({0} + {1} * {1})",
    "bias": "({0} + {1})",
    "scale": "({0} * {1})",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "mod": "remainder_of({0}, {1})",
    "pow": "pow((real)({0}), (real)({1}))",
    "cmp_eq": "C({0} == {1})",
    "cmp_neq": "C({0} != {1})",
    "cmp_gt": "C({0} > {1})",
    "cmp_ge": "C({0} >= {1})",
    "cmp_lt": "C({0} < {1})",
    "cmp_le": "C({0} <= {1})",
    "logical_and": "C({0} != C(0) && {1} != C(0))",
    "logical_or": "C({0} != C(0) || {1} != C(0))",
    "logical_not": "C({0} == C(0))",
    "binary_select": "({2} != C(0) ? {0} : {1})",
    "identity": "({0})",
    "abs": "magnitude({0})",
    "neg": "(-{0})",
    "ceil": "ceil((real)({0}))",
    "floor": "floor((real)({0}))",
    "reciprocal": "(real(1) / (real)({0}))",
    "sqrt": "sqrt((real)({0}))",
    "rsqrt": "(real(1) / sqrt((real)({0})))",
    "exp": "exp((real)({0}))",
    "log": "log((real)({0}))",
    "sin": "sin((real)({0}))",
    "cos": "cos((real)({0}))",
    "tan": "tan((real)({0}))",
    "tanh": "tanh((real)({0}))",
    "erf": "erf((real)({0}))",
    "sigmoid": "sigmoid((real)({0}))",
    "gelu": "gelu((real)({0}))",
    "gelu_approx_tanh": "gelu_tanh((real)({0}))",
    "elu": "elu((real)({0}))",
    "softplus": "softplus((real)({0}))",
    "swish": "swish((real)({0}), real({swish_beta}))",
    "relu": "relu({0}, C({negative_slope}), C({lower_clip}), {upper_clip})",
    "leaky_relu": "relu({0}, C({negative_slope}), C(0), {upper_clip})",
    "relu_backward": "({0} * relu_slope({1}, C({negative_slope}), C({lower_clip}), {upper_clip}))",
    "leaky_relu_backward": "({0} * relu_slope({1}, C({negative_slope}), C(0), {upper_clip}))",
    "elu_backward": "({0} * ({1} > C(0) ? real(1) : exp((real)({1}))))",
    "gelu_backward": "({0} * gelu_slope((real)({1})))",
    "gelu_approx_tanh_backward": "({0} * gelu_tanh_slope((real)({1})))",
    "sigmoid_backward": "({0} * sigmoid((real)({1})) * sigmoid(-(real)({1})))",
    "softplus_backward": "({0} * sigmoid((real)({1})))",
    "swish_backward": "({0} * swish_slope((real)({1}), real({swish_beta})))",
    "tanh_backward": "({0} * (real(1) - tanh((real)({1})) * tanh((real)({1}))))",
}

_PRELUDE = """\
struct half_t { unsigned short bits; };
struct bf16_t { unsigned short bits; };
struct bool_t { unsigned char bits; };
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) pack { T v[N]; };

template <class C, class T> __device__ __forceinline__ C load(T x) { return C(x); }
template <> __device__ __forceinline__ float load<float, half_t>(half_t x) {
  float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits)); return f;
}
template <> __device__ __forceinline__ float load<float, bf16_t>(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }
template <> __device__ __forceinline__ double load<double, half_t>(half_t x) { return load<float>(x); }
template <> __device__ __forceinline__ double load<double, bf16_t>(bf16_t x) { return load<float>(x); }
template <> __device__ __forceinline__ float load<float, bool_t>(bool_t x) { return x.bits ? 1.f : 0.f; }
template <> __device__ __forceinline__ double load<double, bool_t>(bool_t x) { return x.bits ? 1. : 0.; }
template <> __device__ __forceinline__ long long load<long long, bool_t>(bool_t x) { return x.bits ? 1 : 0; }
template <> __device__ __forceinline__ long long load<long long, half_t>(half_t x) { return llrintf(load<float>(x)); }
template <> __device__ __forceinline__ long long load<long long, bf16_t>(bf16_t x) { return llrintf(load<float>(x)); }
template <> __device__ __forceinline__ long long load<long long, float>(float x) { return llrintf(x); }
template <> __device__ __forceinline__ long long load<long long, double>(double x) { return llrint(x); }

// To integers: round to nearest even, saturate, NaN to 0. To bool: non-zero.
template <class T> struct store_as {
  template <class C> static __device__ __forceinline__ T of(C x) { return T(x); }
};
template <> struct store_as<half_t> {
  static __device__ __forceinline__ half_t of(float x) { half_t h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x)); return h; }
  static __device__ __forceinline__ half_t of(double x) { half_t h; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(h.bits) : "d"(x)); return h; }
  static __device__ __forceinline__ half_t of(long long x) { return of((double)x); }
};
template <> struct store_as<bf16_t> {
  static __device__ __forceinline__ bf16_t of(float x) { bf16_t h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(x)); return h; }
  // Rounding to odd first keeps the second rounding exact.
  static __device__ __forceinline__ bf16_t of(double x) {
    float f = __double2float_rz(x);
    if ((double)f != x && x == x) f = __uint_as_float(__float_as_uint(f) | 1u);
    return of(f);
  }
  static __device__ __forceinline__ bf16_t of(long long x) { return of((double)x); }
};
template <> struct store_as<bool_t> {
  template <class C> static __device__ __forceinline__ bool_t of(C x) { bool_t b; b.bits = x != C(0); return b; }
};
template <class T> __device__ __forceinline__ T whole(double x, double low, double high) {
  if (x != x) return T(0);
  x = rint(x);
  return x <= low ? T(low) : x >= high ? T(high) : T(x);
}
#define WHOLE(T, LOW, HIGH) \\
  template <> struct store_as<T> { \\
    static __device__ __forceinline__ T of(float x) { return whole<T>(x, LOW, HIGH); } \\
    static __device__ __forceinline__ T of(double x) { return whole<T>(x, LOW, HIGH); } \\
    static __device__ __forceinline__ T of(long long x) { return x < (long long)LOW ? (T)(LOW) : x > (long long)HIGH ? (T)(HIGH) : (T)x; } \\
  };
WHOLE(signed char, -128., 127.)
WHOLE(unsigned char, 0., 255.)
WHOLE(int, -2147483648., 2147483647.)
template <> struct store_as<long long> {
  static __device__ __forceinline__ long long of(float x) { return x != x ? 0 : llrintf(x); }
  static __device__ __forceinline__ long long of(double x) { return x != x ? 0 : llrint(x); }
  static __device__ __forceinline__ long long of(long long x) { return x; }
};

template <class C> struct real_of { using type = C; };
template <> struct real_of<long long> { using type = double; };

template <class C> __device__ __forceinline__ C larger(C a, C b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <class C> __device__ __forceinline__ C smaller(C a, C b) { return a != a ? a : b != b ? b : a < b ? a : b; }
template <class C> __device__ __forceinline__ C quotient(C a, C b) { return a / b; }
template <> __device__ __forceinline__ long long quotient<long long>(long long a, long long b) { return b ? a / b : 0; }
__device__ __forceinline__ float remainder_of(float a, float b) { return fmodf(a, b); }
__device__ __forceinline__ double remainder_of(double a, double b) { return fmod(a, b); }
__device__ __forceinline__ long long remainder_of(long long a, long long b) { return b ? a % b : 0; }
__device__ __forceinline__ float magnitude(float a) { return fabsf(a); }
__device__ __forceinline__ double magnitude(double a) { return fabs(a); }
__device__ __forceinline__ long long magnitude(long long a) { return a < 0 ? -a : a; }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
template <class R> __device__ __forceinline__ R sigmoid(R x) { return R(1) / (R(1) + exp(-x)); }
template <class R> __device__ __forceinline__ R gelu(R x) { return R(0.5) * x * erfc(-x * R(0.70710678118654752440)); }
template <class R> __device__ __forceinline__ R gelu_slope(R x) {
  return R(0.5) * erfc(-x * R(0.70710678118654752440)) + x * exp(R(-0.5) * x * x) * R(0.39894228040143267794);
}
template <class R> __device__ __forceinline__ R gelu_tanh(R x) {
  return R(0.5) * x * (R(1) + tanh(R(0.79788456080286535588) * (x + R(0.044715) * x * x * x)));
}
template <class R> __device__ __forceinline__ R gelu_tanh_slope(R x) {
  const R t = tanh(R(0.79788456080286535588) * (x + R(0.044715) * x * x * x));
  return R(0.5) * (R(1) + t) + R(0.5) * x * (R(1) - t * t) * R(0.79788456080286535588) * (R(1) + R(0.134145) * x * x);
}
template <class R> __device__ __forceinline__ R elu(R x) { return x > R(0) ? x : expm1(x); }
template <class R> __device__ __forceinline__ R softplus(R x) { return larger(x, R(0)) + log1p(exp(-fabs(x))); }
template <class R> __device__ __forceinline__ R swish(R x, R b) { return x * sigmoid(b * x); }
template <class R> __device__ __forceinline__ R swish_slope(R x, R b) { const R s = sigmoid(b * x); return s * (R(1) + b * x * (R(1) - s)); }
template <class C> __device__ __forceinline__ C relu(C x, C slope, C low, C high) {
  return x != x ? x : x >= high ? high : x > low ? x : low + slope * (x - low);
}
template <class C> __device__ __forceinline__ C relu_slope(C x, C slope, C low, C high) { return x >= high ? C(0) : x > low ? C(1) : slope; }
"""

_INFINITY = "C(infinity())"


class Kernel:
    """Source of one kernel and how to launch it.

    Attributes:
        source, name: CUDA C++ and the kernel's name in it.
        parameters: in order: `("address", operand index, 0)`, `("scalar", operand index, bytes)` or
            `("bytes", data, alignment)`, as `_native.make_program` takes them.
        grid, block: launch geometry.
        vector: elements per access; operands in `aligned` need addresses that are multiples of the bytes given.
    """

    __slots__ = ("aligned", "block", "grid", "name", "parameters", "source", "vector")

    def __init__(
        self,
        source: str,
        name: str,
        parameters: list[tuple[Any, ...]],
        grid: int,
        block: int,
        vector: int,
        aligned: list[tuple[int, int]],
    ) -> None:
        self.source = source
        self.name = name
        self.parameters = parameters
        self.grid = grid
        self.block = block
        self.vector = vector
        self.aligned = aligned


def shape_of(spec: GraphSpec) -> tuple[int, ...]:
    """The broadcast shape of the whole graph, at the rank of its widest tensor."""
    rank = max(len(t.dim) for t in spec.tensors.values())
    shape = [1] * rank
    for tensor in spec.tensors.values():
        for axis, extent in enumerate(tensor.dim, rank - len(tensor.dim)):
            if extent != 1:
                shape[axis] = extent
    return tuple(shape)


def _broadcast_strides(tensor: TensorSpec, rank: int) -> tuple[int, ...]:
    """Strides at the graph's rank; 0 where the tensor is constant."""
    own = tuple(0 if extent == 1 else stride for extent, stride in zip(tensor.dim, tensor.stride, strict=True))
    return (0,) * (rank - len(own)) + own


def _merge(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Axes in the storage order of the first stride list, runs merged that every tensor walks alike."""
    order = sorted(range(len(shape)), key=lambda axis: (-strides[0][axis], axis))
    extents: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for axis in order:
        extent = shape[axis]
        if extent == 1:
            continue
        if extents and all(walk[-1] == s[axis] * extent for walk, s in zip(walks, strides, strict=True)):
            extents[-1] *= extent
            for walk, s in zip(walks, strides, strict=True):
                walk[-1] = s[axis]
            continue
        extents.append(extent)
        for walk, s in zip(walks, strides, strict=True):
            walk.append(s[axis])
    return extents or [1], [walk or [0] for walk in walks]


def arithmetic(compute: data_type) -> str:
    """The C type a node's compute type works in."""
    return _ARITHMETIC.get(compute, "float")


def _number(value: Any, default: str) -> str:
    return default if value is None else repr(float(value))


def _expression(node: NodeSpec, inputs: Sequence[str]) -> str:
    params = node.params
    upper = params.get("upper_clip")
    return FORMULAS[node.op].format(
        *inputs,
        negative_slope=_number(params.get("negative_slope"), "0.0"),
        lower_clip=_number(params.get("lower_clip"), "0.0"),
        upper_clip=_INFINITY if upper is None else f"C({float(upper)!r})",
        swish_beta=_number(params.get("swish_beta"), "1.0"),
    )


class _Walk:
    """How the kernel walks memory: merged extents, one stride list per tensor or coordinate, elements per access."""

    __slots__ = ("coordinates", "extents", "inputs", "integer", "outputs", "strides", "vector")

    def __init__(self, spec: GraphSpec, vectorise: bool) -> None:
        rank = len(shape_of(spec))
        self.outputs = [t for t in spec.operands if t.is_output]
        self.inputs = [t for t in spec.operands if not t.is_output and not t.is_pass_by_value]
        self.coordinates = [n for n in spec.nodes if n.op == "gen_index"]
        strides = [_broadcast_strides(t, rank) for t in self.tensors]
        for node in self.coordinates:
            # A coordinate is a tensor whose "offset" is its value.
            axis = node.params["axis"] + rank - len(spec.tensors[node.outputs["OUT_0"]].dim)
            strides.append(tuple(int(i == axis) for i in range(rank)))
        self.extents, self.strides = _merge(shape_of(spec), strides)
        self.vector = self._vector() if vectorise else 1
        reach = [sum((e - 1) * s for e, s in zip(self.extents, walk, strict=True)) for walk in self.strides]
        self.integer = "long long" if max([self.total, *reach]) >= 2**31 else "int"

    @property
    def tensors(self) -> list[TensorSpec]:
        """Outputs, then inputs: the order of the kernel's pointers."""
        return [*self.outputs, *self.inputs]

    @property
    def inner(self) -> int:
        """The fastest merged axis."""
        return len(self.extents) - 1

    @property
    def total(self) -> int:
        total = 1
        for extent in self.extents:
            total *= extent
        return total

    def wide(self, i: int) -> bool:
        """Whether pointer `i` is accessed `vector` elements at a time."""
        return self.vector > 1 and self.strides[i][self.inner] == 1

    def _vector(self) -> int:
        memory = self.strides[: len(self.tensors)]
        if any(walk[self.inner] not in (0, 1) for walk in self.strides):
            return 1
        vector = min(8, 16 // min(STORAGE[t.data_type][1] for t in self.tensors))
        outer = [step for walk in memory if walk[self.inner] for step in walk[: self.inner]]
        while vector > 1 and (self.extents[self.inner] % vector or any(step % vector for step in outer)):
            vector //= 2
        return vector

    def offset(self, i: int) -> str:
        """The element offset of walk `i` at this thread's coordinates."""
        terms = [f"c{a}" if s == 1 else f"c{a} * ({self.integer}){s}" for a, s in enumerate(self.strides[i]) if s]
        return " + ".join(terms) or "0"


def _arguments(spec: GraphSpec, walk: _Walk, element: dict[int, str]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The kernel's signature and the parameters of a launch; names the scalars in `element`."""
    index = {t.uid: i for i, t in enumerate(spec.operands)}
    signature: list[str] = []
    parameters: list[tuple[Any, ...]] = []
    for i, tensor in enumerate(walk.tensors):
        signature.append(f"{'' if tensor.is_output else 'const '}{STORAGE[tensor.data_type][0]}* p{i}")
        parameters.append(("address", index[tensor.uid], 0))
    scalars = [t for t in spec.tensors.values() if t.is_pass_by_value]
    for k, tensor in enumerate(scalars):
        ctype, size = STORAGE[tensor.data_type]
        signature.append(f"{ctype} s{k}")
        if tensor.pass_by_value is None:
            parameters.append(("scalar", index[tensor.uid], size))
        else:
            data = scalar_bytes(tensor.pass_by_value, tensor.data_type, tensor.name)
            parameters.append(("bytes", data, size))
        element[tensor.uid] = f"s{k}"
    return signature, parameters


def _positions(walk: _Walk, block: int) -> list[str]:
    """This thread's coordinates, the offsets they give, and the loads."""
    integer, groups = walk.integer, walk.total // walk.vector
    lines = [
        f"  const {integer} group = blockIdx.x * ({integer}){block} + threadIdx.x;",
        f"  if (group >= {groups}) return;",
        f"  {integer} rest = group;",
    ]
    for axis in range(walk.inner, -1, -1):
        inner = axis == walk.inner
        extent = walk.extents[axis] // (walk.vector if inner else 1)
        scale = f" * {walk.vector}" if inner and walk.vector > 1 else ""
        split = f"rest % {extent}{scale}; rest /= {extent};" if axis else f"rest{scale};"
        lines.append(f"  const {integer} c{axis} = {split}")
    for i, tensor in enumerate(walk.tensors):
        ctype = STORAGE[tensor.data_type][0]
        lines.append(f"  const {integer} o{i} = {walk.offset(i)};")
        if tensor.is_output:
            lines.append(f"  pack<{ctype}, {walk.vector}> w{i};")
        elif walk.wide(i):
            lines.append(f"  const auto v{i} = *reinterpret_cast<const pack<{ctype}, {walk.vector}>*>(p{i} + o{i});")
        else:
            lines.append(f"  const {ctype} v{i} = p{i}[o{i}];")
    for j in range(len(walk.coordinates)):
        lines.append(f"  const {integer} g{j} = {walk.offset(len(walk.tensors) + j)};")
    return lines


def _formulas(spec: GraphSpec, walk: _Walk, element: dict[int, str]) -> list[str]:
    """The nodes in order, inside the loop over the elements of one access."""
    lines = [f"  #pragma unroll\n  for (int lane = 0; lane < {walk.vector}; lane++) {{"]
    place = {t.uid: i for i, t in enumerate(walk.outputs)}
    for k, node in enumerate(spec.nodes):
        out = spec.tensors[node.outputs["OUT_0"]]
        ctype = STORAGE[out.data_type][0]
        c = arithmetic(node.compute_data_type)
        if node.op == "identity":  # a conversion: straight from the source's type, whatever the node computes in
            c = arithmetic(spec.tensors[node.inputs["IN_0"]].data_type)
        lines.append(f"    {ctype} t{k};\n    {{ using C = {c}; using real = real_of<C>::type;")
        if node.op == "gen_index":
            j = walk.coordinates.index(node)
            lane = " + lane" if walk.strides[len(walk.tensors) + j][walk.inner] else ""
            value = f"C(g{j}{lane})"
        else:
            names = [f"a{a}" for a in range(len(node.inputs))]
            lines += [
                f"      const C {name} = load<C>({element[uid]});"
                for name, uid in zip(names, node.inputs.values(), strict=True)
            ]
            value = _expression(node, names)
        lines.append(f"      t{k} = store_as<{ctype}>::of({value}); }}")
        element[out.uid] = f"t{k}"
        if out.uid in place:
            lines.append(f"    w{place[out.uid]}.v[lane] = t{k};")
    return [*lines, "  }"]


def _stores(walk: _Walk) -> list[str]:
    lines = []
    for i, tensor in enumerate(walk.outputs):
        ctype = STORAGE[tensor.data_type][0]
        if walk.vector > 1:
            lines.append(f"  *reinterpret_cast<pack<{ctype}, {walk.vector}>*>(p{i} + o{i}) = w{i};")
        else:
            lines.append(f"  p{i}[o{i}] = w{i}.v[0];")
    return lines


def generate(spec: GraphSpec, *, vectorise: bool, block: int = 256) -> Kernel:
    """The kernel of a graph whose nodes all have a formula (or are gen_index) and whose outputs have one shape.

    `vectorise=False` gives the form that needs no alignment beyond the element's.
    """
    walk = _Walk(spec, vectorise)
    element: dict[int, str] = {}  # uid -> what the tensor's element is called inside the loop
    signature, parameters = _arguments(spec, walk, element)
    for i, tensor in enumerate(walk.tensors):
        if not tensor.is_output:
            element[tensor.uid] = f"v{i}.v[lane]" if walk.wide(i) else f"v{i}"
    name = "fused_pointwise"
    body = [*_positions(walk, block), *_formulas(spec, walk, element), *_stores(walk)]
    head = f'extern "C" __global__ void __launch_bounds__({block}) {name}({", ".join(signature)}) {{'
    index = {t.uid: i for i, t in enumerate(spec.operands)}
    aligned = [
        (index[tensor.uid], min(16, STORAGE[tensor.data_type][1] * walk.vector))
        for i, tensor in enumerate(walk.tensors)
        if walk.wide(i)
    ]
    source = "\n".join((_PRELUDE, head, *body, "}\n"))
    return Kernel(source, name, parameters, -(-(walk.total // walk.vector) // block), block, walk.vector, aligned)
