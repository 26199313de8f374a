#include "dlpack/read.h"

#include <mutex>
#include <string>
#include <string_view>

namespace opgraph {
namespace {

// ---- per-type cache -------------------------------------------------------------------------------------------
// Open addressing over immutable entries: readers take no lock. Only successes are stored, so a type that gains the
// table later is found. When the cache is full, further types still work, uncached.
constexpr size_t kTypes = 256;
std::atomic<const TypeEntry*> g_types[kTypes];
std::mutex g_types_mutex;  // writers only; nothing that may run Python happens under it

size_t type_hash(const PyTypeObject* type) {
  const auto p = reinterpret_cast<uintptr_t>(type);
  return (p >> 4) ^ (p >> 12);
}

inline const TypeEntry* cached(PyTypeObject* type) {
  size_t h = type_hash(type);
  for (int probe = 0; probe < 8; probe++, h++) {
    const TypeEntry* e = g_types[h % kTypes].load(std::memory_order_acquire);
    if (!e) return nullptr;
    if (e->type == type) return e;
  }
  return nullptr;
}

const TypeEntry* store(const TypeEntry& entry) {
  std::lock_guard<std::mutex> lock(g_types_mutex);
  size_t h = type_hash(entry.type);
  for (int probe = 0; probe < 8; probe++, h++) {
    const TypeEntry* e = g_types[h % kTypes].load(std::memory_order_relaxed);
    if (e && e->type == entry.type) return e;
    if (!e) {
      auto* fresh = new TypeEntry(entry);
      Py_INCREF(reinterpret_cast<PyObject*>(entry.type));
      g_types[h % kTypes].store(fresh, std::memory_order_release);
      return fresh;
    }
  }
  return nullptr;
}

// Looks an attribute up on the type, as special methods are. Null without an exception when it is absent.
PyObject* type_attribute(PyTypeObject* type, const char* name) {
  PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (!found) PyErr_Clear();
  return found;
}

// Capsule or integer form, newer spelling first; then back through prev_api to a table of our major version.
const DLPackExchangeAPI* exchange_of(PyTypeObject* type) {
  for (const char* name : {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"}) {
    Ref value(type_attribute(type, name));
    if (!value) continue;
    void* p = nullptr;
    if (PyCapsule_CheckExact(value.get())) {
      p = PyCapsule_GetPointer(value.get(), PyCapsule_GetName(value.get()));
      const char* label = PyCapsule_GetName(value.get());
      if (!label || std::string_view(label) != "dlpack_exchange_api") p = nullptr;
    } else if (PyLong_CheckExact(value.get())) {
      p = PyLong_AsVoidPtr(value.get());
    }
    if (PyErr_Occurred()) PyErr_Clear();
    const auto* header = static_cast<const DLPackExchangeAPIHeader*>(p);
    for (int step = 0; header && step < 16; step++, header = header->prev_api)
      if (header->version.major == DLPACK_MAJOR_VERSION) return reinterpret_cast<const DLPackExchangeAPI*>(header);
  }
  return nullptr;
}

OG_COLD const TypeEntry* discover(PyTypeObject* type, TypeEntry& scratch) {
  const DLPackExchangeAPI* api = exchange_of(type);
  if (!api) return nullptr;
  if (!api->dltensor_from_py_object_no_sync && !api->managed_tensor_from_py_object_no_sync) return nullptr;
  Ref negative(type_attribute(type, "is_neg")), grad(type_attribute(type, "requires_grad"));
  scratch = {type, api, api->dltensor_from_py_object_no_sync, negative && grad ? api : nullptr};
  const TypeEntry* kept = store(scratch);
  return kept ? kept : &scratch;
}

// ---- DLPack structs -------------------------------------------------------------------------------------------

// Takes over what a producer's struct says; it may point into the producer's storage, which outlives the reading.
Rule adopt(const DLTensor& t, Reading& out) {
  out.t = t;
  return settle(out);
}

Rule adopt_capsule(PyObject* capsule, Reading& out) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    auto* m = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) return Rule::producer;
    if (m->version.major != DLPACK_MAJOR_VERSION) {
      // The deleter keeps its place in every major version: release without looking at the tensor.
      const unsigned major = m->version.major;
      if (m->deleter) m->deleter(m);
      PyErr_Format(PyExc_BufferError, "the capsule is of DLPack major version %u; this library reads version %d", major,
                   DLPACK_MAJOR_VERSION);
      return Rule::producer;
    }
    out.hold = Hold::versioned;
    out.versioned = m;
    out.read_only = (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
    return adopt(m->dl_tensor, out);
  }
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    auto* m = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    if (PyCapsule_SetName(capsule, "used_dltensor") < 0) return Rule::producer;
    out.hold = Hold::legacy;
    out.legacy = m;
    return adopt(m->dl_tensor, out);
  }
  PyErr_SetString(PyExc_BufferError, "`__dlpack__` returned no unused DLPack capsule");
  return Rule::producer;
}

