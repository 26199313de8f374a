#include "pack/bound.h"

#include <structmember.h>

#include "pack/pack.h"
#include "program/python.h"
#include "pack/tracing.h"

namespace opgraph {
namespace {

PyTypeObject* BoundCallType = nullptr;
PyTypeObject* StateType = nullptr;

// One set of bound operands: immutable, replaced as a whole by update(), so a call in another thread keeps the set it
// started with. Owns the exports, hence the memory, until the last call that uses it is over.
struct State {
  PyObject_HEAD
  Call call;
  PyObject* pack;  // VariantPack for a Python step, else null; owned
  CallArguments arguments;  // what update() starts from: everything but the operands, which it takes from `call`
  PyObject* kept[5];        // owns what `arguments` points to
};

struct BoundCall {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* state;       // owned
  Executable* ex;        // owned
  PyObject* run;         // borrowed from ex: null for the empty native step
  PyObject* weakrefs;
};

BoundCall* as_bound(PyObject* self) { return reinterpret_cast<BoundCall*>(self); }
State* as_state(PyObject* self) { return reinterpret_cast<State*>(self); }

int state_traverse(PyObject* self, visitproc visit, void* arg) {
  State* s = as_state(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(s->pack);
  Py_VISIT(reinterpret_cast<PyObject*>(s->call.ex));
  for (int i = 0; s->call.operands && i < s->call.ex->n; i++) {
    const Operand& op = s->call.operands[i];
    Py_VISIT(op.value);
    if (op.reading.hold == Hold::object) Py_VISIT(op.reading.object);
  }
  if (s->call.workspace) {
    Py_VISIT(s->call.workspace);
    if (s->call.workspace_reading.hold == Hold::object) Py_VISIT(s->call.workspace_reading.object);
  }
  for (PyObject* p : s->kept) Py_VISIT(p);
  return 0;
}

void state_dealloc(PyObject* self) {
  State* s = as_state(self);
  PyObject_GC_UnTrack(self);
  Py_XDECREF(s->pack);
  if (s->call.operands) {
    finish_call(s->call);
    PyMem_Free(s->call.operands);
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(s->call.ex));
  for (PyObject* p : s->kept) Py_XDECREF(p);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyType_Slot kStateSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(state_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(state_traverse)},
    {0, nullptr},
};

PyType_Spec kStateSpec = {"opgraph._native._BoundState", sizeof(State), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, kStateSlots};

// An override list as tuples of our own: a later change of the caller's lists must not reach update(). What is no list
// is left to the check of the call.
PyObject* frozen(PyObject* list) {
  if (!list || (!PyList_Check(list) && !PyTuple_Check(list))) return Py_XNewRef(list);
  Ref outer(PySequence_Tuple(list));
  const Py_ssize_t n = outer ? PyTuple_GET_SIZE(outer.get()) : 0;
  Ref copy(outer ? PyTuple_New(n) : nullptr);
  for (Py_ssize_t i = 0; copy && i < n; i++) {
    PyObject* item = PyTuple_GET_ITEM(outer.get(), i);
    PyObject* extents = PyLong_Check(item) || PyUnicode_Check(item) ? nullptr : PySequence_Tuple(item);
    if (PyErr_Occurred()) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) return nullptr;
      PyErr_Clear();
    }
    PyTuple_SET_ITEM(copy.get(), i, extents ? extents : Py_NewRef(item));
  }
  return copy.release();
}

PyObject* state_new(Executable* ex, CallArguments a) {
  State* s = PyObject_GC_New(State, StateType);
  if (!s) return nullptr;
  s->call = Call{};
  s->call.ex = reinterpret_cast<Executable*>(Py_NewRef(reinterpret_cast<PyObject*>(ex)));
  s->call.owning = true;
  s->call.operands = nullptr;
  s->pack = nullptr;
  for (PyObject*& p : s->kept) p = nullptr;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(s));
  Ref self(reinterpret_cast<PyObject*>(s));
  s->kept[0] = Py_XNewRef(a.workspace);
  s->kept[1] = Py_XNewRef(a.handle);
  int k = 2;
  for (PyObject** list : {&a.override_uids, &a.override_shapes, &a.override_strides}) {
    s->kept[k] = frozen(*list);
    if (*list && !s->kept[k]) return nullptr;
    *list = s->kept[k++];
  }
  s->arguments = a;
  s->arguments.tensor_dict = s->arguments.tensor_uids = nullptr;
  s->call.operands = static_cast<Operand*>(PyMem_Malloc(sizeof(Operand) * (ex->n ? ex->n : 1)));
  if (!s->call.operands) return PyErr_NoMemory();
  if (!prepare_call(s->call, a)) return nullptr;
  if (ex->run && !ex->program && !(s->pack = reinterpret_cast<PyObject*>(pack_new(s->call)))) return nullptr;
  return self.release();
}

PyObject* bound_call(PyObject* self, PyObject* const*, size_t nargsf, PyObject* kwnames) {
  BoundCall* b = as_bound(self);
  if (OG_UNLIKELY(PyVectorcall_NARGS(nargsf) || (kwnames && PyTuple_GET_SIZE(kwnames)))) {
    PyErr_SetString(PyExc_TypeError, "a bound call takes no arguments; swap operands with update({tensor: buffer})");
    return nullptr;
  }
  if (!b->run) Py_RETURN_NONE;  // the empty native step
  const TracerPause pause;
  PyObject* state;
  OG_LOCK(self);
  state = Py_NewRef(b->state);
  OG_UNLOCK();
  Ref held(state);
  if (b->ex->program) {
    if (!run_program(*b->ex->program, as_state(state)->call)) return nullptr;
    Py_RETURN_NONE;
  }
  Ref result(PyObject_CallOneArg(b->run, as_state(state)->pack));
  if (!result) return nullptr;
  Py_RETURN_NONE;
}

