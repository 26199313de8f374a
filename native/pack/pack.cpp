#include "pack/pack.h"

#include <new>

namespace opgraph {

PyTypeObject* VariantPackType = nullptr;

namespace {

VariantPack* as_pack(PyObject* self) { return reinterpret_cast<VariantPack*>(self); }

// Slots are no containers to the collector; what they keep is the pack's own while nobody else holds the slot.
int visit_owner(PyObject* slot, visitproc visit, void* arg) {
  if (slot && Py_REFCNT(slot) == 1) Py_VISIT(reinterpret_cast<Slot*>(slot)->owner);
  return 0;
}

int pack_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* p = as_pack(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<PyObject*>(p->ex));
  Py_VISIT(p->geometry);
  for (Py_ssize_t i = 0; i < Py_SIZE(self); i++)
    if (const int r = visit_owner(reinterpret_cast<PyObject*>(p->slots[i]), visit, arg)) return r;
  if (const int r = visit_owner(p->workspace, visit, arg)) return r;
  if (Py_REFCNT(p->carves) == 1)
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p->carves); i++)
      if (const int r = visit_owner(PyTuple_GET_ITEM(p->carves, i), visit, arg)) return r;
  return 0;
}

void pack_dealloc(PyObject* self) {
  auto* p = as_pack(self);
  PyObject_GC_UnTrack(self);
  for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) Py_XDECREF(reinterpret_cast<PyObject*>(p->slots[i]));
  Py_XDECREF(p->workspace);
  Py_XDECREF(p->carves);
  Py_XDECREF(p->geometry);
  Py_XDECREF(reinterpret_cast<PyObject*>(p->ex));
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

Py_ssize_t pack_length(PyObject* self) { return Py_SIZE(self); }

PyObject* pack_item(PyObject* self, Py_ssize_t i) {
  if (i < 0 || i >= Py_SIZE(self)) {
    PyErr_Format(PyExc_IndexError, "operand %zd of a pack with %zd", i, Py_SIZE(self));
    return nullptr;
  }
  return Py_NewRef(reinterpret_cast<PyObject*>(as_pack(self)->slots[i]));
}

PyObject* or_none(PyObject* p) { return Py_NewRef(p ? p : Py_None); }

PyObject* get_uids(PyObject* self, void*) { return Py_NewRef(as_pack(self)->ex->uids); }
PyObject* get_workspace(PyObject* self, void*) { return or_none(as_pack(self)->workspace); }
PyObject* get_carves(PyObject* self, void*) { return Py_NewRef(as_pack(self)->carves); }
PyObject* get_geometry(PyObject* self, void*) { return or_none(as_pack(self)->geometry); }
PyObject* get_stream(PyObject* self, void*) { return PyLong_FromLongLong(as_pack(self)->stream); }
PyObject* get_device(PyObject* self, void*) {
  const DLDevice d = as_pack(self)->ex->device;
  return Py_BuildValue("(ii)", static_cast<int>(d.device_type), d.device_id);
}

PyObject* pack_remaining(PyObject* self, PyObject*) {
  auto* p = as_pack(self);
  if (!p->workspace) {
    PyErr_SetString(PyExc_ValueError, "remaining(): this call has no workspace");
    return nullptr;
  }
  if (p->workspace_size < 0) {
    PyErr_SetString(PyExc_ValueError,
                    "remaining(): the workspace is a bare address, so its size is unknown; pass an array instead");
    return nullptr;
  }
  auto* whole = reinterpret_cast<Slot*>(p->workspace);
  int64_t used = p->ex->workspace_bytes;
  used = (used + 255) / 256 * 256;
  if (used > p->workspace_size) used = p->workspace_size;
  Layout rest;
  rest.rank = 1;
  rest.dims[0] = p->workspace_size - used;
  rest.strides[0] = 1;
  return reinterpret_cast<PyObject*>(slot_new(static_cast<char*>(whole->t.data) + used, rest, {kDLUInt, 8, 1}, whole->t.device,
                                              rest.dims[0], false, whole->owner));
}

PyObject* refuse_copy(PyObject* self, PyObject*) {
  PyErr_Format(PyExc_TypeError, "%s cannot be copied or pickled: it shows memory of one call", Py_TYPE(self)->tp_name);
  return nullptr;
}

