#include "pack/slot.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "dlpack/read.h"
#include "pack/dtype_name.h"

namespace opgraph {

PyTypeObject* SlotType = nullptr;

namespace {

// ---- life -----------------------------------------------------------------------------------------------------

// Slots of one call are dropped together and made again in the next one; with the GIL a short list saves the allocator.
#ifndef Py_GIL_DISABLED
constexpr int kFree = 64;
Slot* g_free[kFree];
int g_free_count = 0;
#endif

Slot* slot_alloc() {
#ifndef Py_GIL_DISABLED
  if (g_free_count > 0) {
    Slot* s = g_free[--g_free_count];
    (void)PyObject_Init(reinterpret_cast<PyObject*>(s), SlotType);
    return s;
  }
#endif
  return PyObject_New(Slot, SlotType);
}

void slot_dealloc(PyObject* self) {
  auto* s = reinterpret_cast<Slot*>(self);
  Py_CLEAR(s->owner);
  PyTypeObject* type = Py_TYPE(self);
#ifndef Py_GIL_DISABLED
  if (g_free_count < kFree) {
    g_free[g_free_count++] = s;
    Py_DECREF(reinterpret_cast<PyObject*>(type));
    return;
  }
#endif
  PyObject_Free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

// ---- DLPack export --------------------------------------------------------------------------------------------

// An exported tensor owns its shape and strides and the reference to what it shows, so it may outlive the slot.
template <class Managed>
struct Export {
  Managed managed;
  int64_t shape[2 * kMaxRank];
  PyObject* slot;
};

void drop_reference(PyObject* obj) {
  if (!obj || !Py_IsInitialized()) return;  // after the interpreter is gone its objects are nobody's to free
  if (PyGILState_Check()) {
    Py_DECREF(obj);
    return;
  }
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(obj);
  PyGILState_Release(state);
}

// Consumers take one export per operand and give them all back after the call: more at a time than malloc's thread cache
// holds of one size, so the GIL guards a short list of them instead.
template <class Managed>
struct ExportPool {
  static constexpr int kKept = 64;
  static inline Export<Managed>* kept[kKept];
  static inline int count = 0;
};

template <class Managed>
Export<Managed>* export_alloc() {
#ifndef Py_GIL_DISABLED
  using Pool = ExportPool<Managed>;
  if (OG_LIKELY(Pool::count > 0)) return Pool::kept[--Pool::count];
#endif
  return static_cast<Export<Managed>*>(std::malloc(sizeof(Export<Managed>)));
}

template <class Managed>
void export_deleter(Managed* m) {
  auto* e = static_cast<Export<Managed>*>(m->manager_ctx);
#ifndef Py_GIL_DISABLED
  using Pool = ExportPool<Managed>;
  if (OG_LIKELY(Py_IsInitialized() && PyGILState_Check())) {
    PyObject* slot = e->slot;
    if (OG_LIKELY(Pool::count < Pool::kKept))
      Pool::kept[Pool::count++] = e;
    else
      std::free(e);
    Py_DECREF(slot);
    return;
  }
#endif
  drop_reference(e->slot);
  std::free(e);
}

template <class Managed>
Managed* export_slot(Slot* s) {
  Export<Managed>* e = export_alloc<Managed>();
  if (!e) {
    PyErr_NoMemory();
    return nullptr;
  }
  DLTensor& t = e->managed.dl_tensor;
  t = s->t;
  for (int i = 0; i < s->layout.rank; i++) {
    e->shape[i] = s->layout.dims[i];
    e->shape[kMaxRank + i] = s->layout.strides[i];
  }
  t.shape = e->shape;
  t.strides = e->shape + kMaxRank;
  e->managed.manager_ctx = e;
  e->managed.deleter = export_deleter<Managed>;
  e->slot = Py_NewRef(reinterpret_cast<PyObject*>(s));
  return &e->managed;
}

DLManagedTensorVersioned* export_versioned(Slot* s) {
  DLManagedTensorVersioned* m = export_slot<DLManagedTensorVersioned>(s);
  if (m) {
    m->version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    m->flags = s->read_only ? DLPACK_FLAG_BITMASK_READ_ONLY : 0;
  }
  return m;
}

template <class Managed>
void capsule_destructor(PyObject* capsule, const char* name) {
  if (!PyCapsule_IsValid(capsule, name)) return;  // consumed: the consumer calls the deleter
  auto* m = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  if (m && m->deleter) m->deleter(m);
}

int absent(const Slot* s) {
  if (s->present) return 0;
  PyErr_SetString(PyExc_BufferError, "this slot is absent: the caller bound no buffer to it (see Slot.present)");
  return -1;
}

PyObject* slot_dlpack(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  auto* s = reinterpret_cast<Slot*>(self);
  if (absent(s)) return nullptr;
  if (nargs) {
    PyErr_SetString(PyExc_TypeError, "__dlpack__ takes keyword arguments only");
    return nullptr;
  }
  bool versioned = false;
  const Py_ssize_t nkw = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < nkw; i++) {
    PyObject *key = PyTuple_GET_ITEM(kwnames, i), *value = args[i];
    if (PyUnicode_CompareWithASCIIString(key, "max_version") == 0) {
      if (value == Py_None) continue;
      if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 2) {
        PyErr_SetString(PyExc_TypeError, "max_version must be a tuple (major, minor)");
        return nullptr;
      }
      const long major = PyLong_AsLong(PyTuple_GET_ITEM(value, 0));
      if (major == -1 && PyErr_Occurred()) return nullptr;
      versioned = major >= DLPACK_MAJOR_VERSION;
    } else if (PyUnicode_CompareWithASCIIString(key, "dl_device") == 0) {
      if (value == Py_None) continue;
      int type, id;
      if (!PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "dl_device must be a tuple (device_type, device_id)");
        return nullptr;
      }
      if (!PyArg_ParseTuple(value, "ii", &type, &id)) return nullptr;
      if (type != s->t.device.device_type || id != s->t.device.device_id) {
        PyErr_Format(PyExc_BufferError, "the slot lies on device (%d, %d); it is not copied to (%d, %d)",
                     static_cast<int>(s->t.device.device_type), s->t.device.device_id, type, id);
        return nullptr;
      }
    } else if (PyUnicode_CompareWithASCIIString(key, "copy") == 0) {
      if (value == Py_True) {
        PyErr_SetString(PyExc_BufferError, "a slot is a view of the caller's buffer and is not copied");
        return nullptr;
      }
    } else if (PyUnicode_CompareWithASCIIString(key, "stream") != 0) {
      PyErr_Format(PyExc_TypeError, "__dlpack__ got an unexpected keyword argument %R", key);
      return nullptr;
    }
    // `stream`: the slot is handed out inside a call whose work runs on one stream; there is nothing to wait for.
  }
  PyObject* capsule = nullptr;
  if (versioned) {
    DLManagedTensorVersioned* m = export_versioned(s);
    if (!m) return nullptr;
    capsule = PyCapsule_New(m, "dltensor_versioned",
                            [](PyObject* c) { capsule_destructor<DLManagedTensorVersioned>(c, "dltensor_versioned"); });
    if (!capsule) m->deleter(m);
    return capsule;
  }
  if (s->locked) {
    PyErr_SetString(PyExc_BufferError,
                    "the caller's buffer is read-only, which a legacy capsule cannot say; ask with max_version=(1, 0)");
    return nullptr;
  }
  DLManagedTensor* m = export_slot<DLManagedTensor>(s);
  if (!m) return nullptr;
  capsule = PyCapsule_New(m, "dltensor", [](PyObject* c) { capsule_destructor<DLManagedTensor>(c, "dltensor"); });
  if (!capsule) m->deleter(m);
  return capsule;
}