// The operands of `old`, by uid, as a mapping that update() overlays.
PyObject* bound_operands(State* old) {
  Ref mapping(PyDict_New());
  if (!mapping) return nullptr;
  for (int i = 0; i < old->call.ex->n; i++)
    if (PyObject* value = old->call.operands[i].value)
      if (PyDict_SetItem(mapping.get(), PyTuple_GET_ITEM(old->call.ex->uids, i), value) < 0) return nullptr;
  return mapping.release();
}

// `changes` with its keys resolved to uids; entries that are no operands are dropped, as execute() does.
bool overlay(Executable* ex, PyObject* mapping, PyObject* changes) {
  Ref items(PyMapping_Items(changes));
  if (!items) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_TypeError)) return false;
    PyErr_Clear();
    return fail(ex, Rule::mapping_type, -1, -1, nullptr, changes);
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); i++) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) return fail(ex, Rule::mapping_type, -1, -1, nullptr, changes);
    PyObject *key = PyTuple_GET_ITEM(item, 0), *value = PyTuple_GET_ITEM(item, 1);
    if (key == Py_None || value == Py_None) continue;
    Ref index(PyObject_CallMethod(ex->hooks, "key", "(O)", key));
    if (!index) return false;
    const long at = PyLong_AsLong(index.get());
    if (at == -1 && PyErr_Occurred()) return false;
    if (at < 0) continue;
    if (PyDict_SetItem(mapping, PyTuple_GET_ITEM(ex->uids, at), value) < 0) return false;
  }
  return true;
}

PyObject* bound_update(PyObject* self, PyObject* changes) {
  const TracerPause pause;
  BoundCall* b = as_bound(self);
  Ref old;
  OG_LOCK(self);
  old = Ref(Py_NewRef(b->state));
  OG_UNLOCK();
  Ref mapping(bound_operands(as_state(old.get())));
  if (!mapping || !overlay(b->ex, mapping.get(), changes)) return nullptr;
  CallArguments a = as_state(old.get())->arguments;
  a.tensor_dict = mapping.get();
  PyObject* fresh = state_new(b->ex, a);
  if (!fresh) return nullptr;  // refused: the call keeps the operands it had
  PyObject* previous;
  OG_LOCK(self);
  previous = b->state;
  b->state = fresh;
  OG_UNLOCK();
  Py_DECREF(previous);
  Py_RETURN_NONE;
}

PyObject* refuse_copy(PyObject* self, PyObject*) {
  PyErr_Format(PyExc_TypeError, "%s cannot be copied or pickled: it holds buffers of this process; bind again instead",
               Py_TYPE(self)->tp_name);
  return nullptr;
}

int bound_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_bound(self)->state);
  Py_VISIT(reinterpret_cast<PyObject*>(as_bound(self)->ex));
  return 0;
}

int bound_clear(PyObject* self) {
  as_bound(self)->run = nullptr;
  Py_CLEAR(as_bound(self)->state);
  return 0;
}

void bound_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (as_bound(self)->weakrefs) PyObject_ClearWeakRefs(self);
  bound_clear(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(as_bound(self)->ex));
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyMethodDef kMethods[] = {
    {"update", bound_update, METH_O,
     "update($self, changes)\n--\n\nSwaps operands: {Tensor | uid | name: buffer}. Checked like execute(); a refused update\n"
     "leaves the call as it was. A call running in another thread finishes on the operands it started with."},
    {"__reduce__", refuse_copy, METH_NOARGS, nullptr},
    {"__copy__", refuse_copy, METH_NOARGS, nullptr},
    {"__deepcopy__", refuse_copy, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef kMembers[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(BoundCall, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(BoundCall, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(bound_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(bound_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(bound_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, kMethods},
    {Py_tp_members, kMembers},
    {Py_tp_doc, const_cast<char*>("A call with its operands bound: call() runs it, call.update({tensor: buffer}) swaps operands.\n\n"
                                  "Keeps the operands (owning exports) and the workspace until it is dropped.")},
    {0, nullptr},
};

PyType_Spec kSpec = {"opgraph._native.BoundCall", sizeof(BoundCall), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                     kSlots};

}  // namespace

PyObject* bound_new(Executable* ex, const CallArguments& a) {
  Ref state(state_new(ex, a));
  if (!state) return nullptr;
  BoundCall* b = PyObject_GC_New(BoundCall, BoundCallType);
  if (!b) return nullptr;
  b->vectorcall = bound_call;
  b->state = state.release();
  b->ex = reinterpret_cast<Executable*>(Py_NewRef(reinterpret_cast<PyObject*>(ex)));
  b->run = ex->run;
  b->weakrefs = nullptr;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(b));
  return reinterpret_cast<PyObject*>(b);
}

int bound_init(PyObject* module) {
  StateType = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &kStateSpec, nullptr));
  BoundCallType = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &kSpec, nullptr));
  if (!StateType || !BoundCallType) return -1;
  return PyModule_AddObjectRef(module, "BoundCall", reinterpret_cast<PyObject*>(BoundCallType));
}

}  // namespace opgraph
