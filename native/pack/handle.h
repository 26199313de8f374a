// Handle: the device and stream a call runs on.
#pragma once

#include "python.h"

namespace opgraph {

struct Handle {
  PyObject_HEAD
  DLDevice device;
  int64_t stream;  // raw stream address; 0 is the legacy default stream
  PyObject* dict;
  PyObject* weakrefs;
};

extern PyTypeObject* HandleType;
int handle_init(PyObject* module);

}  // namespace opgraph
