// Cold: gathers what is known about a refusal and hands it to hooks.fail, which formats and raises.
#include "pack/executable.h"

namespace opgraph {
namespace {

const char* rule_name(Rule rule) {
  switch (rule) {
    case Rule::ok: return "ok";
    case Rule::missing: return "missing";
    case Rule::type: return "type";
    case Rule::boolean: return "bool";
    case Rule::capsule: return "capsule";
    case Rule::producer: return "producer";
    case Rule::dtype: return "dtype";
    case Rule::subbyte: return "subbyte";
    case Rule::device: return "device";
    case Rule::rank: return "rank";
    case Rule::layout: return "layout";
    case Rule::bytes: return "bytes";
    case Rule::negative_stride: return "negative_stride";
    case Rule::negative_extent: return "negative_extent";
    case Rule::self_overlap: return "self_overlap";
    case Rule::read_only: return "read_only";
    case Rule::requires_grad: return "requires_grad";
    case Rule::conjugate: return "conjugate";
    case Rule::negative_bit: return "negative_bit";
    case Rule::null_address: return "null_address";
    case Rule::address: return "address";
    case Rule::overlap: return "overlap";
    case Rule::inplace: return "inplace";
    case Rule::ragged_offsets: return "ragged_offsets";
    case Rule::override_length: return "override_length";
    case Rule::override_rank: return "override_rank";
    case Rule::override_extent: return "override_extent";
    case Rule::override_type: return "override_type";
    case Rule::override_duplicate: return "override_duplicate";
    case Rule::override_unknown: return "override_unknown";
    case Rule::override_scalar: return "override_kind";
    case Rule::overrides_unsupported: return "overrides_unsupported";
    case Rule::ordered_form: return "ordered_form";
    case Rule::ordered_length: return "ordered_length";
    case Rule::ordered_duplicate: return "ordered_duplicate";
    case Rule::ordered_type: return "ordered_type";
    case Rule::mapping_type: return "mapping_type";
    case Rule::workspace_missing: return "workspace_missing";
    case Rule::workspace_small: return "workspace_small";
    case Rule::workspace_strided: return "workspace_strided";
    case Rule::workspace_overlap: return "workspace_overlap";
    case Rule::workspace_unknown: return "workspace_unknown";
    case Rule::handle_type: return "handle_type";
    case Rule::handle_device: return "handle_device";
    case Rule::scalar: return "scalar";
  }
  return "unknown";
}

bool put(PyObject* dict, const char* key, PyObject* stolen) {
  Ref value(stolen);
  return value && PyDict_SetItemString(dict, key, value.get()) == 0;
}

PyObject* tuple_of(const int64_t* values, int n) {
  PyObject* t = PyTuple_New(n);
  for (int i = 0; t && i < n; i++) {
    PyObject* v = PyLong_FromLongLong(values[i]);
    if (!v) {
      Py_CLEAR(t);
      break;
    }
    PyTuple_SET_ITEM(t, i, v);
  }
  return t;
}

bool put_reading(PyObject* facts, const Reading& r) {
  const DLTensor& t = r.t;
  if (!put(facts, "device", Py_BuildValue("(ii)", static_cast<int>(t.device.device_type), t.device.device_id))) return false;
  if (r.address_only) return put(facts, "address", PyLong_FromVoidPtr(t.data));
  if (t.ndim < 0 || t.ndim > kMaxBufferRank) return put(facts, "rank", PyLong_FromLong(t.ndim));
  if (!put(facts, "dtype", Py_BuildValue("(iii)", t.dtype.code, t.dtype.bits, t.dtype.lanes))) return false;
  if ((t.shape || t.ndim == 0) && !put(facts, "dims", tuple_of(t.shape, t.ndim))) return false;
  if ((t.strides || t.ndim == 0) && !put(facts, "strides", tuple_of(t.strides, t.ndim))) return false;
  return put(facts, "address", PyLong_FromVoidPtr(t.data));
}

// Whether the object's repr says something in a few words: numbers, names, and short lists of numbers.
bool short_text(PyObject* object) {
  if (PyUnicode_Check(object)) return PyUnicode_GET_LENGTH(object) <= 200;
  if (PyLong_Check(object)) return true;
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
  for (Py_ssize_t i = 0; i < n; i++)
    if (!PyLong_CheckExact(PySequence_Fast_GET_ITEM(object, i))) return false;
  return n <= 32;
}

// Only plain facts: a reference to the buffer inside an exception would keep it alive.
PyObject* facts_of(const Reading* reading, PyObject* object, int64_t have, int64_t need, PyObject* detail) {
  Ref facts(PyDict_New());
  if (!facts) return nullptr;
  // First, since what follows may run the object's code, which may change what the reading points to.
  if (reading && !put_reading(facts.get(), *reading)) return nullptr;
  if (object) {
    Ref name(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__qualname__"));
    if (!name) PyErr_Clear();
    if (name && PyDict_SetItemString(facts.get(), "type", name.get()) < 0) return nullptr;
    if (short_text(object)) {
      Ref text(PyObject_Repr(object));
      if (!text) PyErr_Clear();
      if (text && PyDict_SetItemString(facts.get(), "given", text.get()) < 0) return nullptr;
    }
  }
  if (!put(facts.get(), "have", PyLong_FromLongLong(have)) || !put(facts.get(), "need", PyLong_FromLongLong(need))) return nullptr;
  if (detail && PyDict_SetItemString(facts.get(), "detail", detail) < 0) return nullptr;
  return facts.release();
}

}  // namespace

OG_COLD bool fail(Executable* ex, Rule rule, int index, int other, const Reading* reading, PyObject* object, int64_t have,
                  int64_t need, PyObject* detail) {
  Ref facts(facts_of(reading, object, have, need, detail));
  if (!facts) return false;
  Ref result(PyObject_CallMethod(ex->hooks, "fail", "siiO", rule_name(rule), index, other, facts.get()));
  if (result) PyErr_Format(PyExc_RuntimeError, "hooks.fail returned for rule '%s'", rule_name(rule));
  return false;
}

OG_COLD bool fail_producer(Executable* ex, Rule rule, int index, const Reading* reading, PyObject* object) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (!type) return fail(ex, rule, index, -1, reading, object);
  if (!PyErr_GivenExceptionMatches(type, PyExc_Exception)) {  // KeyboardInterrupt and the like pass through
    PyErr_Restore(type, value, trace);
    return false;
  }
  PyErr_NormalizeException(&type, &value, &trace);
  // The producer's frames may hold the buffer: only its type and text travel on.
  Ref text(PyUnicode_FromFormat("%s: %S", reinterpret_cast<PyTypeObject*>(type)->tp_name, value));
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  if (!text) PyErr_Clear();
  return fail(ex, rule, index, -1, reading, object, -1, -1, text.get());
}

}  // namespace opgraph
