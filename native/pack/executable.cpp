// The Executable type: construction from the plan's description, and the Python-facing entry points.
#include "pack/executable.h"

#include <bit>
#include <new>

#include "pack/bound.h"
#include "program/python.h"
#include "pack/tracing.h"

namespace opgraph {

PyTypeObject* ExecutableType = nullptr;
bool call_init();  // call.cpp: interns the keyword names

namespace {

Executable* as_executable(PyObject* self) { return reinterpret_cast<Executable*>(self); }

// ---- reading the description ------------------------------------------------------------------------------------

bool get_int(PyObject* dict, const char* key, int64_t* out) {
  PyObject* v = PyDict_GetItemString(dict, key);
  if (!v) {
    PyErr_Format(PyExc_TypeError, "operand description lacks '%s'", key);
    return false;
  }
  *out = PyLong_AsLongLong(v);
  return !(*out == -1 && PyErr_Occurred());
}

bool get_flag(PyObject* dict, const char* key, uint16_t bit, uint16_t* flags) {
  PyObject* v = PyDict_GetItemString(dict, key);
  if (!v) {
    PyErr_Format(PyExc_TypeError, "operand description lacks '%s'", key);
    return false;
  }
  const int yes = PyObject_IsTrue(v);
  if (yes < 0) return false;
  if (yes) *flags |= bit;
  return true;
}

bool read_list(PyObject* seq, int64_t* out, int* n) {
  Ref tuple(seq ? PySequence_Tuple(seq) : nullptr);
  if (!tuple) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "operand description lacks its dims or strides");
    return false;
  }
  if (PyTuple_GET_SIZE(tuple.get()) > kMaxRank) {
    PyErr_Format(PyExc_ValueError, "rank %zd; at most %d", PyTuple_GET_SIZE(tuple.get()), kMaxRank);
    return false;
  }
  *n = static_cast<int>(PyTuple_GET_SIZE(tuple.get()));
  for (int i = 0; i < *n; i++) {
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.get(), i));
    if (out[i] == -1 && PyErr_Occurred()) return false;
    if (out[i] < 0) {
      PyErr_SetString(PyExc_ValueError, "extents and strides must be 0 or more");
      return false;
    }
  }
  return true;
}

bool read_dtype(PyObject* tuple, DLDataType* out) {
  int code, bits, lanes;
  if (!tuple || !PyArg_ParseTuple(tuple, "iii", &code, &bits, &lanes)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a dtype is (code, bits, lanes)");
    return false;
  }
  *out = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), static_cast<uint16_t>(lanes)};
  return true;
}

// Elements to storage units of two: the unit-stride axis halves, and so does every other stride.
bool pack_pairs(Layout& l, int64_t uid) {
  int unit = -1;
  for (int i = 0; i < l.rank; i++)
    if (l.strides[i] == 1 && l.dims[i] > 1) unit = i;
  bool fits = unit >= 0 && l.dims[unit] % 2 == 0;
  for (int i = 0; fits && i < l.rank; i++)
    if (i != unit && l.dims[i] > 1) fits = l.strides[i] % 2 == 0;
  if (!fits) {
    PyErr_Format(PyExc_ValueError, "tensor uid %lld: a sub-byte tensor needs an even unit-stride axis and even other strides",
                 static_cast<long long>(uid));
    return false;
  }
  l.dims[unit] /= 2;
  for (int i = 0; i < l.rank; i++)
    if (i != unit) l.strides[i] = l.strides[i] > 1 ? l.strides[i] / 2 : l.strides[i];
  return true;
}

