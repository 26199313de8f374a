// The operand contract: what a declaration says, and whether a buffer's own description fits it.
// Pure C++: no Python, no allocation on the accepting path, no exceptions.
#pragma once

#include <dlpack/dlpack.h>

#include <atomic>
#include <cstdint>

namespace opgraph {

constexpr int kMaxRank = 8;         // rank of a declaration (the field's graph APIs stop at 8)
constexpr int kMaxBufferRank = 32;  // rank of a buffer we are willing to describe

// Extents and strides in storage units of the dtype (sub-byte pairs count once), declared axis order.
struct Layout {
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};
};

// A buffer layout other than the declared one that was accepted before. Immutable once published.
struct SeenLayout {
  int32_t rank;
  int64_t dims[kMaxRank];
  int64_t strides[kMaxRank];
  int64_t bytes;  // what the buffer's own description spans
};

// Everything a check can refuse. The names of the rules are in failure.cpp, their texts in Python.
enum class Rule : uint8_t {
  ok = 0,
  missing,
  type,
  boolean,
  capsule,
  producer,
  dtype,
  subbyte,
  device,
  rank,
  layout,
  bytes,
  negative_stride,
  negative_extent,
  self_overlap,
  read_only,
  requires_grad,
  conjugate,
  negative_bit,
  null_address,
  address,
  overlap,
  inplace,
  ragged_offsets,
  override_length,
  override_rank,
  override_extent,
  override_type,
  override_duplicate,
  override_unknown,
  override_scalar,
  overrides_unsupported,
  ordered_form,
  ordered_length,
  ordered_duplicate,
  ordered_type,
  mapping_type,
  workspace_missing,
  workspace_small,
  workspace_strided,
  workspace_overlap,
  workspace_unknown,
  handle_type,
  handle_device,
  scalar,
};

enum OperandFlag : uint16_t {
  kOutput = 1,
  kByValue = 2,
  kOptional = 4,   // absent means "not produced"
  kReordered = 8,  // block-scale factors: only density and bytes count
  kRagged = 16,
  kPacked = 32,  // sub-byte pairs: uint8 storage is accepted
  kDense = 64,   // the declared layout leaves no gaps
};

constexpr int kSeenSlots = 4;  // other accepted layouts remembered per operand

struct OperandSpec {
  int64_t uid = 0;
  DLDataType dtype{};
  uint16_t flags = 0;
  uint8_t item_shift = 0;  // log2 of the storage unit's bytes
  int32_t ragged_offset = -1;
  int64_t ragged_multiplier = 1;
  int64_t ragged_rows = -1;  // max_total_seq_len, -1 when not given
  Layout declared;
  int64_t span_bytes = 0;  // from the first to past the last element; 0 when any extent is 0
  std::atomic<const SeenLayout*> seen[kSeenSlots] = {};

  bool has(uint16_t flag) const { return (flags & flag) != 0; }
};

// Elements from the first to past the last, saturating at INT64_MAX; 0 when an extent is 0.
int64_t span_elements(int32_t rank, const int64_t* dims, const int64_t* strides);

// A ragged tensor is rows of equal layout, `step` elements apart: its widest axis but the batch (axis 0). The last but
// one axis counts also where its extent is 1, since a sequence of at most one row still has a step.
struct RowLayout {
  int axis = -1;
  int64_t step = 1;
  int64_t width = 1;  // elements from the first to past the last of one row
};
RowLayout row_layout(const Layout& declared);

// What the rows that a ragged tensor is declared to hold in all span; 0 where that is not declared.
int64_t ragged_bytes(const OperandSpec& spec);

// The buffer's layout, or nullptr strides for "C order". `bytes` receives what the buffer spans.
struct BufferLayout {
  int32_t rank;
  const int64_t* dims;
  const int64_t* strides;  // never null here
};

// The whole layout rule of the contract for one operand (cold: runs once per layout seen).
Rule match_layout(const OperandSpec& spec, const BufferLayout& buffer, int64_t* bytes);

// The rule for an operand whose layout is replaced for this call: the buffer only has to hold its span.
Rule match_override(const OperandSpec& spec, const Layout& live, const BufferLayout& buffer, int64_t* bytes);

// True when no two elements share memory by the sorted-span rule, and the elements leave no gaps.
bool is_dense(const BufferLayout& buffer);

// Outputs: sorted by stride, each stride at least the span of the axes below it.
bool writes_once(const BufferLayout& layout);
inline bool writes_once(const Layout& layout) { return writes_once({layout.rank, layout.dims, layout.strides}); }

// Fills C-order strides for `dims`.
void c_order(int32_t rank, const int64_t* dims, int64_t* strides);

}  // namespace opgraph