// A table may have the borrowing call alone: then it says nothing of memory that has to outlive a call.
bool serves(const TypeEntry& e, bool owning) {
  return (e.borrow && !owning) || e.api->managed_tensor_from_py_object_no_sync;
}

Rule read_table(const TypeEntry& e, PyObject* obj, Reading& out, bool owning) {
  out.flags_of = e.flags_of;
  if (e.borrow && !owning) {
    if (e.borrow(obj, &out.t) != 0) return Rule::producer;
    return settle(out);
  }
  DLManagedTensorVersioned* m = nullptr;
  if (e.api->managed_tensor_from_py_object_no_sync(obj, &m) != 0 || !m) return Rule::producer;
  out.hold = Hold::versioned;
  out.versioned = m;
  out.read_only = (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
  return adopt(m->dl_tensor, out);
}

// ---- `__dlpack__` ---------------------------------------------------------------------------------------------

// The stream argument of the array API standard: CPU omits it; CUDA spells the legacy default stream 1, never 0.
PyObject* stream_argument(int32_t device_type, int64_t stream) {
  if (device_type == kDLCUDA || device_type == kDLCUDAManaged) return PyLong_FromLongLong(stream == 0 ? 1 : stream);
  if (device_type == kDLROCM) return PyLong_FromLongLong(stream);
  return nullptr;
}

PyObject* call_dlpack(PyObject* obj, PyObject* stream, bool versioned) {
  Ref method(PyObject_GetAttrString(obj, "__dlpack__"));
  if (!method) return nullptr;
  Ref kwargs(PyDict_New()), args(PyTuple_New(0));
  if (!kwargs || !args) return nullptr;
  if (stream && PyDict_SetItemString(kwargs.get(), "stream", stream) < 0) return nullptr;
  if (versioned) {
    Ref version(Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION));
    if (!version || PyDict_SetItemString(kwargs.get(), "max_version", version.get()) < 0) return nullptr;
  }
  return PyObject_Call(method.get(), args.get(), kwargs.get());
}

Rule read_dlpack(PyObject* obj, const ReadContext& context, Reading& out) {
  Ref device(PyObject_CallMethod(obj, "__dlpack_device__", nullptr));
  if (!device) return Rule::producer;
  int type = 0, id = 0;
  Ref pair(PySequence_Tuple(device.get()));
  if (!pair) return Rule::producer;
  if (PyTuple_GET_SIZE(pair.get()) != 2) {
    PyErr_SetString(PyExc_BufferError, "`__dlpack_device__` did not return (device_type, device_id)");
    return Rule::producer;
  }
  type = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(pair.get(), 0)));
  id = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(pair.get(), 1)));
  if (PyErr_Occurred()) return Rule::producer;
  const DLDevice told{static_cast<DLDeviceType>(type), id};
  const bool fits = is_host(context.device) ? is_host(told) : same_device(told, context.device);
  if (!fits && context.device.device_type != 0) {  // device_type 0: any device (the reading layer driven directly)
    out.t.device = told;
    out.t.ndim = 0;
    return Rule::device;  // refused before the producer is asked for memory we could not use
  }
  Ref stream(stream_argument(type, context.stream));
  if (PyErr_Occurred()) return Rule::producer;
  Ref capsule(call_dlpack(obj, stream.get(), true));
  if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
    // A producer from before `max_version`: ask again the old way.
    PyErr_Clear();
    capsule = Ref(call_dlpack(obj, stream.get(), false));
  }
  if (!capsule) return Rule::producer;
  if (!PyCapsule_CheckExact(capsule.get())) {
    PyErr_Format(PyExc_TypeError, "`__dlpack__` returned %s, not a capsule", Py_TYPE(capsule.get())->tp_name);
    return Rule::producer;
  }
  return adopt_capsule(capsule.get(), out);
}

// An attribute or method of a buffer as a truth value; -1 with an exception set.
int truth(PyObject* obj, const char* name, bool call) {
  Ref value(call ? PyObject_CallMethod(obj, name, nullptr) : PyObject_GetAttrString(obj, name));
  return value ? PyObject_IsTrue(value.get()) : -1;
}

// ---- JAX ------------------------------------------------------------------------------------------------------

