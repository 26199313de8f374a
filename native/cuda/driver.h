// The CUDA driver as one table of function pointers, filled at run time: nothing is linked, a machine without a driver
// gets a reason instead of a broken import, and tests put a recording fake in its place.
#pragma once

#include <string>

#include "cuda/abi.h"

namespace opgraph::cuda {

struct Driver {
  // name, driver symbol, CUDA version whose behaviour is asked for, signature
#define OG_DRIVER_FUNCTIONS(X)                                                                                          \
  X(init, "cuInit", 12000, Result (*)(unsigned))                                                                        \
  X(driver_version, "cuDriverGetVersion", 12000, Result (*)(int*))                                                      \
  X(error_name, "cuGetErrorName", 12000, Result (*)(Result, const char**))                                              \
  X(error_string, "cuGetErrorString", 12000, Result (*)(Result, const char**))                                          \
  X(device_count, "cuDeviceGetCount", 12000, Result (*)(int*))                                                          \
  X(device_get, "cuDeviceGet", 12000, Result (*)(Device*, int))                                                         \
  X(device_name, "cuDeviceGetName", 12000, Result (*)(char*, int, Device))                                              \
  X(device_attribute, "cuDeviceGetAttribute", 12000, Result (*)(int*, int, Device))                                     \
  X(primary_retain, "cuDevicePrimaryCtxRetain", 12000, Result (*)(Context*, Device))                                    \
  X(context_current, "cuCtxGetCurrent", 12000, Result (*)(Context*))                                                    \
  X(context_set, "cuCtxSetCurrent", 12000, Result (*)(Context))                                                         \
  X(context_device, "cuCtxGetDevice", 12000, Result (*)(Device*))                                                       \
  X(module_load, "cuModuleLoadDataEx", 12000, Result (*)(Module*, const void*, unsigned, int*, void**))                 \
  X(module_unload, "cuModuleUnload", 12000, Result (*)(Module))                                                         \
  X(module_function, "cuModuleGetFunction", 12000, Result (*)(Function*, Module, const char*))                          \
  X(function_attribute_set, "cuFuncSetAttribute", 12000, Result (*)(Function, int, int))                                \
  X(launch, "cuLaunchKernelEx", 12000, Result (*)(const LaunchConfig*, Function, void**, void**))                       \
  X(memset8, "cuMemsetD8Async", 12000, Result (*)(Address, unsigned char, size_t, Stream))                              \
  X(memset16, "cuMemsetD16Async", 12000, Result (*)(Address, unsigned short, size_t, Stream))                           \
  X(memset32, "cuMemsetD32Async", 12000, Result (*)(Address, unsigned, size_t, Stream))                                 \
  X(memset2d8, "cuMemsetD2D8Async", 12000, Result (*)(Address, size_t, unsigned char, size_t, size_t, Stream))          \
  X(memset2d16, "cuMemsetD2D16Async", 12000, Result (*)(Address, size_t, unsigned short, size_t, size_t, Stream))       \
  X(memset2d32, "cuMemsetD2D32Async", 12000, Result (*)(Address, size_t, unsigned, size_t, size_t, Stream))             \
  X(stream_capture_status, "cuStreamIsCapturing", 12000, Result (*)(Stream, int*))                                      \
  X(stream_synchronize, "cuStreamSynchronize", 12000, Result (*)(Stream))

#define OG_FIELD(name, symbol, version, ...) using name##_t = __VA_ARGS__; name##_t name = nullptr;
  OG_DRIVER_FUNCTIONS(OG_FIELD)
#undef OG_FIELD

  bool loaded() const { return launch != nullptr; }
};

// Fills the table from the library at `path` (null: the driver's usual name) and initialises it. Returns the reason on
// failure, empty on success. Not thread-safe by itself: driver() guards it.
std::string load_driver(Driver& table, const char* path);

// The process's table, loaded on first use, once. Check loaded(); driver_failure() tells why it is not.
const Driver& driver();
const std::string& driver_failure();

// Replaces the process's table (tests). An empty path restores the real driver. Returns the reason on failure.
std::string use_driver(const char* path);

// "CUDA_ERROR_X: explanation. What to do." for a result of a call named `what`.
std::string explain(const Driver& table, Result result, const char* what);

// Makes the primary context of `ordinal` current for a scope and restores what was current before.
class ContextGuard {
 public:
  ContextGuard(const Driver& table, int ordinal);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;
  Result result() const { return result_; }

 private:
  const Driver& table_;
  Context previous_ = nullptr;
  bool changed_ = false;
  Result result_ = kSuccess;
};

// The primary context of a device, retained once a process.
Result primary_context(const Driver& table, int ordinal, Context* out);

}  // namespace opgraph::cuda