PyObject* slot_dlpack_device(PyObject* self, PyObject*) {
  auto* s = reinterpret_cast<Slot*>(self);
  return Py_BuildValue("(ii)", static_cast<int>(s->t.device.device_type), s->t.device.device_id);
}

// ---- exchange table -------------------------------------------------------------------------------------------

int table_owning(void* obj, DLManagedTensorVersioned** out) {
  auto* s = static_cast<Slot*>(obj);
  if (absent(s)) return -1;
  *out = export_versioned(s);
  return *out ? 0 : -1;
}

int table_borrow(void* obj, DLTensor* out) {
  auto* s = static_cast<Slot*>(obj);
  if (absent(s)) return -1;
  *out = s->t;
  return 0;
}

// Slots are views of callers' buffers: there is no memory of ours to allocate from.
int table_allocate(DLTensor*, DLManagedTensorVersioned**, void* context, void (*fail)(void*, const char*, const char*)) {
  fail(context, "BufferError", "opgraph slots do not allocate memory");
  return -1;
}

struct Imported {
  DLManagedTensorVersioned* managed;
};

void imported_destructor(PyObject* capsule) {
  auto* m = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "opgraph.imported"));
  if (m && m->deleter) m->deleter(m);
}

// What a kernel returns through the table comes back as a slot that owns it.
int table_import(DLManagedTensorVersioned* m, void** out) {
  const DLTensor& t = m->dl_tensor;
  if (t.ndim < 0 || t.ndim > kMaxRank || (t.ndim > 0 && !t.shape)) {
    PyErr_Format(PyExc_BufferError, "a slot has at most %d axes and a shape, the tensor says %d axes", kMaxRank, t.ndim);
    return -1;
  }
  Layout layout;
  layout.rank = t.ndim;
  for (int i = 0; i < t.ndim; i++) layout.dims[i] = t.shape[i];
  if (t.strides)
    for (int i = 0; i < t.ndim; i++) layout.strides[i] = t.strides[i];
  else
    c_order(t.ndim, layout.dims, layout.strides);
  Ref owner(PyCapsule_New(m, "opgraph.imported", imported_destructor));
  if (!owner) return -1;
  const int64_t units = span_elements(layout.rank, layout.dims, layout.strides);
  Slot* s = slot_new(t.data ? static_cast<char*>(t.data) + t.byte_offset : nullptr, layout, t.dtype, t.device,
                     units * ((t.dtype.bits * t.dtype.lanes + 7) / 8), (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0,
                     owner.get());
  if (!s) return -1;
  *out = s;
  return 0;
}

// Inside a call the work stream is the call's; outside one the default stream is all a slot can name.
int table_stream(DLDeviceType, int32_t, void** out) {
  *out = nullptr;
  return 0;
}

const DLPackExchangeAPI kTable = {
    {{DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION}, nullptr},
    table_allocate,
    table_owning,
    table_import,
    table_borrow,
    table_stream,
};

// ---- attributes -----------------------------------------------------------------------------------------------

PyObject* ints(const int64_t* values, int n) {
  PyObject* out = PyTuple_New(n);
  if (!out) return nullptr;
  for (int i = 0; i < n; i++) {
    PyObject* v = PyLong_FromLongLong(values[i]);
    if (!v) {
      Py_DECREF(out);
      return nullptr;
    }
    PyTuple_SET_ITEM(out, i, v);
  }
  return out;
}

Slot* as_slot(PyObject* self) { return reinterpret_cast<Slot*>(self); }

PyObject* get_ptr(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(as_slot(self)->t.data));
}
PyObject* get_shape(PyObject* self, void*) { return ints(as_slot(self)->layout.dims, as_slot(self)->layout.rank); }
PyObject* get_strides(PyObject* self, void*) { return ints(as_slot(self)->layout.strides, as_slot(self)->layout.rank); }
PyObject* get_dtype(PyObject* self, void*) {
  char name[32];
  dtype_name(as_slot(self)->t.dtype, name);
  return PyUnicode_FromString(name);
}
PyObject* get_dlpack_dtype(PyObject* self, void*) {
  const DLDataType& d = as_slot(self)->t.dtype;
  return Py_BuildValue("(iii)", d.code, d.bits, d.lanes);
}
PyObject* get_nbytes(PyObject* self, void*) { return PyLong_FromLongLong(as_slot(self)->nbytes); }
PyObject* get_present(PyObject* self, void*) { return PyBool_FromLong(as_slot(self)->present); }
PyObject* get_read_only(PyObject* self, void*) { return PyBool_FromLong(as_slot(self)->read_only); }

