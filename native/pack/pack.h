// VariantPack: all operands of one call, as a Python engine receives them.
#pragma once

#include "pack/executable.h"
#include "pack/slot.h"

namespace opgraph {

struct VariantPack {
  PyObject_VAR_HEAD
  Executable* ex;       // owned
  PyObject* workspace;  // Slot over the whole workspace, or null; owned
  PyObject* carves;     // tuple of Slots; owned
  PyObject* geometry;   // what hooks.geometry returned for this call's overrides, or null; owned
  int64_t stream;
  int64_t workspace_size;  // -1: unknown
  Slot* slots[1];          // owned
};

extern PyTypeObject* VariantPackType;
int pack_init(PyObject* module);

// A pack whose slots keep the callers' objects alive. New reference.
VariantPack* pack_new(Call& call);

}  // namespace opgraph