PyMethodDef kMethods[] = {
    {"remaining", pack_remaining, METH_NOARGS,
     "remaining($self)\n--\n\nA uint8 slot over the workspace behind what the plan carves; ValueError when its size is unknown."},
    {"__reduce__", refuse_copy, METH_NOARGS, nullptr},
    {"__copy__", refuse_copy, METH_NOARGS, nullptr},
    {"__deepcopy__", refuse_copy, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef kGetSet[] = {
    {"uids", get_uids, nullptr, "Operand uids, ascending: the order of the slots.", nullptr},
    {"workspace", get_workspace, nullptr, "Slot over the whole workspace, or None.", nullptr},
    {"carves", get_carves, nullptr, "One slot per workspace region the plan declared.", nullptr},
    {"geometry", get_geometry, nullptr, "Live geometry under overrides, or None: everything as declared.", nullptr},
    {"stream", get_stream, nullptr, "Raw stream of the call; 0 is the legacy default stream.", nullptr},
    {"device", get_device, nullptr, "DLPack (device_type, device_id) of the plan.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(pack_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(pack_traverse)},
    {Py_tp_methods, kMethods},
    {Py_tp_getset, kGetSet},
    {Py_sq_length, reinterpret_cast<void*>(pack_length)},
    {Py_sq_item, reinterpret_cast<void*>(pack_item)},
    {Py_tp_doc, const_cast<char*>("All operands of one call, ascending by uid, with the workspace and what the plan carves\n"
                                  "from it. `pack[i]` is the Slot of operand i.")},
    {0, nullptr},
};

PyType_Spec kSpec = {"opgraph._native.VariantPack", offsetof(VariantPack, slots), sizeof(Slot*),
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, kSlots};

}  // namespace

namespace {

void held_destructor(PyObject* capsule) {
  auto* held = static_cast<Holding*>(PyCapsule_GetPointer(capsule, "opgraph.held"));
  release(*held);
  delete held;
}

// What a producer handed out for this call may be all that keeps its memory: a slot, or an export of one, that outlives
// the call has to own it. Moves it into an object; `owner` is what a slot keeps, null for a bare address.
bool own(Holding& holding, PyObject* value, PyObject*& owner) {
  owner = PyLong_CheckExact(value) ? nullptr : value;
  if (holding.hold == Hold::nothing) {
    // Not the slot itself: slots of slots of slots would be freed as deep as they are nested.
    if (Py_TYPE(value) == SlotType) owner = reinterpret_cast<Slot*>(value)->owner;
    return true;
  }
  if (holding.hold != Hold::object) {
    auto* held = new (std::nothrow) Holding(holding);
    PyObject* capsule = held ? PyCapsule_New(held, "opgraph.held", held_destructor) : PyErr_NoMemory();
    if (!capsule) {
      delete held;
      return false;
    }
    holding.hold = Hold::object;
    holding.object = capsule;
  }
  owner = holding.object;
  return true;
}

}  // namespace

VariantPack* pack_new(Call& call) {
  Executable* ex = call.ex;
  auto* p = PyObject_GC_NewVar(VariantPack, VariantPackType, ex->n);
  if (!p) return nullptr;
  p->ex = reinterpret_cast<Executable*>(Py_NewRef(reinterpret_cast<PyObject*>(ex)));
  p->workspace = p->carves = nullptr;
  p->geometry = Py_XNewRef(call.geometry);
  p->stream = call.stream;
  p->workspace_size = call.workspace_size;
  for (int i = 0; i < ex->n; i++) p->slots[i] = nullptr;
  Ref whole(reinterpret_cast<PyObject*>(p));
  static const Layout kNothing{};
  for (int i = 0; i < ex->n; i++) {
    Operand& op = call.operands[i];
    const OperandSpec& spec = ex->specs[i];
    if (!op.value) {
      p->slots[i] = slot_new(nullptr, kNothing, spec.dtype, ex->device, 0, true, nullptr);
      if (!p->slots[i]) return nullptr;
      p->slots[i]->present = false;
      continue;
    }
    void* data = op.reading.t.data;
    PyObject* owner;
    Ref bytes;
    if (spec.has(kByValue)) {
      // The value was copied into the call; the slot may outlive the call, so it gets bytes of its own.
      bytes = Ref(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(op.scalar), sizeof op.scalar));
      if (!bytes) return nullptr;
      data = PyBytes_AS_STRING(bytes.get());
      owner = bytes.get();
    } else if (!own(op.reading, op.value, owner)) {
      return nullptr;
    }
    const DLDevice device = spec.has(kByValue) ? DLDevice{kDLCPU, 0} : ex->device;
    p->slots[i] = slot_new(data, *op.layout, spec.dtype, device, op.nbytes, !spec.has(kOutput), owner);
    if (!p->slots[i]) return nullptr;
    p->slots[i]->locked = op.reading.read_only;
  }
  if (call.workspace) {
    Layout bytes;
    bytes.rank = 1;
    bytes.dims[0] = call.workspace_size < 0 ? ex->workspace_bytes : call.workspace_size;
    bytes.strides[0] = 1;
    PyObject* owner;
    if (!own(call.workspace_reading, call.workspace, owner)) return nullptr;
    p->workspace = reinterpret_cast<PyObject*>(slot_new(call.workspace_reading.t.data, bytes, {kDLUInt, 8, 1}, ex->device,
                                                        bytes.dims[0], false, owner));
    if (!p->workspace) return nullptr;
  }
  const auto& carves = *ex->carves;
  p->carves = PyTuple_New(p->workspace ? static_cast<Py_ssize_t>(carves.size()) : 0);
  if (!p->carves) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p->carves); i++) {
    const Carve& c = carves[i];
    auto* owner = reinterpret_cast<Slot*>(p->workspace)->owner;
    Slot* s = slot_new(static_cast<char*>(call.workspace_reading.t.data) + c.offset, c.layout, c.dtype, ex->device, c.nbytes,
                       false, owner);
    if (!s) return nullptr;
    PyTuple_SET_ITEM(p->carves, i, reinterpret_cast<PyObject*>(s));
  }
  PyObject_GC_Track(reinterpret_cast<PyObject*>(p));  // complete: the collector, and who asks it, see no half of it
  return reinterpret_cast<VariantPack*>(whole.release());
}

int pack_init(PyObject* module) {
  VariantPackType = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &kSpec, nullptr));
  if (!VariantPackType) return -1;
  return PyModule_AddObjectRef(module, "VariantPack", reinterpret_cast<PyObject*>(VariantPackType));
}

}  // namespace opgraph
