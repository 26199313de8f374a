// NumPy through its C API: the only route that reads bfloat16, float8 and read-only arrays alike.
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION

#include "dlpack/read.h"

#include <numpy/arrayobject.h>

#include <bit>
#include <cstring>

namespace opgraph {
namespace {

constexpr int kUserTypes = 64;  // ml_dtypes registers about 20
// (code << 16 | bits << 8 | 1 + known) per user type number above NPY_USERDEF; 0 = not looked at yet.
std::atomic<uint32_t> g_user[kUserTypes];
// Descriptors by DLPack dtype for views, filled on first need (owned for the life of the process).
std::atomic<PyArray_Descr*> g_descr[32][5];

struct Named {
  const char* name;
  DLDataType dtype;
};

// ml_dtypes scalar types, by name: the package is never imported here.
constexpr Named kNamed[] = {
    {"bfloat16", {kDLBfloat, 16, 1}},
    {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
    {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
    {"float8_e8m0fnu", {kDLFloat8_e8m0fnu, 8, 1}},
    {"float8_e3m4", {kDLFloat8_e3m4, 8, 1}},
    {"float8_e4m3", {kDLFloat8_e4m3, 8, 1}},
    {"float8_e4m3b11fnuz", {kDLFloat8_e4m3b11fnuz, 8, 1}},
    {"float8_e4m3fnuz", {kDLFloat8_e4m3fnuz, 8, 1}},
    {"float8_e5m2fnuz", {kDLFloat8_e5m2fnuz, 8, 1}},
    // One element a byte, unlike the packed pairs a graph declares: spelled with one lane, so never equal to them.
    {"float4_e2m1fn", {kDLFloat4_e2m1fn, 4, 1}},
    {"float6_e2m3fn", {kDLFloat6_e2m3fn, 8, 1}},
    {"float6_e3m2fn", {kDLFloat6_e3m2fn, 8, 1}},
    {"int4", {kDLInt, 4, 1}},
    {"uint4", {kDLUInt, 4, 1}},
};

OG_COLD bool user_dtype(PyArray_Descr* d, DLDataType& out) {
  // A structured type may carry a scalar class of any name: only registered element types count.
  if (d->type_num < NPY_USERDEF) return false;
  const char* full = d->typeobj ? d->typeobj->tp_name : "";
  const char* dot = std::strrchr(full, '.');
  const char* name = dot ? dot + 1 : full;
  for (const Named& n : kNamed)
    if (std::strcmp(n.name, name) == 0 && (n.dtype.bits + 7) / 8 == PyDataType_ELSIZE(d)) {
      out = n.dtype;
      const int slot = d->type_num - NPY_USERDEF;
      if (slot >= 0 && slot < kUserTypes)
        g_user[slot].store((uint32_t(out.code) << 16) | (uint32_t(out.bits) << 8) | out.lanes, std::memory_order_release);
      return true;
    }
  return false;
}

// False when the dtype has no DLPack spelling.
inline bool array_dtype(PyArray_Descr* d, npy_intp itemsize, DLDataType& out) {
  const int num = d->type_num;
  const auto bits = static_cast<uint8_t>(itemsize * 8);
  switch (num) {
    case NPY_FLOAT: case NPY_DOUBLE: case NPY_HALF: out = {kDLFloat, bits, 1}; return true;
    case NPY_BYTE: case NPY_SHORT: case NPY_INT: case NPY_LONG: case NPY_LONGLONG: out = {kDLInt, bits, 1}; return true;
    case NPY_UBYTE: case NPY_USHORT: case NPY_UINT: case NPY_ULONG: case NPY_ULONGLONG: out = {kDLUInt, bits, 1}; return true;
    case NPY_BOOL: out = {kDLBool, 8, 1}; return true;
    case NPY_CFLOAT: case NPY_CDOUBLE: out = {kDLComplex, bits, 1}; return true;
    default: break;
  }
  const int slot = num - NPY_USERDEF;
  if (slot >= 0 && slot < kUserTypes)
    if (const uint32_t known = g_user[slot].load(std::memory_order_acquire)) {
      out = {static_cast<uint8_t>(known >> 16), static_cast<uint8_t>(known >> 8), static_cast<uint16_t>(known & 0xff)};
      return true;
    }
  return user_dtype(d, out);
}

OG_COLD Rule refuse_dtype(PyArray_Descr* d) {
  PyErr_Format(PyExc_BufferError, "NumPy dtype %R has no DLPack spelling", reinterpret_cast<PyObject*>(d));
  return Rule::producer;
}

OG_COLD Rule refuse_order(PyArray_Descr* d) {
  PyErr_Format(PyExc_BufferError, "NumPy dtype %R is byte-swapped; pass array.astype(dtype.newbyteorder('='))",
               reinterpret_cast<PyObject*>(d));
  return Rule::producer;
}

OG_COLD Rule refuse_masked(PyObject* obj) {
  PyErr_Format(PyExc_BufferError, "%s carries a mask that a buffer cannot express; pass its .filled() array",
               Py_TYPE(obj)->tp_name);
  return Rule::producer;
}

OG_COLD Rule divide_strides(PyArrayObject* a, npy_intp itemsize, Reading& out) {
  for (int i = 0; i < PyArray_NDIM(a); i++) {
    if (PyArray_STRIDE(a, i) % itemsize) {
      if (PyArray_DIM(a, i) > 1) {
        PyErr_Format(PyExc_BufferError, "stride of %zd bytes on axis %d is no multiple of the item size %zd",
                     static_cast<Py_ssize_t>(PyArray_STRIDE(a, i)), i, static_cast<Py_ssize_t>(itemsize));
        return Rule::producer;
      }
    }
    out.strides[i] = PyArray_STRIDE(a, i) / itemsize;
  }
  return Rule::ok;
}

PyArray_Descr* descr_for(DLDataType t) {
  int builtin = -1;
  switch (t.code) {
    case kDLFloat: builtin = t.bits == 32 ? NPY_FLOAT : t.bits == 64 ? NPY_DOUBLE : t.bits == 16 ? NPY_HALF : -1; break;
    case kDLInt: builtin = t.bits == 8 ? NPY_INT8 : t.bits == 16 ? NPY_INT16 : t.bits == 32 ? NPY_INT32 : t.bits == 64 ? NPY_INT64 : -1; break;
    case kDLUInt: builtin = t.bits == 8 ? NPY_UINT8 : t.bits == 16 ? NPY_UINT16 : t.bits == 32 ? NPY_UINT32 : t.bits == 64 ? NPY_UINT64 : -1; break;
    case kDLBool: builtin = NPY_BOOL; break;
    case kDLComplex: builtin = t.bits == 64 ? NPY_CFLOAT : t.bits == 128 ? NPY_CDOUBLE : -1; break;
    default: break;
  }
  if (builtin >= 0) return PyArray_DescrFromType(builtin);
  if (t.bits == 4) return PyArray_DescrFromType(NPY_UINT8);  // packed pairs are shown as their bytes
  if (t.code >= 32 || t.bits > 16) {
    PyErr_Format(PyExc_BufferError, "no NumPy dtype for DLPack type (code %d, bits %d)", t.code, t.bits);
    return nullptr;
  }
  std::atomic<PyArray_Descr*>& slot = g_descr[t.code][t.bits / 4];
  if (PyArray_Descr* known = slot.load(std::memory_order_acquire)) {
    Py_INCREF(known);
    return known;
  }
  for (const Named& n : kNamed)
    if (same_dtype(n.dtype, t)) {
      Ref module(PyImport_ImportModule("ml_dtypes"));
      if (!module) return nullptr;
      Ref scalar(PyObject_GetAttrString(module.get(), n.name));
      PyArray_Descr* d = nullptr;
      if (!scalar || !PyArray_DescrConverter(scalar.get(), &d)) return nullptr;
      Py_INCREF(d);  // the cache's own, for the life of the process
      PyArray_Descr* none = nullptr;
      if (!slot.compare_exchange_strong(none, d)) Py_DECREF(d);
      return d;
    }
  PyErr_Format(PyExc_BufferError, "no NumPy dtype for DLPack type (code %d, bits %d)", t.code, t.bits);
  return nullptr;
}

}  // namespace

int numpy_init() { return PyArray_ImportNumPyAPI(); }

bool is_numpy_array(PyObject* obj) { return PyArray_Check(obj); }
bool is_numpy_array_exact(PyObject* obj) { return PyArray_CheckExact(obj); }
bool is_numpy_scalar(PyObject* obj) { return PyArray_IsScalar(obj, Generic); }

Rule read_numpy(PyObject* obj, Reading& out) {
  auto* a = reinterpret_cast<PyArrayObject*>(obj);
  out.reset();
  PyArray_Descr* d = PyArray_DESCR(a);
  const npy_intp itemsize = PyArray_ITEMSIZE(a);
  const int rank = PyArray_NDIM(a);
  if (OG_UNLIKELY(!PyArray_CheckExact(obj))) {
    Ref mask(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(obj)), "_data"));
    if (!mask) PyErr_Clear();
    Ref masked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(obj)), "mask"));
    if (!masked) PyErr_Clear();
    if (mask && masked) return refuse_masked(obj);
  }
  if (OG_UNLIKELY(!array_dtype(d, itemsize, out.t.dtype))) return refuse_dtype(d);
  if (OG_UNLIKELY(!PyArray_ISNOTSWAPPED(a))) return refuse_order(d);
  out.t.ndim = rank;
  out.t.device = {kDLCPU, 0};
  if (OG_UNLIKELY(rank > kMaxBufferRank)) return Rule::rank;
  const npy_intp* strides = PyArray_STRIDES(a);
  const int shift = std::countr_zero(static_cast<unsigned long>(itemsize));
  npy_intp low_bits = 0;
  for (int i = 0; i < rank; i++) {
    low_bits |= strides[i];
    out.strides[i] = strides[i] >> shift;
  }
  if (OG_UNLIKELY(low_bits & (itemsize - 1)))
    if (const Rule r = divide_strides(a, itemsize, out); r != Rule::ok) return r;
  out.t.data = PyArray_DATA(a);
  out.t.shape = reinterpret_cast<int64_t*>(PyArray_DIMS(a));
  out.t.strides = out.strides;
  out.t.byte_offset = 0;
  out.read_only = !PyArray_ISWRITEABLE(a);
  return Rule::ok;
}

PyObject* numpy_view(void* data, const Layout& layout, DLDataType dtype, bool writable, PyObject* base) {
  PyArray_Descr* descr = descr_for(dtype);
  if (!descr) return nullptr;
  const npy_intp itemsize = PyDataType_ELSIZE(descr);
  npy_intp dims[kMaxRank], strides[kMaxRank];
  for (int i = 0; i < layout.rank; i++) {
    dims[i] = layout.dims[i];
    strides[i] = layout.strides[i] * itemsize;
  }
  static char nowhere[16];  // an empty array may have no address; NumPy would allocate for null
  PyObject* view = PyArray_NewFromDescr(&PyArray_Type, descr, layout.rank, dims, strides, data ? data : nowhere,
                                        writable ? NPY_ARRAY_WRITEABLE : 0, nullptr);
  if (!view) return nullptr;
  auto* a = reinterpret_cast<PyArrayObject*>(view);
  PyArray_UpdateFlags(a, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS | NPY_ARRAY_ALIGNED);
  if (base) {
    Py_INCREF(base);
    if (PyArray_SetBaseObject(a, base) < 0) {
      Py_DECREF(view);
      return nullptr;
    }
  }
  return view;
}

}  // namespace opgraph
