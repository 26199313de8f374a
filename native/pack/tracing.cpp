#include "pack/tracing.h"

namespace opgraph {

// torch's callback is per thread; None means that it lets frames run. Looked up, never imported; a torch that spells
// this otherwise is left alone, and then traces our frames as it would any other library's.
OG_COLD void TracerPause::pause() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref name(PyUnicode_FromString("torch._C._dynamo.eval_frame"));
  Ref module(name ? PyImport_GetModule(name.get()) : nullptr);
  Ref set(module ? PyObject_GetAttrString(module.get(), "set_eval_frame") : nullptr);
  Ref current(set ? PyObject_CallMethod(module.get(), "get_eval_frame_callback", nullptr) : nullptr);
  if (current && current.get() != Py_None) {
    Ref previous(PyObject_CallOneArg(set.get(), Py_None));
    if (previous) {
      callback_ = current.release();
      set_ = set.release();
    }
  }
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

OG_COLD void TracerPause::resume() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref callback(callback_), set(set_);
  Ref previous(PyObject_CallOneArg(set.get(), callback.get()));
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

}  // namespace opgraph
