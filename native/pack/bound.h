// BoundCall: a call whose operands were checked once and are kept.
#pragma once

#include "pack/executable.h"

namespace opgraph {

int bound_init(PyObject* module);
PyObject* bound_new(Executable* ex, const CallArguments& arguments);

}  // namespace opgraph
