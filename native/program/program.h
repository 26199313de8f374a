// A compiled plan as a list of native steps. Arguments, grids and memsets are laid out when the program is built; a call
// patches addresses and extent-dependent integers into its own copy and issues the steps on one stream. Immutable, so any
// number of threads may run one program at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "program/expression.h"

namespace opgraph {

// Where an address comes from: an operand, or the workspace.
constexpr int32_t kFromWorkspace = -1;

struct AddressPatch {
  uint32_t at;       // byte offset in the argument block
  int32_t source;    // operand index or kFromWorkspace
  int64_t delta;     // bytes added
};

struct IntegerPatch {
  uint32_t at;
  uint8_t bytes;  // 4 or 8
  Expr value;
};

// A by-value operand's bytes as a kernel argument.
struct ScalarPatch {
  uint32_t at;
  uint8_t bytes;
  int32_t operand;
};

struct KernelStep {
  cuda::Function function = nullptr;
  Expr grid[3];
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  std::vector<cuda::Attribute> attributes;
  std::vector<unsigned char> arguments;   // template of the argument block
  std::vector<uint32_t> parameter_at;     // offset of each parameter in it
  std::vector<AddressPatch> addresses;
  std::vector<IntegerPatch> integers;
  std::vector<ScalarPatch> scalars;
};

// One memset of `height` rows of `width` elements; height 1 is one-dimensional.
struct MemsetStep {
  int32_t target = 0;   // operand index or kFromWorkspace
  int64_t delta = 0;    // bytes
  uint32_t pattern = 0;
  uint8_t element = 1;  // 1, 2 or 4 bytes
  Expr width, height, pitch;  // elements, rows, bytes
};

struct Step {
  enum class Kind : uint8_t { kernel, memset } kind;
  uint32_t index;  // into the vector of its kind
};

// What a program needs of a call.
struct CallView {
  void* const* addresses;           // per operand
  const Layout* const* layouts;     // per operand, live
  const unsigned char* const* scalars;  // per operand; by-value operands only
  void* workspace;
  cuda::Stream stream;
};

struct Failure {
  cuda::Result result = cuda::kSuccess;
  const char* what = nullptr;  // driver call
  int step = -1;
};

constexpr uint32_t kMaxArgumentBytes = 32764;  // what a kernel may take on current GPUs
constexpr uint32_t kMaxParameters = 512;

// An operand whose address has to be a multiple of `bytes` for the program's wide accesses.
struct AlignmentNeed {
  int32_t operand;
  uint32_t bytes;
};

class Program {
 public:
  int device = 0;
  std::vector<AlignmentNeed> needs;
  std::shared_ptr<const Program> otherwise;  // runs where a need is not met
  std::vector<KernelStep> kernels;
  std::vector<MemsetStep> memsets;
  std::vector<Step> steps;
  std::vector<std::shared_ptr<void>> keep;  // modules the functions live in

  // Empty when every step is well-formed for operands of these ranks; else the reason.
  std::string check(const std::vector<int>& ranks) const;

  // This program, or the one for addresses of lower alignment.
  const Program& select(void* const* addresses) const {
    for (const AlignmentNeed& need : needs)
      if (otherwise && reinterpret_cast<uintptr_t>(addresses[need.operand]) % need.bytes) return otherwise->select(addresses);
    return *this;
  }

  // Launches the first kernel `repeat` times with arguments laid out once: the floor a call is measured against.
  bool launch_bare(const cuda::Driver& driver, const CallView& call, int repeat, Failure& failure) const;

  // Issues the steps. Makes the device's primary context current and restores what was.
  bool run(const cuda::Driver& driver, const CallView& call, Failure& failure) const;

 private:
  bool launch(const cuda::Driver& driver, const KernelStep& step, const CallView& call, Failure& failure) const;
  bool set(const cuda::Driver& driver, const MemsetStep& step, const CallView& call, Failure& failure) const;
};

// Memsets that cover every element of a strided output exactly once with the fewest calls: axes that lie densely are
// merged, the innermost pair becomes one 2-D memset, what is left is enumerated. False with a reason for a layout that
// would write an element twice or needs more than `most` calls.
bool plan_memsets(int32_t target, const Layout& layout, uint8_t element_bytes, uint64_t pattern, int most,
                  std::vector<MemsetStep>& out, std::string& reason);

}  // namespace opgraph
