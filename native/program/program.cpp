#include "program/program.h"

#include <alloca.h>

#include <algorithm>
#include <cstring>

namespace opgraph {
namespace {

Expr constant(int64_t v) { return {ExprTerm{ExprOp::constant, 0, 0, v}}; }

inline uint64_t address_of(const CallView& call, int32_t source) {
  return reinterpret_cast<uint64_t>(source == kFromWorkspace ? call.workspace : call.addresses[source]);
}

inline void put_integer(unsigned char* at, int64_t value, uint8_t bytes) {
  if (bytes == 4) {
    const auto narrow = static_cast<int32_t>(value);
    std::memcpy(at, &narrow, 4);
  } else {
    std::memcpy(at, &value, 8);
  }
}

bool fits(uint32_t at, uint32_t bytes, size_t size) { return at + bytes <= size; }

std::string check_kernel(const KernelStep& k, const std::vector<int>& ranks) {
  const int n = static_cast<int>(ranks.size());
  if (!k.function) return "a kernel step has no function";
  if (k.arguments.size() > kMaxArgumentBytes || k.parameter_at.size() > kMaxParameters) return "a kernel takes too many arguments";
  for (const Expr& g : k.grid)
    if (std::string why = check_expression(g, ranks); !why.empty()) return why;
  for (const uint32_t at : k.parameter_at)
    if (at >= k.arguments.size()) return "a parameter lies outside the argument block";
  for (const AddressPatch& p : k.addresses)
    if (p.source < kFromWorkspace || p.source >= n || !fits(p.at, 8, k.arguments.size())) return "an address patch is out of range";
  for (const ScalarPatch& p : k.scalars)
    if (p.operand < 0 || p.operand >= n || p.bytes > 16 || !fits(p.at, p.bytes, k.arguments.size())) return "a scalar patch is out of range";
  for (const IntegerPatch& p : k.integers) {
    if ((p.bytes != 4 && p.bytes != 8) || !fits(p.at, p.bytes, k.arguments.size())) return "an integer patch is out of range";
    if (std::string why = check_expression(p.value, ranks); !why.empty()) return why;
  }
  return {};
}

std::string check_memset(const MemsetStep& m, const std::vector<int>& ranks) {
  if (m.target < kFromWorkspace || m.target >= static_cast<int>(ranks.size())) return "a memset names no operand";
  if (m.element != 1 && m.element != 2 && m.element != 4) return "memset elements have 1, 2 or 4 bytes";
  for (const Expr* e : {&m.width, &m.height, &m.pitch})
    if (std::string why = check_expression(*e, ranks); !why.empty()) return why;
  return {};
}

}  // namespace

std::string Program::check(const std::vector<int>& ranks) const {
  for (const KernelStep& k : kernels)
    if (std::string why = check_kernel(k, ranks); !why.empty()) return why;
  for (const MemsetStep& m : memsets)
    if (std::string why = check_memset(m, ranks); !why.empty()) return why;
  for (const Step& s : steps)
    if (s.index >= (s.kind == Step::Kind::kernel ? kernels.size() : memsets.size())) return "a step is out of range";
  return {};
}

namespace {

// False for an empty operand: nothing to launch.
inline bool configure(const KernelStep& k, const CallView& call, cuda::LaunchConfig& config) {
  for (int i = 0; i < 3; i++) {
    const int64_t extent = evaluate(k.grid[i], call.layouts);
    if (extent <= 0) return false;
    config.grid[i] = static_cast<unsigned>(extent);
    config.block[i] = k.block[i];
  }
  config.shared_bytes = k.shared_bytes;
  config.stream = call.stream;
  config.attributes = const_cast<cuda::Attribute*>(k.attributes.data());
  config.attribute_count = static_cast<unsigned>(k.attributes.size());
  return true;
}

// This call's copy of the argument block at `block`, and the pointers to its parameters.
inline void lay_out(const KernelStep& k, const CallView& call, unsigned char* block, void** parameters) {
  std::memcpy(block, k.arguments.data(), k.arguments.size());
  for (const AddressPatch& p : k.addresses) {
    const uint64_t address = address_of(call, p.source) + p.delta;
    std::memcpy(block + p.at, &address, 8);
  }
  for (const IntegerPatch& p : k.integers) put_integer(block + p.at, evaluate(p.value, call.layouts), p.bytes);
  for (const ScalarPatch& p : k.scalars) std::memcpy(block + p.at, call.scalars[p.operand], p.bytes);
  for (size_t i = 0; i < k.parameter_at.size(); i++) parameters[i] = block + k.parameter_at[i];
}

inline unsigned char* aligned16(void* p) {
  auto* at = static_cast<unsigned char*>(p);
  return at + (-reinterpret_cast<uintptr_t>(at) & 15);
}

}  // namespace

bool Program::launch(const cuda::Driver& driver, const KernelStep& k, const CallView& call, Failure& failure) const {
  cuda::LaunchConfig config{};
  if (!configure(k, call, config)) return true;
  unsigned char* block = aligned16(alloca(k.arguments.size() + 16));
  auto** parameters = static_cast<void**>(alloca(sizeof(void*) * (k.parameter_at.size() + 1)));
  lay_out(k, call, block, parameters);
  failure.result = driver.launch(&config, k.function, parameters, nullptr);
  failure.what = "cuLaunchKernelEx";
  return failure.result == cuda::kSuccess;
}

bool Program::launch_bare(const cuda::Driver& driver, const CallView& call, int repeat, Failure& failure) const {
  const KernelStep& k = kernels.front();
  cuda::LaunchConfig config{};
  if (!configure(k, call, config)) return true;
  unsigned char* block = aligned16(alloca(k.arguments.size() + 16));
  auto** parameters = static_cast<void**>(alloca(sizeof(void*) * (k.parameter_at.size() + 1)));
  lay_out(k, call, block, parameters);
  for (int i = 0; i < repeat; i++)
    if ((failure.result = driver.launch(&config, k.function, parameters, nullptr)) != cuda::kSuccess) return false;
  return true;
}

bool Program::set(const cuda::Driver& driver, const MemsetStep& m, const CallView& call, Failure& failure) const {
  const cuda::Address at = address_of(call, m.target) + m.delta;
  const int64_t width = evaluate(m.width, call.layouts), height = evaluate(m.height, call.layouts);
  if (width <= 0 || height <= 0) return true;
  failure.what = "cuMemset";
  if (height == 1) {
    switch (m.element) {
      case 1: failure.result = driver.memset8(at, static_cast<unsigned char>(m.pattern), width, call.stream); break;
      case 2: failure.result = driver.memset16(at, static_cast<unsigned short>(m.pattern), width, call.stream); break;
      default: failure.result = driver.memset32(at, m.pattern, width, call.stream); break;
    }
    return failure.result == cuda::kSuccess;
  }
  const size_t pitch = evaluate(m.pitch, call.layouts);
  switch (m.element) {
    case 1: failure.result = driver.memset2d8(at, pitch, static_cast<unsigned char>(m.pattern), width, height, call.stream); break;
    case 2: failure.result = driver.memset2d16(at, pitch, static_cast<unsigned short>(m.pattern), width, height, call.stream); break;
    default: failure.result = driver.memset2d32(at, pitch, m.pattern, width, height, call.stream); break;
  }
  return failure.result == cuda::kSuccess;
}

bool Program::run(const cuda::Driver& driver, const CallView& call, Failure& failure) const {
  const cuda::ContextGuard guard(driver, device);
  if (guard.result() != cuda::kSuccess) {
    failure = {guard.result(), "cuCtxSetCurrent", -1};
    return false;
  }
  for (size_t i = 0; i < steps.size(); i++) {
    const Step& s = steps[i];
    const bool done = s.kind == Step::Kind::kernel ? launch(driver, kernels[s.index], call, failure)
                                                   : set(driver, memsets[s.index], call, failure);
    if (!done) {
      failure.step = static_cast<int>(i);
      return false;
    }
  }
  return true;
}

bool plan_memsets(int32_t target, const Layout& layout, uint8_t element_bytes, uint64_t pattern, int most,
                  std::vector<MemsetStep>& out, std::string& reason) {
  if (!writes_once(layout)) {
    reason = "the layout would write an element twice";
    return false;
  }
  struct Axis {
    int64_t extent, stride;
  };
  std::vector<Axis> axes;
  for (int i = 0; i < layout.rank; i++) {
    if (layout.dims[i] == 0) return true;
    if (layout.dims[i] > 1) axes.push_back({layout.dims[i], layout.strides[i]});
  }
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  for (size_t i = axes.size(); i > 1; i--)
    if (axes[i - 2].stride == axes[i - 1].stride * axes[i - 1].extent) {
      axes[i - 2] = {axes[i - 2].extent * axes[i - 1].extent, axes[i - 1].stride};
      axes.erase(axes.begin() + static_cast<long>(i) - 1);
    }
  // A pattern whose bytes, or 16-bit halves, are equal can be set in smaller elements; 8-byte elements need that.
  uint8_t unit = element_bytes;
  if (unit == 8) {
    if ((pattern >> 32) != (pattern & 0xffffffffu)) {
      reason = "an 8-byte pattern with unequal halves cannot be set";
      return false;
    }
    unit = 4;
  }
  const int64_t scale = element_bytes / unit;
  // Innermost: a dense run of `width` units, or single elements with a pitch.
  int64_t width = scale, height = 1, pitch = element_bytes;
  if (!axes.empty() && axes.back().stride == 1) {
    width = axes.back().extent * scale;
    axes.pop_back();
  }
  if (!axes.empty()) {  // the longest of the other axes becomes the rows: the rest are separate calls
    const auto rows = std::max_element(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.extent < b.extent; });
    height = rows->extent;
    pitch = rows->stride * element_bytes;
    axes.erase(rows);
  }
  int64_t calls = 1;
  for (const Axis& a : axes) calls *= a.extent;
  if (calls > most) {
    reason = "the layout needs " + std::to_string(calls) + " memsets; at most " + std::to_string(most);
    return false;
  }
  std::vector<int64_t> index(axes.size(), 0);
  for (int64_t c = 0; c < calls; c++) {
    int64_t offset = 0;
    for (size_t i = 0; i < axes.size(); i++) offset += index[i] * axes[i].stride;
    MemsetStep m;
    m.target = target;
    m.delta = offset * element_bytes;
    m.pattern = static_cast<uint32_t>(pattern);
    m.element = unit;
    m.width = constant(width);
    m.height = constant(height);
    m.pitch = constant(pitch);
    out.push_back(std::move(m));
    for (size_t i = axes.size(); i-- > 0;) {
      if (++index[i] < axes[i].extent) break;
      index[i] = 0;
    }
  }
  return true;
}

}  // namespace opgraph