bool read_spec(PyObject* d, OperandSpec& spec) {
  int64_t ragged, pack;
  int rank = 0, stride_rank = 0;
  if (!PyDict_Check(d)) {
    PyErr_SetString(PyExc_TypeError, "an operand description is a dict");
    return false;
  }
  if (!get_int(d, "uid", &spec.uid) || !read_dtype(PyDict_GetItemString(d, "dtype"), &spec.dtype)) return false;
  if (!read_list(PyDict_GetItemString(d, "dims"), spec.declared.dims, &rank)) return false;
  if (!read_list(PyDict_GetItemString(d, "strides"), spec.declared.strides, &stride_rank)) return false;
  if (rank != stride_rank) {
    PyErr_SetString(PyExc_ValueError, "dims and strides differ in length");
    return false;
  }
  spec.declared.rank = rank;
  if (!get_flag(d, "output", kOutput, &spec.flags) || !get_flag(d, "by_value", kByValue, &spec.flags) ||
      !get_flag(d, "optional", kOptional, &spec.flags) || !get_flag(d, "reorder", kReordered, &spec.flags))
    return false;
  if (!get_int(d, "ragged", &ragged) || !get_int(d, "ragged_multiplier", &spec.ragged_multiplier) ||
      !get_int(d, "ragged_rows", &spec.ragged_rows) || !get_int(d, "pack", &pack))
    return false;
  spec.ragged_offset = static_cast<int32_t>(ragged);
  if (ragged >= 0) spec.flags |= kRagged;
  if (pack == 2) {
    spec.flags |= kPacked;
    if (!pack_pairs(spec.declared, spec.uid)) return false;
  }
  const int bits = spec.dtype.bits * spec.dtype.lanes;
  if (bits < 8 || bits % 8 || !std::has_single_bit(static_cast<unsigned>(bits / 8)) || bits > 256) {
    PyErr_Format(PyExc_ValueError, "tensor uid %lld: storage units of %d bits are not supported", static_cast<long long>(spec.uid), bits);
    return false;
  }
  if (spec.has(kByValue) && bits > 8 * static_cast<int>(sizeof Operand::scalar)) {
    PyErr_Format(PyExc_ValueError, "tensor uid %lld: a pass-by-value element of %d bits is not supported",
                 static_cast<long long>(spec.uid), bits);
    return false;
  }
  const int64_t span = span_elements(rank, spec.declared.dims, spec.declared.strides);
  if (spec.has(kByValue) && span > 1) {
    PyErr_Format(PyExc_ValueError, "tensor uid %lld: a pass-by-value tensor holds one element", static_cast<long long>(spec.uid));
    return false;
  }
  spec.item_shift = static_cast<uint8_t>(std::countr_zero(static_cast<unsigned>(bits / 8)));
  if (span > (INT64_MAX >> spec.item_shift)) {
    PyErr_Format(PyExc_ValueError, "tensor uid %lld spans more bytes than 64 bits count", static_cast<long long>(spec.uid));
    return false;
  }
  spec.span_bytes = span << spec.item_shift;
  if (is_dense({rank, spec.declared.dims, spec.declared.strides})) spec.flags |= kDense;
  if (spec.has(kReordered)) {
    int64_t count = 1;
    for (int i = 0; i < rank; i++) count *= spec.declared.dims[i];
    spec.span_bytes = count << spec.item_shift;
  }
  return true;
}

bool read_carve(PyObject* t, Carve& carve) {
  PyObject *dtype, *shape;
  long long offset;
  int rank = 0;
  if (!PyArg_ParseTuple(t, "LOO", &offset, &dtype, &shape)) return false;
  if (!read_dtype(dtype, &carve.dtype) || !read_list(shape, carve.layout.dims, &rank)) return false;
  carve.layout.rank = rank;
  c_order(rank, carve.layout.dims, carve.layout.strides);
  carve.offset = offset;
  carve.nbytes = span_elements(rank, carve.layout.dims, carve.layout.strides) * carve.dtype.bits * carve.dtype.lanes / 8;
  if (offset < 0 || offset % 256) {
    PyErr_SetString(PyExc_ValueError, "workspace regions start at multiples of 256 bytes");
    return false;
  }
  return true;
}

// `keys` with names and uids as exact strs and ints: a look-up in them runs no code of a caller's subclass, which could
// change the caller's mapping while it is iterated.
PyObject* exact_keys(PyObject* keys) {
  Ref out(PyDict_New());
  if (!out) return nullptr;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(keys, &position, &key, &value)) {
    Ref exact(Py_NewRef(key));
    if (PyUnicode_Check(key) && !PyUnicode_CheckExact(key)) {
      exact = Ref(PyUnicode_FromObject(key));
    } else if (PyLong_Check(key) && !PyLong_CheckExact(key)) {
      const long long number = PyLong_AsLongLong(key);
      exact = Ref(number == -1 && PyErr_Occurred() ? nullptr : PyLong_FromLongLong(number));
    }
    if (!exact || PyDict_SetItem(out.get(), exact.get(), value) < 0) return nullptr;
  }
  return out.release();
}

// ---- the type ---------------------------------------------------------------------------------------------------