Slot* derive(Slot* s, const Layout& layout) {
  Slot* out = slot_new(s->t.data, layout, s->t.dtype, s->t.device, s->nbytes, s->read_only, s->owner);
  if (out) out->present = s->present, out->locked = s->locked;
  return out;
}

PyObject* slot_permute(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Slot* s = as_slot(self);
  const int rank = s->layout.rank;
  Layout layout;
  layout.rank = rank;
  unsigned used = 0;
  if (nargs != rank) {
    PyErr_Format(PyExc_ValueError, "permute of a slot with %d axes got %zd", rank, nargs);
    return nullptr;
  }
  for (int i = 0; i < rank; i++) {
    const long axis = PyLong_AsLong(args[i]);
    if (axis == -1 && PyErr_Occurred()) return nullptr;
    if (axis < 0 || axis >= rank || (used & (1u << axis))) {
      PyErr_Format(PyExc_ValueError, "permute needs each axis 0..%d once; axis %ld does not fit", rank - 1, axis);
      return nullptr;
    }
    used |= 1u << axis;
    layout.dims[i] = s->layout.dims[axis];
    layout.strides[i] = s->layout.strides[axis];
  }
  return reinterpret_cast<PyObject*>(derive(s, layout));
}

// Splits and merges axes without moving elements; false when that would need a copy.
bool reshape_layout(const Layout& from, Layout& to) {
  int64_t total = 1, want = 1;
  for (int i = 0; i < from.rank; i++) total *= from.dims[i];
  for (int i = 0; i < to.rank; i++) {
    if (to.dims[i] && want > INT64_MAX / to.dims[i]) return false;
    want *= to.dims[i];
  }
  if (total != want) return false;
  if (total == 0) {
    c_order(to.rank, to.dims, to.strides);
    return true;
  }
  int64_t dims[kMaxRank], strides[kMaxRank];
  int n = 0;
  for (int i = 0; i < from.rank; i++)
    if (from.dims[i] != 1) dims[n] = from.dims[i], strides[n] = from.strides[i], n++;
  int oi = 0, oj = 1, ni = 0, nj = 1;
  while (ni < to.rank && oi < n) {
    int64_t have = dims[oi], need = to.dims[ni];
    while (have != need) {
      if (need < have) {
        if (nj >= to.rank) return false;
        need *= to.dims[nj++];
      } else {
        if (oj >= n) return false;
        have *= dims[oj++];
      }
    }
    for (int k = oi; k < oj - 1; k++)
      if (strides[k] != dims[k + 1] * strides[k + 1]) return false;
    to.strides[nj - 1] = strides[oj - 1];
    for (int k = nj - 1; k > ni; k--) to.strides[k - 1] = to.strides[k] * to.dims[k];
    ni = nj++;
    oi = oj++;
  }
  const int64_t last = ni > 0 ? to.strides[ni - 1] : 1;
  for (int k = ni; k < to.rank; k++) to.strides[k] = last;  // only extents of 1 are left
  return true;
}

