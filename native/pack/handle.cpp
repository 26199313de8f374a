#include "pack/handle.h"

#include <structmember.h>

namespace opgraph {

PyTypeObject* HandleType = nullptr;

namespace {

Handle* as_handle(PyObject* self) { return reinterpret_cast<Handle*>(self); }

int handle_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_handle(self)->dict);
  return 0;
}

int handle_clear(PyObject* self) {
  Py_CLEAR(as_handle(self)->dict);
  return 0;
}

void handle_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (as_handle(self)->weakrefs) PyObject_ClearWeakRefs(self);
  handle_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

int handle_init_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"device_type", "device_id", "stream", nullptr};
  int type = kDLCPU, id = 0;
  long long stream = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|iiL", const_cast<char**>(names), &type, &id, &stream)) return -1;
  if (stream < 0) {
    PyErr_Format(PyExc_ValueError, "stream must be a stream address of 0 or more, got %lld", stream);
    return -1;
  }
  as_handle(self)->device = {static_cast<DLDeviceType>(type), id};
  as_handle(self)->stream = stream;
  return 0;
}

PyObject* get_device_type(PyObject* self, void*) { return PyLong_FromLong(as_handle(self)->device.device_type); }
PyObject* get_device_id(PyObject* self, void*) { return PyLong_FromLong(as_handle(self)->device.device_id); }
PyObject* get_stream(PyObject* self, void*) { return PyLong_FromLongLong(as_handle(self)->stream); }

int set_stream(PyObject* self, PyObject* value, void*) {
  if (!value || !PyLong_CheckExact(value)) {
    PyErr_SetString(PyExc_TypeError, "Handle.stream must be an int (a raw stream address)");
    return -1;
  }
  const long long stream = PyLong_AsLongLong(value);
  if (stream == -1 && PyErr_Occurred()) return -1;
  if (stream < 0) {
    PyErr_Format(PyExc_ValueError, "stream must be a stream address of 0 or more, got %lld", stream);
    return -1;
  }
  as_handle(self)->stream = stream;
  return 0;
}

PyObject* refuse_copy(PyObject* self, PyObject*) {
  PyErr_Format(PyExc_TypeError, "%s cannot be copied or pickled: it names a device and a stream of this process",
               Py_TYPE(self)->tp_name);
  return nullptr;
}

PyMethodDef kMethods[] = {
    {"__reduce__", refuse_copy, METH_NOARGS, nullptr},
    {"__copy__", refuse_copy, METH_NOARGS, nullptr},
    {"__deepcopy__", refuse_copy, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef kGetSet[] = {
    {"device_type", get_device_type, nullptr, "DLPack device type: 1 CPU, 2 CUDA.", nullptr},
    {"device_id", get_device_id, nullptr, "Device ordinal.", nullptr},
    {"stream", get_stream, set_stream, "Raw stream address; 0 is the legacy default stream.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef kMembers[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(Handle, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Handle, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot kSlots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(handle_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(handle_clear)},
    {Py_tp_init, reinterpret_cast<void*>(handle_init_call)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_methods, kMethods},
    {Py_tp_getset, kGetSet},
    {Py_tp_members, kMembers},
    {Py_tp_doc, const_cast<char*>("Handle(device_type=1, device_id=0, stream=0)\n--\n\nThe device and stream that calls run on.")},
    {0, nullptr},
};

PyType_Spec kSpec = {"opgraph._native.Handle", sizeof(Handle), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, kSlots};

}  // namespace

int handle_init(PyObject* module) {
  HandleType = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &kSpec, nullptr));
  if (!HandleType) return -1;
  return PyModule_AddObjectRef(module, "Handle", reinterpret_cast<PyObject*>(HandleType));
}

}  // namespace opgraph
