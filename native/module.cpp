// The border: the extension module, its raw types, and the cold functions bound through nanobind.
#include "python.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "dlpack/read.h"
#include "pack/bound.h"
#include "pack/executable.h"
#include "pack/handle.h"
#include "pack/pack.h"
#include "pack/slot.h"
#include "program/python.h"
#include "vector/vector.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using opgraph::Reading;
using opgraph::Ref;
using opgraph::Rule;

// What one buffer says of itself, as a dict: the reading layer driven directly, for tests and bug reports.
nb::dict describe(nb::object buffer, int64_t stream, nb::object hooks) {
  Reading r;
  const opgraph::ReadContext any{{static_cast<DLDeviceType>(0), 0}, stream, hooks.ptr()};
  const opgraph::TypeEntry* none = nullptr;
  const Rule rule = opgraph::read_buffer(buffer.ptr(), any, r, none);
  if (rule != Rule::ok) {
    opgraph::release(r);
    if (PyErr_Occurred()) throw nb::python_error();
    PyErr_Format(PyExc_TypeError, "%s is no buffer that can be read", Py_TYPE(buffer.ptr())->tp_name);
    throw nb::python_error();
  }
  nb::list dims, strides;
  for (int i = 0; i < r.t.ndim; i++) dims.append(r.t.shape[i]), strides.append(r.t.strides[i]);
  nb::dict out;
  out["address"] = reinterpret_cast<uintptr_t>(r.t.data);
  out["dims"] = nb::tuple(dims);
  out["strides"] = nb::tuple(strides);
  out["dtype"] = nb::make_tuple(r.t.dtype.code, r.t.dtype.bits, r.t.dtype.lanes);
  out["device"] = nb::make_tuple(static_cast<int>(r.t.device.device_type), r.t.device.device_id);
  out["read_only"] = r.read_only;
  out["bare_address"] = r.address_only;
  opgraph::release(r);
  return out;
}

// The exchange table's own borrowing call, `repeat` times over `buffers`, in a native loop: the floor that the benchmark
// measures execute() against. Returns nanoseconds per pass over the list.
double borrow_loop_ns(nb::list buffers, int repeat) {
  const size_t n = buffers.size();
  std::vector<std::pair<PyObject*, const opgraph::TypeEntry*>> items;
  for (size_t i = 0; i < n; i++) {
    PyObject* obj = nb::handle(buffers[i]).ptr();
    const opgraph::TypeEntry* e = opgraph::find_exchange(Py_TYPE(obj));
    if (!e || !e->borrow) throw nb::type_error("a buffer without the borrowing call");
    items.emplace_back(obj, e);
  }
  DLTensor t;
  const auto start = std::chrono::steady_clock::now();
  for (int k = 0; k < repeat; k++)
    for (auto& [obj, e] : items)
      if (e->borrow(obj, &t) != 0) throw nb::python_error();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / repeat;
}

template <class T>
using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

template <class T>
void check_same(const In<T>& x, const Out<T>& out) {
  if (x.size() != out.size()) throw nb::value_error("out must have as many elements as x");
}

template <class T, void (*F)(const T*, T*, int64_t)>
void elementwise(In<T> x, Out<T> out) {
  check_same<T>(x, out);
  nb::gil_scoped_release release;
  F(x.data(), out.data(), static_cast<int64_t>(x.size()));
}

template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T, void (*F)(T*, int64_t, int64_t, int64_t, T*, T*)>
void softmax(Matrix<T> x, Vector<T> max, Vector<T> sum) {
  const int64_t rows = x.shape(0), n = x.shape(1);
  if (static_cast<int64_t>(max.shape(0)) != rows || static_cast<int64_t>(sum.shape(0)) != rows)
    throw nb::value_error("row_max and row_sum hold one value per row");
  nb::gil_scoped_release release;
  F(x.data(), rows, n, n, max.data(), sum.data());
}

void layernorm(nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x,
               std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>> scale,
               std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>> bias, float eps,
               Matrix<float> out, std::optional<Vector<float>> mean, std::optional<Vector<float>> inv_std) {
  const size_t rows = x.shape(0), n = x.shape(1);
  const bool fits = out.shape(0) == rows && out.shape(1) == n && (!scale || scale->shape(0) == n) &&
                    (!bias || bias->shape(0) == n) && (!mean || mean->shape(0) == rows) &&
                    (!inv_std || inv_std->shape(0) == rows) && (scale || !bias);
  if (!fits) throw nb::value_error("shapes: x, out [rows, n]; scale, bias [n]; mean, inv_std [rows]; bias needs scale");
  nb::gil_scoped_release release;
  opgraph::layernorm_rows_f32(x.data(), scale ? scale->data() : nullptr, bias ? bias->data() : nullptr, eps, out.data(),
                              mean ? mean->data() : nullptr, inv_std ? inv_std->data() : nullptr,
                              static_cast<int64_t>(rows), static_cast<int64_t>(n));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native core of opgraph: reading buffers, the operand contract, calls, and host loops of the CPU engine.";
  if (opgraph::numpy_init() < 0 || opgraph::slot_init(m.ptr()) < 0 || opgraph::pack_init(m.ptr()) < 0 ||
      opgraph::handle_init(m.ptr()) < 0 || opgraph::executable_init(m.ptr()) < 0 || opgraph::bound_init(m.ptr()) < 0)
    throw nb::python_error();
  opgraph::program_init(m.ptr());
  m.def("describe", &describe, "buffer"_a, "stream"_a = 0, "hooks"_a = nb::none(),
        "What a buffer says of itself (address, dims, strides in elements, dtype, device, read_only), read as a call reads it.");
  m.def("borrow_loop_ns", &borrow_loop_ns, "buffers"_a, "repeat"_a,
        "Nanoseconds for one pass of the exchange table's borrowing call over `buffers`, in a native loop.");
  m.def("erf", &elementwise<float, opgraph::erf_f32>, "x"_a.noconvert(), "out"_a.noconvert(),
        "erf of a C-contiguous array into `out`, which may be `x`.");
  m.def("erf", &elementwise<double, opgraph::erf_f64>, "x"_a.noconvert(), "out"_a.noconvert());
  m.def("gelu", &elementwise<float, opgraph::gelu_f32>, "x"_a.noconvert(), "out"_a.noconvert(),
        "0.5 x (1 + erf(x / sqrt 2)) of a C-contiguous array into `out`, which may be `x`.");
  m.def("gelu", &elementwise<double, opgraph::gelu_f64>, "x"_a.noconvert(), "out"_a.noconvert());
  m.def("softmax_block", &softmax<float, opgraph::softmax_rows_f32>, "scores"_a.noconvert(), "row_max"_a.noconvert(),
        "row_sum"_a.noconvert(),
        "In place per row: exp(scores - max); max and sum go to row_max and row_sum. Rows of -inf become zeros.");
  m.def("softmax_block", &softmax<double, opgraph::softmax_rows_f64>, "scores"_a.noconvert(), "row_max"_a.noconvert(),
        "row_sum"_a.noconvert());
  m.def("layernorm_rows", &layernorm, "x"_a.noconvert(), "scale"_a.none(), "bias"_a.none(), "eps"_a, "out"_a.noconvert(),
        "mean"_a.none() = nb::none(), "inv_std"_a.none() = nb::none(),
        "out = (x - mean) * inv_std * scale + bias over the last axis of x [rows, n], float32.");
}
