// Reading any buffer a caller may hold into a DLTensor that is valid for one call.
#pragma once

#include "pack/layout.h"
#include "python.h"

namespace opgraph {

// What has to be given back when the call is over, and how.
enum class Hold : uint8_t {
  nothing,    // borrowed from the object itself, which the pack holds
  versioned,  // a DLManagedTensorVersioned we own
  legacy,     // a DLManagedTensor we own
  buffer,     // a Py_buffer
  object,     // an object that keeps the memory alive
};

// One buffer as it described itself. Lives in the caller's pack; `t.data` already includes the byte offset.
// Not initialised beyond what reset() sets: a pack is built on the stack once per call.
struct Reading {
  DLTensor t;
  bool read_only;
  const DLPackExchangeAPI* flags_of;  // set where the type can require grad or be a lazily negated view: see check_flags
  bool address_only;     // a bare address: brings no evidence
  Hold hold;
  union {
    DLManagedTensorVersioned* versioned;
    DLManagedTensor* legacy;
    PyObject* object;
    Py_buffer buffer;
  };
  int64_t dims[kMaxBufferRank];
  int64_t strides[kMaxBufferRank];

  void reset() {
    read_only = address_only = false;
    flags_of = nullptr;
    hold = Hold::nothing;
  }
};

// A type that owns an exchange table. Entries are immutable, never freed, and hold a reference to their type.
struct TypeEntry {
  PyTypeObject* type;
  const DLPackExchangeAPI* api;
  bool borrows;       // the table has the borrowing call
  bool has_flags;     // the type can be asked for negative/conjugate bits and requires_grad
};

struct ReadContext {
  DLDevice device;      // of the plan: what a bare address is taken to be
  int64_t stream;       // raw stream of the call, for `__dlpack__(stream=...)`
  PyObject* hooks;      // `read` serves the slow protocols
};

// Reads `obj`. Returns Rule::ok, a refusal, or Rule::producer with the producer's exception set.
Rule read_buffer(PyObject* obj, const ReadContext& context, Reading& out);
void release_slow(Reading& r);
inline void release(Reading& r) {
  if (OG_UNLIKELY(r.hold != Hold::nothing)) release_slow(r);
}

// Owning export of `obj`'s memory, for what outlives a call (bound calls). Same results as read_buffer.
Rule read_owning(PyObject* obj, const ReadContext& context, Reading& out);

// Bits that the borrowing call does not carry; called where `flags_of` is set. `writes`: the operand is an output.
Rule check_flags(PyObject* obj, const Reading& r, bool writes);

// NumPy's C API lives in numpy.cpp alone.
int numpy_init();
bool is_numpy_array(PyObject* obj);
bool is_numpy_array_exact(PyObject* obj);
bool is_numpy_scalar(PyObject* obj);
Rule read_numpy(PyObject* obj, Reading& out);
// ndarray over `data` (dims, strides in storage units), keeping `base` alive. New reference.
PyObject* numpy_view(void* data, const Layout& layout, DLDataType dtype, bool writable, PyObject* base);

// The exchange-table entry of a type, or null when it has none (no exception set).
const TypeEntry* find_exchange(PyTypeObject* type);

// torch_flags.cpp: where a torch tensor keeps its negative bit and autograd state, learnt from samples.
// `unknown` sends the caller to the Python attributes.
enum class Flag : uint8_t { clear, set, unknown };
void learn_torch_flags(const DLPackExchangeAPI* api);
Flag torch_negative(const Reading& r);
Flag torch_autograd(const Reading& r);

}  // namespace opgraph
