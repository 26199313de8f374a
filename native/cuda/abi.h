// The part of the CUDA driver's binary interface that is used here, declared so that the core builds where no CUDA
// toolkit is. Names follow the driver's documentation; layouts are those of CUDA 12.0 and later on 64-bit hosts and are
// pinned by tests/native/test_program.cpp against the toolkit's own header where one is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace opgraph::cuda {

using Result = int;  // 0 is success
using Device = int;
using Address = unsigned long long;
using Context = struct Context_*;
using Stream = struct Stream_*;
using Module = struct Module_*;
using Function = struct Function_*;
using Kernel = struct Kernel_*;
using Graph = struct Graph_*;
using GraphNode = struct GraphNode_*;
using GraphExec = struct GraphExec_*;

constexpr Result kSuccess = 0;
constexpr Result kNotInitialized = 3;

enum AttributeId : int {
  kAccessPolicyWindow = 1,
  kCooperative = 2,
  kClusterDimension = 4,
  kClusterSchedulingPolicy = 5,
  kProgrammaticSerialization = 6,
  kPriority = 8,
  kMemSyncDomainMap = 9,
  kMemSyncDomain = 10,
  kPreferredClusterDimension = 11,
  kPreferredCarveout = 14,
};

struct Attribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    uint32_t words[16];
    Address align;
  } value;
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  Attribute* attributes;
  unsigned attribute_count;
};

struct KernelNodeParams {
  Function function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** kernel_params;
  void** extra;
  Kernel kernel;
  Context context;
};

struct MemsetNodeParams {
  Address dst;
  size_t pitch;
  unsigned value;
  unsigned element_size;
  size_t width;
  size_t height;
};

enum NodeType : int { kKernelNode = 0, kMemcpyNode = 1, kMemsetNode = 2, kEmptyNode = 5 };

enum FunctionAttribute : int { kMaxDynamicSharedBytes = 8, kNonPortableClusterAllowed = 14 };
enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kMaxSharedPerBlockOptin = 97,
  kComputeMajor = 75,
  kComputeMinor = 76,
};
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum CaptureStatus : int { kNotCapturing = 0, kCapturing = 1, kCaptureInvalidated = 2 };

}  // namespace opgraph::cuda