PyObject* slot_reshape(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  Slot* s = as_slot(self);
  Layout layout;
  if (nargs > kMaxRank) {
    PyErr_Format(PyExc_ValueError, "a slot has at most %d axes, reshape got %zd", kMaxRank, nargs);
    return nullptr;
  }
  layout.rank = static_cast<int32_t>(nargs);
  for (Py_ssize_t i = 0; i < nargs; i++) {
    const long long extent = PyLong_AsLongLong(args[i]);
    if (extent == -1 && PyErr_Occurred()) return nullptr;
    if (extent < 0) {
      PyErr_SetString(PyExc_ValueError, "reshape takes extents of 0 or more");
      return nullptr;
    }
    layout.dims[i] = extent;
  }
  if (!reshape_layout(s->layout, layout)) {
    Ref have(get_shape(self, nullptr)), strides(get_strides(self, nullptr)), want(ints(layout.dims, layout.rank));
    if (have && strides && want)
      PyErr_Format(PyExc_ValueError, "reshape of shape %R, strides %R to %R would need a copy", have.get(), strides.get(),
                   want.get());
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(derive(s, layout));
}

PyObject* slot_is_contiguous(PyObject* self, PyObject*) {
  const Layout& l = as_slot(self)->layout;
  int64_t step = 1;
  bool dense = true;
  for (int i = l.rank - 1; i >= 0; i--) {
    if (l.dims[i] == 0) Py_RETURN_TRUE;
    dense = dense && (l.dims[i] == 1 || l.strides[i] == step);
    step *= l.dims[i];
  }
  return PyBool_FromLong(dense);
}

PyObject* slot_numpy(PyObject* self, PyObject*) {
  Slot* s = as_slot(self);
  if (absent(s)) return nullptr;
  if (!is_host(s->t.device)) {
    PyErr_Format(PyExc_BufferError, "the slot lies on device (%d, %d); NumPy reads host memory only",
                 static_cast<int>(s->t.device.device_type), s->t.device.device_id);
    return nullptr;
  }
  return numpy_view(s->t.data, s->layout, s->t.dtype, !s->read_only, self);
}

PyObject* slot_repr(PyObject* self) {
  Slot* s = as_slot(self);
  if (!s->present) return PyUnicode_FromString("<opgraph.Slot absent>");
  Ref shape(get_shape(self, nullptr)), strides(get_strides(self, nullptr));
  char name[32];
  dtype_name(s->t.dtype, name);
  if (!shape || !strides) return nullptr;
  return PyUnicode_FromFormat("<opgraph.Slot %s shape=%R strides=%R at %p on device (%d, %d)>", name, shape.get(),
                              strides.get(), s->t.data, static_cast<int>(s->t.device.device_type), s->t.device.device_id);
}

PyObject* refuse_copy(PyObject* self, PyObject*) {
  PyErr_Format(PyExc_TypeError, "%s cannot be copied or pickled: it shows memory of one call", Py_TYPE(self)->tp_name);
  return nullptr;
}

PyMethodDef kMethods[] = {
    {"__dlpack__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(slot_dlpack)),
     METH_FASTCALL | METH_KEYWORDS,
     "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
     "A DLPack capsule: versioned when max_version allows, legacy otherwise. It may outlive the slot."},
    {"__dlpack_device__", slot_dlpack_device, METH_NOARGS, "__dlpack_device__($self)\n--\n\n(device_type, device_id)."},
    {"permute", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(slot_permute)), METH_FASTCALL,
     "permute($self, *axes)\n--\n\nA slot over the same memory with its axes in another order."},
    {"reshape", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(slot_reshape)), METH_FASTCALL,
     "reshape($self, *dims)\n--\n\nA slot over the same memory with other extents; ValueError where a copy would be needed."},
    {"is_contiguous", slot_is_contiguous, METH_NOARGS, "is_contiguous($self)\n--\n\nTrue when the elements lie in C order."},
    {"numpy", slot_numpy, METH_NOARGS,
     "numpy($self)\n--\n\nA NumPy view (read-only for inputs). BufferError on a device. Sub-byte pairs show as uint8."},
    {"__reduce__", refuse_copy, METH_NOARGS, nullptr},
    {"__copy__", refuse_copy, METH_NOARGS, nullptr},
    {"__deepcopy__", refuse_copy, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef kGetSet[] = {
    {"ptr", get_ptr, nullptr, "Address of the first element, an int.", nullptr},
    {"shape", get_shape, nullptr, "Extents in the declared axis order, storage units.", nullptr},
    {"strides", get_strides, nullptr, "Strides in storage units, declared axis order.", nullptr},
    {"dtype", get_dtype, nullptr, "Name of the dtype, e.g. 'float32'.", nullptr},
    {"dlpack_dtype", get_dlpack_dtype, nullptr, "DLPack (code, bits, lanes).", nullptr},
    {"device", reinterpret_cast<getter>(reinterpret_cast<void (*)()>(slot_dlpack_device)), nullptr,
     "DLPack (device_type, device_id).", nullptr},
    {"nbytes", get_nbytes, nullptr, "Bytes from the first to past the last element; the true size of a ragged operand.", nullptr},
    {"present", get_present, nullptr, "False for an optional operand the caller bound no buffer to.", nullptr},
    {"read_only", get_read_only, nullptr, "True for inputs.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(slot_dealloc)},
    {Py_tp_methods, kMethods},
    {Py_tp_getset, kGetSet},
    {Py_tp_repr, reinterpret_cast<void*>(slot_repr)},
    {Py_tp_doc, const_cast<char*>("One operand or workspace region of a call, as engines and kernels receive it.\n\n"
                                  "A DLPack producer (exchange table, __dlpack__). Valid as long as it is held: it keeps\n"
                                  "the caller's buffer alive; a bare address is the caller's to keep.")},
    {0, nullptr},
};

PyType_Spec kSpec = {"opgraph._native.Slot", sizeof(Slot), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, kSlots};

}  // namespace

Slot* slot_new(void* data, const Layout& layout, DLDataType dtype, DLDevice device, int64_t nbytes, bool read_only,
               PyObject* owner) {
  Slot* s = slot_alloc();
  if (!s) return nullptr;
  s->layout = layout;
  s->t = {data, device, layout.rank, dtype, s->layout.dims, s->layout.strides, 0};
  s->nbytes = nbytes;
  s->present = true;
  s->read_only = read_only;
  s->locked = false;
  s->owner = Py_XNewRef(owner);
  return s;
}

int slot_init(PyObject* module) {
  SlotType = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &kSpec, nullptr));
  if (!SlotType) return -1;
  Ref table(PyCapsule_New(const_cast<DLPackExchangeAPI*>(&kTable), "dlpack_exchange_api", nullptr));
  if (!table) return -1;
  auto* type = reinterpret_cast<PyObject*>(SlotType);
  if (PyObject_SetAttrString(type, "__dlpack_c_exchange_api__", table.get()) < 0) return -1;
  return PyModule_AddObjectRef(module, "Slot", type);
}

}  // namespace opgraph
