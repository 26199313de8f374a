// Executable: one compiled plan and its operand contract, immutable after construction; and the state of one call.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "dlpack/read.h"
#include "pack/layout.h"
#include "pack/publish.h"
#include "python.h"

namespace opgraph {

struct Carve {
  int64_t offset;  // bytes from the workspace's base, 256-byte aligned
  DLDataType dtype;
  Layout layout;
  int64_t nbytes;
};

// The tensor_uids of the ordered form as last seen: operand index per position, -1 = a tensor that is no operand.
struct OrderRecord {
  std::vector<int64_t> uids;
  std::vector<int32_t> index;
};

// The Tensor keys of a mapping as last seen, in its order: a hint that saves the look-up while callers keep their order.
// Borrowed: every key listed lives in `keys` of the executable.
struct MappingRecord {
  std::vector<PyObject*> keys;
  std::vector<int32_t> index;
};

// One set of overrides that the graph's shape rules accepted, with what the engine needs to run it.
struct GeometryRecord {
  std::vector<int64_t> words;  // (operand, rank, dims..., strides...)...
  PyObject* geometry;          // owned
};

// The same as a caller listed it, in plain lists: what a repeated call compares instead of reading each entry again.
struct OverrideRecord {
  std::vector<int64_t> words;    // (uid, rank, dims..., strides...)... in the caller's order
  std::vector<int32_t> operand;  // per entry
  std::vector<Layout> layout;
  PyObject* geometry;  // owned
};

struct DisjointRecord {  // an interleaved pair of operands found to share no element, by the distance of their addresses
  int32_t a, b;
  int64_t distance;
};

constexpr int kRecords = 16;  // per kind and executable; further ones are worked out again on each call

class Program;

struct Executable {
  PyObject_HEAD
  int32_t n;
  OperandSpec* specs;
  PyObject* keys;            // dict: Tensor | uid | name -> operand index, -1 for the graph's other tensors
  PyTypeObject* tensor_type;
  PyObject** defaults;       // auto-bound buffers, null where the caller has to give one
  bool has_defaults, has_ragged, overrides, dynamic;
  DLDevice device;
  int64_t workspace_bytes, stream;
  std::vector<Carve>* carves;
  std::vector<bool>* inplace;  // n*n: [output * n + input]
  std::vector<int32_t>* outputs;
  PyObject* run;  // Python step or Program object, or null: the empty native step
  const Program* program;  // of `run`, where that is one
  PyObject* hooks;
  PyObject* uids;  // tuple of ints

  // Records published by threads, read without a lock; never changed or freed before the executable goes.
  std::atomic<const OrderRecord*> orders[kRecords];
  std::atomic<const MappingRecord*> mappings[kRecords];
  std::atomic<const GeometryRecord*> geometries[kRecords];
  std::atomic<const OverrideRecord*> override_sets[kRecords];
  std::atomic<const DisjointRecord*> disjoint[kRecords];
  std::mutex* record_mutex;  // writers only
};

extern PyTypeObject* ExecutableType;
int executable_init(PyObject* module);

// One operand of one call.
struct Operand {
  PyObject* value;       // the caller's object; strong. Null: absent
  const Layout* layout;  // declared, or this call's override
  int64_t nbytes;        // bytes it may touch
  int64_t available;     // bytes the buffer described; INT64_MAX for a bare address
  Reading reading;
  unsigned char scalar[16];  // the value of a pass-by-value operand
  Layout live;               // storage of an override
};

struct CallArguments {
  PyObject* tensor_dict = nullptr;
  PyObject* workspace = nullptr;
  PyObject* handle = nullptr;
  PyObject* override_uids = nullptr;
  PyObject* override_shapes = nullptr;
  PyObject* override_strides = nullptr;
  PyObject* tensor_uids = nullptr;
};

// Everything one call knows. Lives on the stack of the thread that makes it (on the heap past kStackOperands).
struct Call {
  Executable* ex;
  Operand* operands;
  PyObject* geometry = nullptr;  // borrowed from its record, or owned when `owns_geometry`
  bool owns_geometry = false;
  bool owning = false;           // bind(): operands are kept by owning exports
  int64_t stream = 0;
  PyObject* workspace = nullptr;  // strong
  Reading workspace_reading;
  int64_t workspace_size = -1;  // -1: a bare address, unknown
};

constexpr int kStackOperands = 64;

// vectorcall arguments -> CallArguments; false with TypeError.
bool parse_call(const char* name, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, CallArguments& out);

// Normalizes and checks; true when the plan may run. On false an exception is set. finish_call is due either way.
bool prepare_call(Call& call, const CallArguments& arguments);
bool run_call(Call& call);
void finish_call(Call& call);

// The whole of execute(): prepare, run, finish.
PyObject* execute(Executable* ex, const CallArguments& arguments);

// Cold: reports `rule` through hooks.fail, which formats and raises. Always returns false with an exception set.
bool fail(Executable* ex, Rule rule, int index, int other = -1, const Reading* reading = nullptr, PyObject* object = nullptr,
          int64_t have = -1, int64_t need = -1, PyObject* detail = nullptr);
// The same for a producer's own exception, which becomes the cause.
bool fail_producer(Executable* ex, Rule rule, int index, const Reading* reading, PyObject* object);

}  // namespace opgraph