bool is_jax_type(PyTypeObject* type) {
  static std::atomic<PyTypeObject*> known{nullptr};
  PyTypeObject* k = known.load(std::memory_order_acquire);
  if (k) return k == type;
  if (!type->tp_name) return false;
  const std::string_view name(type->tp_name);
  if (name != "jaxlib._jax.ArrayImpl" && name != "jaxlib.xla_extension.ArrayImpl") return false;
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  known.store(type, std::memory_order_release);
  return true;
}

bool format_dtype(const char* f, Py_ssize_t size, DLDataType& out) {
  if (!f) f = "B";
  if (*f == '@' || *f == '=') f++;
  if (!*f || f[1]) return false;
  uint8_t code;
  switch (*f) {
    case 'e': case 'f': case 'd': code = kDLFloat; break;
    case 'b': case 'h': case 'i': case 'l': case 'q': code = kDLInt; break;
    case 'B': case 'H': case 'I': case 'L': case 'Q': code = kDLUInt; break;
    case '?': code = kDLBool; break;
    default: return false;
  }
  out = {code, static_cast<uint8_t>(size * 8), 1};
  return true;
}

// The buffer protocol waits until the array is ready and costs a quarter of `__dlpack__`; it cannot carry bfloat16.
Rule read_jax(PyObject* obj, const ReadContext& context, Reading& out) {
  if (PyObject_GetBuffer(obj, &out.buffer, PyBUF_STRIDES | PyBUF_FORMAT) == 0) {
    DLDataType dtype;
    const Py_buffer& b = out.buffer;
    if (format_dtype(b.format, b.itemsize, dtype) && b.ndim <= kMaxBufferRank) {
      for (int i = 0; i < b.ndim; i++) {
        out.dims[i] = b.shape[i];
        out.strides[i] = b.itemsize ? b.strides[i] / b.itemsize : 0;
      }
      out.t = {b.buf, {kDLCPU, 0}, b.ndim, dtype, out.dims, out.strides, 0};
      out.hold = Hold::buffer;
      out.read_only = true;
      return Rule::ok;
    }
    PyBuffer_Release(&out.buffer);
  } else {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return Rule::producer;
    PyErr_Clear();
    const int deleted = truth(obj, "is_deleted", true);
    if (deleted > 0) PyErr_SetString(PyExc_BufferError, "the array was deleted or donated: it has no memory any more");
    if (deleted) return Rule::producer;
  }
  const Rule r = read_dlpack(obj, context, out);
  out.read_only = true;
  return r;
}

// ---- the slow protocols, served by the Python hook ---------------------------------------------------------------

bool read_ints(PyObject* seq, int64_t* out, int* n) {
  Ref tuple(PySequence_Tuple(seq));
  if (!tuple) return false;
  const Py_ssize_t size = PyTuple_GET_SIZE(tuple.get());
  if (size > kMaxBufferRank) {
    PyErr_Format(PyExc_BufferError, "%zd axes; at most %d are read", size, kMaxBufferRank);
    return false;
  }
  for (Py_ssize_t i = 0; i < size; i++) {
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.get(), i));
    if (out[i] == -1 && PyErr_Occurred()) return false;
  }
  *n = static_cast<int>(size);
  return true;
}

OG_COLD Rule read_hook(PyObject* obj, const ReadContext& context, Reading& out) {
  Ref told(PyObject_CallMethod(context.hooks, "read", "OiL", obj, static_cast<int>(context.device.device_type),
                               static_cast<long long>(context.stream)));
  if (!told) return PyErr_ExceptionMatches(PyExc_TypeError) ? Rule::type : Rule::producer;
  PyObject *where, *dims, *strides, *keep;
  int code, bits, lanes, device_type, device_id, read_only;
  if (!PyArg_ParseTuple(told.get(), "O!OO(iii)(ii)pO", &PyLong_Type, &where, &dims, &strides, &code, &bits, &lanes, &device_type,
                        &device_id, &read_only, &keep))
    return Rule::producer;
  const unsigned long long address = PyLong_AsUnsignedLongLong(where);
  if (PyErr_Occurred()) return Rule::producer;
  int rank = 0, stride_rank = 0;
  if (!read_ints(dims, out.dims, &rank)) return Rule::producer;
  if (strides == Py_None) {
    c_order(rank, out.dims, out.strides);
  } else if (!read_ints(strides, out.strides, &stride_rank) || stride_rank != rank) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_BufferError, "shape and strides differ in length");
    return Rule::producer;
  }
  out.t = {reinterpret_cast<void*>(static_cast<uintptr_t>(address)),
           {static_cast<DLDeviceType>(device_type), device_id},
           rank,
           {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), static_cast<uint16_t>(lanes)},
           out.dims,
           out.strides,
           0};
  out.read_only = read_only != 0;
  Py_INCREF(keep);
  out.hold = Hold::object;
  out.object = keep;
  return Rule::ok;
}

