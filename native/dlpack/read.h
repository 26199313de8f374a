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

struct Holding {
  Hold hold;
  union {
    DLManagedTensorVersioned* versioned;
    DLManagedTensor* legacy;
    PyObject* object;
    Py_buffer buffer;
  };
};

// What every call looks at, together: it comes before what is held and the room for extents, which mostly stay untouched.
struct Described {
  DLTensor t;
  const DLPackExchangeAPI* flags_of;  // set where the type can require grad or be a lazily negated view: see check_flags
  bool read_only;
  bool address_only;  // a bare address: brings no evidence
};

// One buffer as it described itself. Lives in the caller's pack; `t.data` already includes the byte offset.
// Not initialised beyond what reset() sets: a pack is built on the stack once per call.
struct Reading : Described, Holding {
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
  DLPackDLTensorFromPyObjectNoSync borrow;  // null: only the owning call is there
  const DLPackExchangeAPI* flags_of;        // `api` where the type can be asked for negative/conjugate bits and requires_grad
};

struct ReadContext {
  DLDevice device;      // of the plan: what a bare address is taken to be
  int64_t stream;       // raw stream of the call, for `__dlpack__(stream=...)`
  PyObject* hooks;      // `read` serves the slow protocols
};

// Reads `obj`. Returns Rule::ok, a refusal, or Rule::producer with the producer's exception set. `last` carries the entry
// of the previous operand from one reading to the next: the operands of a call are mostly of one type.
Rule read_any(PyObject* obj, const ReadContext& context, Reading& out, bool owning, const TypeEntry*& last);
Rule settle(Reading& out);  // applies a byte offset, fills missing strides, refuses what cannot be described

inline Rule read_buffer(PyObject* obj, const ReadContext& context, Reading& out, const TypeEntry*& last) {
  if (OG_UNLIKELY(!last || Py_TYPE(obj) != last->type)) return read_any(obj, context, out, false, last);
  out.reset();
  out.flags_of = last->flags_of;
  DLTensor& t = out.t;
  if (OG_UNLIKELY(last->borrow(obj, &t) != 0)) return Rule::producer;
  if (OG_LIKELY(t.byte_offset == 0 && t.shape && t.strides && static_cast<uint32_t>(t.ndim) <= kMaxBufferRank)) return Rule::ok;
  return settle(out);
}

// Owning export of `obj`'s memory, for what outlives a call (bound calls).
inline Rule read_owning(PyObject* obj, const ReadContext& context, Reading& out) {
  const TypeEntry* none = nullptr;
  return read_any(obj, context, out, true, none);
}

void release_slow(Holding& r);
inline void release(Holding& r) {
  if (OG_UNLIKELY(r.hold != Hold::nothing)) release_slow(r);
}

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

// ---- bits that the borrowing call does not carry (torch_flags.cpp says how their places are learnt) ----

struct FlagPlaces {
  const DLPackExchangeAPI* api;  // the table of the types this holds for
  int negative_offset;           // bytes from `shape` to the word holding the negative bit
  uint64_t negative_mask;
  int autograd_offset;  // bytes from `shape` to a word that is zero exactly while there is no autograd state
};
extern std::atomic<const FlagPlaces*> g_flag_places;

// Sizes and strides lie side by side inside the tensor's implementation object up to this rank; only then do the words
// around `shape` belong to it.
constexpr int kInlineRank = 5;
inline bool inline_sizes(const DLTensor& t) { return t.ndim <= kInlineRank && t.strides == t.shape + kInlineRank; }

inline uint64_t word_near_shape(const DLTensor& t, int offset) {
  uint64_t w;
  __builtin_memcpy(&w, reinterpret_cast<const char*>(t.shape) + offset, sizeof w);
  return w;
}

Rule check_flags_slow(PyObject* obj, const Reading& r, bool writes);

// Called where `flags_of` is set. `writes`: the operand is an output, which must not require grad.
inline Rule check_flags(PyObject* obj, const Reading& r, bool writes) {
  const FlagPlaces* p = g_flag_places.load(std::memory_order_acquire);
  if (OG_LIKELY(p && p->api == r.flags_of && inline_sizes(r.t) && r.t.dtype.code != kDLComplex)) {
    const bool negative = (word_near_shape(r.t, p->negative_offset) & p->negative_mask) != 0;
    if (OG_LIKELY(!negative && !(writes && word_near_shape(r.t, p->autograd_offset)))) return Rule::ok;
  }
  return check_flags_slow(obj, r, writes);
}
void learn_torch_flags(const DLPackExchangeAPI* api);

}  // namespace opgraph
