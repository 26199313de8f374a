// Slot: one operand (or workspace region) as engines and kernels receive it; a full DLPack producer.
#pragma once

#include "pack/layout.h"
#include "python.h"

namespace opgraph {

struct Slot {
  PyObject_HEAD
  DLTensor t;        // shape and strides point into `layout`: a Slot never moves and is never copied
  Layout layout;     // storage units, declared axis order
  int64_t nbytes;    // bytes the operand may touch; the true size for ragged tensors
  bool present;      // false: an optional operand without a buffer
  bool read_only;    // an input: exported with the read-only flag
  bool locked;       // the caller's buffer itself is read-only: no legacy capsule, which could not say so
  PyObject* owner;   // keeps the memory alive; owned, released with the slot on the thread that drops it
};

extern PyTypeObject* SlotType;

// The borrowing call cannot say that a slot shows an input: asked where a slot becomes an output of another call.
inline bool is_input_slot(PyObject* obj) {
  return Py_TYPE(obj) == SlotType && reinterpret_cast<Slot*>(obj)->read_only;
}

int slot_init(PyObject* module);

// A new slot over `data`. `owner` may be null (a bare address: the caller vouches for it). New reference.
Slot* slot_new(void* data, const Layout& layout, DLDataType dtype, DLDevice device, int64_t nbytes, bool read_only,
               PyObject* owner);

}  // namespace opgraph