OG_COLD Rule read_other(PyObject* obj, const ReadContext& context, Reading& out) {
  PyTypeObject* type = Py_TYPE(obj);
  if (PyBool_Check(obj)) return Rule::boolean;
  if (PyCapsule_CheckExact(obj)) return Rule::capsule;
  if (PyUnicode_Check(obj) || PyBytes_Check(obj) || PyFloat_Check(obj)) return Rule::type;
  if (is_numpy_scalar(obj)) return Rule::type;  // its array interface shows a temporary that is gone when we read it
  if (is_jax_type(type)) return read_jax(obj, context, out);
  Ref dlpack(type_attribute(type, "__dlpack__")), device(type_attribute(type, "__dlpack_device__"));
  if (dlpack && device) return read_dlpack(obj, context, out);
  return read_hook(obj, context, out);
}

Rule read_address(PyObject* obj, const ReadContext& context, Reading& out) {
  const unsigned long long address = PyLong_AsUnsignedLongLong(obj);
  if (address == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
    PyErr_Clear();
    return Rule::address;
  }
  out.t = {reinterpret_cast<void*>(static_cast<uintptr_t>(address)), context.device, 0, {0, 0, 0}, out.dims, out.strides, 0};
  out.address_only = true;
  return Rule::ok;
}

Rule ask(PyObject* obj, const char* name, bool call, Rule refusal) {
  const int yes = truth(obj, name, call);
  if (yes < 0) return Rule::producer;
  return yes ? refusal : Rule::ok;
}

}  // namespace

const TypeEntry* find_exchange(PyTypeObject* type) {
  if (const TypeEntry* e = cached(type)) return e;
  TypeEntry scratch;
  const TypeEntry* e = discover(type, scratch);
  return e == &scratch ? nullptr : e;
}

Rule settle(Reading& out) {
  DLTensor& t = out.t;
  if (t.ndim < 0 || t.ndim > kMaxBufferRank) return Rule::rank;
  if (t.ndim > 0 && !t.shape) {
    PyErr_SetString(PyExc_BufferError, "the producer gave axes but no shape");
    return Rule::producer;
  }
  if (t.data) t.data = static_cast<char*>(t.data) + t.byte_offset;
  t.byte_offset = 0;
  if (!t.strides) {
    c_order(t.ndim, t.shape, out.strides);
    t.strides = out.strides;
  }
  return Rule::ok;
}

Rule read_any(PyObject* obj, const ReadContext& context, Reading& out, bool owning, const TypeEntry*& last) {
  out.reset();
  if (is_numpy_array_exact(obj)) return read_numpy(obj, out);
  PyTypeObject* type = Py_TYPE(obj);
  if (const TypeEntry* e = cached(type)) {
    if (e->borrow) last = e;
    if (OG_LIKELY(serves(*e, owning))) return read_table(*e, obj, out, owning);
  }
  if (PyLong_CheckExact(obj)) return read_address(obj, context, out);
  TypeEntry scratch;
  if (const TypeEntry* e = discover(type, scratch); e && serves(*e, owning)) return read_table(*e, obj, out, owning);
  if (is_numpy_array(obj)) return read_numpy(obj, out);
  return read_other(obj, context, out);
}

void release_slow(Holding& r) {
  const Hold hold = r.hold;
  r.hold = Hold::nothing;
  // A deleter runs the producer's code: an exception in flight must survive it.
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  switch (hold) {
    case Hold::versioned:
      if (r.versioned->deleter) r.versioned->deleter(r.versioned);
      break;
    case Hold::legacy:
      if (r.legacy->deleter) r.legacy->deleter(r.legacy);
      break;
    case Hold::buffer: PyBuffer_Release(&r.buffer); break;
    case Hold::object: Py_DECREF(r.object); break;
    case Hold::nothing: break;
  }
  PyErr_Restore(type, value, trace);
}

OG_COLD Rule check_flags_slow(PyObject* obj, const Reading& r, bool writes) {
  learn_torch_flags(r.flags_of);
  if (const Rule n = ask(obj, "is_neg", true, Rule::negative_bit); n != Rule::ok) return n;
  if (r.t.dtype.code == kDLComplex)
    if (const Rule c = ask(obj, "is_conj", true, Rule::conjugate); c != Rule::ok) return c;
  return writes ? ask(obj, "requires_grad", false, Rule::requires_grad) : Rule::ok;
}

}  // namespace opgraph