PyObject* executable_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"operands", "keys",   "tensor_type", "defaults", "device", "workspace_bytes", "carves",
                                "inplace",  "run",    "hooks",       "overrides", "dynamic", "stream",        nullptr};
  PyObject *operands, *keys, *tensor_type, *defaults, *carves, *inplace, *run, *hooks;
  int device_type, device_id, overrides, dynamic;
  long long workspace_bytes, stream;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$O!O!O!O!(ii)LOOOOppL:Executable", const_cast<char**>(names), &PyTuple_Type,
                                   &operands, &PyDict_Type, &keys, &PyType_Type, &tensor_type, &PyTuple_Type, &defaults,
                                   &device_type, &device_id, &workspace_bytes, &carves, &inplace, &run, &hooks, &overrides,
                                   &dynamic, &stream))
    return nullptr;
  Ref self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  Executable* ex = as_executable(self.get());
  const Py_ssize_t n = PyTuple_GET_SIZE(operands);
  if (PyTuple_GET_SIZE(defaults) != n) {
    PyErr_SetString(PyExc_ValueError, "defaults and operands differ in length");
    return nullptr;
  }
  ex->specs = new (std::nothrow) OperandSpec[n];
  ex->defaults = static_cast<PyObject**>(PyMem_Calloc(n ? n : 1, sizeof(PyObject*)));
  ex->carves = new std::vector<Carve>();
  ex->inplace = new std::vector<bool>(static_cast<size_t>(n) * n, false);
  ex->outputs = new std::vector<int32_t>();
  ex->record_mutex = new std::mutex();
  if (!ex->specs || !ex->defaults) return PyErr_NoMemory();
  ex->n = static_cast<int32_t>(n);
  ex->device = {static_cast<DLDeviceType>(device_type), device_id};
  ex->workspace_bytes = workspace_bytes;
  ex->stream = stream;
  ex->overrides = overrides;
  ex->dynamic = dynamic;
  ex->keys = exact_keys(keys);
  ex->tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor_type));
  ex->run = run == Py_None ? nullptr : Py_NewRef(run);
  ex->program = ex->run ? program_of(ex->run) : nullptr;
  ex->hooks = Py_NewRef(hooks);
  ex->uids = PyTuple_New(n);
  if (!ex->keys || !ex->uids) return nullptr;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (!read_spec(PyTuple_GET_ITEM(operands, i), ex->specs[i])) return nullptr;
    if (i && ex->specs[i].uid <= ex->specs[i - 1].uid) {
      PyErr_SetString(PyExc_ValueError, "operands must ascend by uid");
      return nullptr;
    }
    PyObject* uid = PyLong_FromLongLong(ex->specs[i].uid);
    if (!uid) return nullptr;
    PyTuple_SET_ITEM(ex->uids, i, uid);
    if (ex->specs[i].has(kOutput)) ex->outputs->push_back(static_cast<int32_t>(i));
    if (ex->specs[i].has(kRagged)) ex->has_ragged = true;
    if (ex->specs[i].ragged_offset >= n) {
      PyErr_SetString(PyExc_ValueError, "ragged must be the index of another operand");
      return nullptr;
    }
    PyObject* value = PyTuple_GET_ITEM(defaults, i);
    if (value != Py_None) {
      ex->defaults[i] = Py_NewRef(value);
      ex->has_defaults = true;
    }
  }
  Ref regions(PySequence_Tuple(carves)), pairs(PySequence_Tuple(inplace));
  if (!regions || !pairs) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(regions.get()); i++) {
    Carve carve;
    if (!read_carve(PyTuple_GET_ITEM(regions.get(), i), carve)) return nullptr;
    if (carve.offset + carve.nbytes > workspace_bytes) {
      PyErr_SetString(PyExc_ValueError, "a workspace region ends past workspace_bytes");
      return nullptr;
    }
    ex->carves->push_back(carve);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs.get()); i++) {
    int output, input;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs.get(), i), "ii", &output, &input)) return nullptr;
    if (output < 0 || input < 0 || output >= n || input >= n) {
      PyErr_SetString(PyExc_ValueError, "inplace pairs are operand indices");
      return nullptr;
    }
    (*ex->inplace)[static_cast<size_t>(output) * n + input] = true;
  }
  return self.release();
}

int executable_traverse(PyObject* self, visitproc visit, void* arg) {
  Executable* ex = as_executable(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(ex->keys);
  Py_VISIT(ex->run);
  Py_VISIT(ex->hooks);
  for (int i = 0; ex->defaults && i < ex->n; i++) Py_VISIT(ex->defaults[i]);
  for (auto& place : ex->geometries)
    if (const GeometryRecord* r = place.load(std::memory_order_acquire)) Py_VISIT(r->geometry);
  for (auto& place : ex->override_sets)
    if (const OverrideRecord* r = place.load(std::memory_order_acquire)) Py_VISIT(r->geometry);
  return 0;
}

// Breaks cycles through the graph. Only unreachable executables are cleared, so no call can be inside one.
int executable_clear(PyObject* self) {
  Executable* ex = as_executable(self);
  Py_CLEAR(ex->keys);
  Py_CLEAR(ex->run);
  Py_CLEAR(ex->hooks);
  for (int i = 0; ex->defaults && i < ex->n; i++) Py_CLEAR(ex->defaults[i]);
  return 0;
}

void executable_dealloc(PyObject* self) {
  Executable* ex = as_executable(self);
  PyObject_GC_UnTrack(self);
  executable_clear(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(ex->tensor_type));
  Py_XDECREF(ex->uids);
  for (int i = 0; ex->specs && i < ex->n; i++)
    for (auto& place : ex->specs[i].seen) delete place.load();
  for (auto& place : ex->orders) delete place.load();
  for (auto& place : ex->mappings) delete place.load();
  for (auto& place : ex->disjoint) delete place.load();
  for (auto& place : ex->geometries)
    if (const GeometryRecord* r = place.load()) {
      Py_DECREF(r->geometry);
      delete r;
    }
  for (auto& place : ex->override_sets)
    if (const OverrideRecord* r = place.load()) {
      Py_DECREF(r->geometry);
      delete r;
    }
  delete[] ex->specs;
  PyMem_Free(ex->defaults);
  delete ex->carves;
  delete ex->inplace;
  delete ex->outputs;
  delete ex->record_mutex;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyObject* executable_execute(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  CallArguments a;
  if (!parse_call("execute", args, nargs, kwnames, a)) return nullptr;
  const TracerPause pause;
  return execute(as_executable(self), a);
}

PyObject* executable_bind(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  CallArguments a;
  if (!parse_call("bind", args, nargs, kwnames, a)) return nullptr;
  const TracerPause pause;
  return bound_new(as_executable(self), a);
}

PyObject* get_uids(PyObject* self, void*) { return Py_NewRef(as_executable(self)->uids); }
PyObject* get_workspace_bytes(PyObject* self, void*) { return PyLong_FromLongLong(as_executable(self)->workspace_bytes); }

#define OG_FASTCALL(f) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f))

constexpr const char* kExecuteDoc =
    "execute($self, tensor_dict, workspace=None, handle=None, override_uids=None, override_shapes=None, "
    "override_strides=None, tensor_uids=None)\n--\n\n"
    "Checks the operands against the contract and runs the plan on them.\n\n"
    "tensor_dict: {Tensor | uid | name: buffer}, or a list of buffers with tensor_uids. A key that names no tensor of this\n"
    "graph is a KeyError; None keys, None values and buffers of virtual tensors are ignored. A buffer is an array with an\n"
    "exchange table, __dlpack__, an array interface or data_ptr(); an int is an address, whose type and size are taken as\n"
    "declared, unchecked. Inputs may be read-only and may require grad; outputs may not. Negative strides are refused.\n"
    "workspace: caller-owned; any dense, writable buffer of enough bytes, whatever its data type, or an address.\n"
    "override_uids, override_shapes, override_strides: dims and strides of this call, one entry per tensor; they may exceed\n"
    "the declared ones where the buffer holds them. Asynchronous on the stream of handle. Nothing is kept after the call; a\n"
    "refused call (OperandError, KeyError, TypeError) has written nothing.";
constexpr const char* kBindDoc =
    "bind($self, tensor_dict, workspace=None, handle=None, override_uids=None, override_shapes=None, "
    "override_strides=None, tensor_uids=None)\n--\n\n"
    "Checks the operands once, as execute() does, and returns a BoundCall that keeps them: call() runs again,\n"
    "call.update({tensor: buffer}) swaps operands.";

PyMethodDef kMethods[] = {
    {"execute", OG_FASTCALL(executable_execute), METH_FASTCALL | METH_KEYWORDS, kExecuteDoc},
    {"bind", OG_FASTCALL(executable_bind), METH_FASTCALL | METH_KEYWORDS, kBindDoc},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef kGetSet[] = {
    {"uids", get_uids, nullptr, "Operand uids, ascending.", nullptr},
    {"workspace_bytes", get_workspace_bytes, nullptr, "Bytes of workspace a call needs.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(executable_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(executable_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(executable_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(executable_clear)},
    {Py_tp_methods, kMethods},
    {Py_tp_getset, kGetSet},
    {Py_tp_doc, const_cast<char*>("One compiled plan and the contract of its operands. Immutable; safe from many threads.")},
    {0, nullptr},
};

PyType_Spec kSpec = {"opgraph._native.Executable", sizeof(Executable), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};

// ---- GraphBase ----------------------------------------------------------------------------------------------------

struct GraphBase {
  PyObject_HEAD
  PyObject* executable;  // of the selected plan, or null before the build; owned
};

GraphBase* as_graph(PyObject* self) { return reinterpret_cast<GraphBase*>(self); }

int graph_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_graph(self)->executable);
  return 0;
}

int graph_clear(PyObject* self) {
  Py_CLEAR(as_graph(self)->executable);
  return 0;
}

void graph_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  graph_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyObject* get_executable(PyObject* self, void*) {
  PyObject* out;
  OG_LOCK(self);
  out = Py_NewRef(as_graph(self)->executable ? as_graph(self)->executable : Py_None);
  OG_UNLOCK();
  return out;
}

int set_executable(PyObject* self, PyObject* value, void*) {
  if (value == Py_None) value = nullptr;
  if (value && !PyObject_TypeCheck(value, ExecutableType)) {
    PyErr_SetString(PyExc_TypeError, "_executable takes an Executable or None");
    return -1;
  }
  PyObject* old;
  OG_LOCK(self);
  old = as_graph(self)->executable;
  as_graph(self)->executable = Py_XNewRef(value);
  OG_UNLOCK();
  Py_XDECREF(old);
  return 0;
}

// Not built yet: the Python side builds for the device of these operands, once, under its lock.
OG_COLD PyObject* build_for(PyObject* self, const CallArguments& a) {
  auto none = [](PyObject* p) { return p ? p : Py_None; };
  Ref ex(PyObject_CallMethod(self, "_build_for", "OOOO", none(a.tensor_dict), none(a.workspace), none(a.handle), none(a.tensor_uids)));
  if (ex && !PyObject_TypeCheck(ex.get(), ExecutableType)) {
    PyErr_SetString(PyExc_TypeError, "_build_for must return an Executable");
    return nullptr;
  }
  return ex.release();
}

inline PyObject* current(PyObject* self, const CallArguments& a) {
#ifdef Py_GIL_DISABLED
  Ref ex(get_executable(self, nullptr));
  if (ex.get() != Py_None) return ex.release();
#else
  if (OG_LIKELY(as_graph(self)->executable != nullptr)) return Py_NewRef(as_graph(self)->executable);
#endif
  return build_for(self, a);
}

PyObject* graph_execute(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  CallArguments a;
  if (OG_UNLIKELY(!parse_call("execute", args, nargs, kwnames, a))) return nullptr;
  const TracerPause pause;
  Ref ex(current(self, a));
  return OG_LIKELY(static_cast<bool>(ex)) ? execute(as_executable(ex.get()), a) : nullptr;
}

PyObject* graph_bind(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  CallArguments a;
  if (!parse_call("bind", args, nargs, kwnames, a)) return nullptr;
  const TracerPause pause;
  Ref ex(current(self, a));
  return ex ? bound_new(as_executable(ex.get()), a) : nullptr;
}

PyMethodDef kGraphMethods[] = {
    {"execute", OG_FASTCALL(graph_execute), METH_FASTCALL | METH_KEYWORDS, kExecuteDoc},
    {"bind", OG_FASTCALL(graph_bind), METH_FASTCALL | METH_KEYWORDS, kBindDoc},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef kGraphGetSet[] = {
    {"_executable", get_executable, set_executable, "Executable of the selected plan, None before the build.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kGraphSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(graph_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(graph_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(graph_clear)},
    {Py_tp_methods, kGraphMethods},
    {Py_tp_getset, kGraphGetSet},
    {Py_tp_doc, const_cast<char*>("What a graph runs through: execute() and bind() of its selected plan.")},
    {0, nullptr},
};

PyType_Spec kGraphSpec = {"opgraph._native.GraphBase", sizeof(GraphBase), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, kGraphSlots};

}  // namespace

int executable_init(PyObject* module) {
  if (!call_init()) return -1;
  ExecutableType = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &kSpec, nullptr));
  if (!ExecutableType) return -1;
  Ref graph(PyType_FromModuleAndSpec(module, &kGraphSpec, nullptr));
  if (!graph || PyModule_AddObjectRef(module, "GraphBase", graph.get()) < 0) return -1;
  return PyModule_AddObjectRef(module, "Executable", reinterpret_cast<PyObject*>(ExecutableType));
}

}  // namespace opgraph
