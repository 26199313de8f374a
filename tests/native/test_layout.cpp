// The layout rule of the operand contract, as a table: declared | buffer | verdict. Built and run by sanitize.sh.
#include "pack/layout.h"

#include <cstdio>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

using namespace opgraph;
using Ints = std::vector<int64_t>;

namespace {

int failures = 0;

const char* spell(Rule r) {
  switch (r) {
    case Rule::ok: return "ok";
    case Rule::layout: return "layout";
    case Rule::bytes: return "bytes";
    case Rule::rank: return "rank";
    case Rule::negative_stride: return "negative_stride";
    case Rule::negative_extent: return "negative_extent";
    default: return "other";
  }
}

void set(Layout& l, const Ints& dims, const Ints& strides) {
  l.rank = static_cast<int32_t>(dims.size());
  for (int i = 0; i < l.rank; i++) l.dims[i] = dims[i], l.strides[i] = strides[i];
}

void prepare(OperandSpec& spec, const Ints& dims, const Ints& strides, uint16_t flags = 0) {
  spec.dtype = {kDLFloat, 32, 1};
  spec.item_shift = 2;
  spec.flags = flags;
  set(spec.declared, dims, strides);
  spec.span_bytes = span_elements(spec.declared.rank, dims.data(), strides.data()) * 4;
}

Ints dense(const Ints& dims) {
  Ints s(dims.size());
  c_order(static_cast<int32_t>(dims.size()), dims.data(), s.data());
  return s;
}

void expect(int line, const char* what, bool holds) {
  if (holds) return;
  std::printf("test_layout.cpp:%d: %s\n", line, what);
  failures++;
}
#define CHECK(x) expect(__LINE__, #x, x)

void row(int line, const char* name, const Ints& dims, const Ints& strides, const Ints& bd, const Ints& bs, Rule want,
         uint16_t flags = 0, int64_t ragged_rows = -1) {
  OperandSpec spec;
  prepare(spec, dims, strides, flags);
  spec.ragged_rows = ragged_rows;
  int64_t bytes = -1;
  const Rule got = match_layout(spec, {static_cast<int32_t>(bd.size()), bd.data(), bs.data()}, &bytes);
  if (got == want) return;
  std::printf("test_layout.cpp:%d: %s: want %s, got %s\n", line, name, spell(want), spell(got));
  failures++;
}
#define ROW(...) row(__LINE__, __VA_ARGS__)

void layouts() {
  const Rule ok = Rule::ok, no = Rule::layout;
  ROW("as declared", {2, 3}, {3, 1}, {2, 3}, {3, 1}, ok);
  ROW("extent-1 strides do not matter", {1, 5}, {5, 1}, {1, 5}, {12345, 1}, ok);
  ROW("extent-1 axes do not matter", {1, 4, 6}, {24, 6, 1}, {4, 6}, {6, 1}, ok);
  ROW("(batch, N, K) memory for [batch, K, N]", {2, 5, 3}, {15, 1, 5}, {2, 3, 5}, {15, 5, 1}, ok);
  ROW("forgotten transpose", {3, 5}, {5, 1}, {5, 3}, {3, 1}, no);
  ROW("transposed view of a dense declaration", {2, 3}, {3, 1}, {2, 3}, {1, 2}, no);
  ROW("column-major declaration, its own view", {2, 3}, {1, 2}, {2, 3}, {1, 2}, ok);
  ROW("column-major declaration, C-ordered memory", {2, 3}, {1, 2}, {3, 2}, {2, 1}, ok);
  ROW("equal extents given C-ordered are read as declared", {3, 3}, {1, 3}, {3, 3}, {3, 1}, ok);
  // [B, H, S, D] = [2, 3, 4, 5]
  ROW("BSHD memory for BHSD with BSHD strides", {2, 3, 4, 5}, {60, 5, 15, 1}, {2, 4, 3, 5}, {60, 15, 5, 1}, ok);
  ROW("BSHD for BHSD", {2, 3, 4, 5}, {60, 20, 5, 1}, {2, 4, 3, 5}, {60, 15, 5, 1}, no);
  ROW("packed QKV view", {2, 3, 4, 5}, {180, 5, 45, 1}, {2, 3, 4, 5}, {180, 5, 45, 1}, ok);
  ROW("packed QKV view in storage order", {2, 3, 4, 5}, {180, 5, 45, 1}, {2, 4, 3, 5}, {180, 45, 5, 1}, ok);
  ROW("[B*S, D] for [B, S, D]", {2, 4, 5}, {20, 5, 1}, {8, 5}, {5, 1}, ok);
  ROW("[B, S, D] for [B*S, D]", {8, 5}, {5, 1}, {2, 4, 5}, {20, 5, 1}, ok);
  ROW("[B*S, H*D] for BSHD strides", {2, 3, 4, 5}, {60, 5, 15, 1}, {8, 15}, {15, 1}, ok);
  ROW("merge of axes that are not dense together", {2, 4, 5}, {40, 5, 1}, {8, 5}, {5, 1}, Rule::bytes);
  ROW("merge across a gap", {2, 4, 5}, {40, 5, 1}, {16, 5}, {5, 1}, no);
  ROW("inner merge across a gap", {2, 3, 4}, {20, 5, 1}, {3, 12}, {20, 1}, no);
  ROW("equal strides keep the declared order", {2, 3}, {1, 1}, {3, 2}, {1, 1}, no);
  ROW("merge and split at once", {2, 4, 6}, {24, 6, 1}, {8, 2, 3}, {6, 3, 1}, no);
  ROW("NHWC for NCHW", {2, 3, 4, 5}, {60, 20, 5, 1}, {2, 4, 5, 3}, {60, 15, 3, 1}, no);
  ROW("NCHW declared channels-last, NHWC memory", {2, 3, 4, 5}, {60, 1, 15, 3}, {2, 4, 5, 3}, {60, 15, 3, 1}, ok);
  ROW("dense buffer for padded rows", {2, 3}, {4, 1}, {2, 3}, {3, 1}, Rule::bytes);
  ROW("dense longer buffer for padded rows", {2, 3}, {4, 1}, {3, 3}, {3, 1}, no);
  ROW("padded buffer for dense rows", {2, 3}, {3, 1}, {2, 3}, {4, 1}, no);
  ROW("one-dimensional dense with the span", {2, 3}, {4, 1}, {7}, {1}, ok);
  ROW("one-dimensional dense, more than the span", {2, 3}, {3, 1}, {100}, {1}, ok);
  ROW("one-dimensional dense, one short", {2, 3}, {4, 1}, {6}, {1}, Rule::bytes);
  ROW("one-dimensional strided", {2, 3}, {3, 1}, {6}, {2}, no);
  ROW("longer along the largest stride", {2, 3}, {3, 1}, {5, 3}, {3, 1}, ok);
  ROW("longer along an inner axis", {2, 3}, {3, 1}, {2, 4}, {4, 1}, no);
  ROW("longer along an inner axis of the same stride", {3, 2}, {5, 1}, {3, 4}, {5, 1}, no);
  ROW("longer merged axis", {2, 4, 5}, {20, 5, 1}, {9, 5}, {5, 1}, ok);
  ROW("longer split axis", {8, 5}, {5, 1}, {3, 4, 5}, {20, 5, 1}, ok);
  ROW("split axis whose inner part does not divide", {6, 5}, {5, 1}, {2, 4, 5}, {20, 5, 1}, no);
  ROW("shorter", {3, 3}, {3, 1}, {2, 3}, {3, 1}, Rule::bytes);
  ROW("broadcast input", {4, 3}, {0, 1}, {4, 3}, {0, 1}, ok);
  ROW("broadcast input from one row", {4, 3}, {0, 1}, {3}, {1}, ok);
  ROW("dense buffer for a broadcast declaration", {4, 3}, {0, 1}, {4, 3}, {3, 1}, no);
  ROW("broadcast buffer for a dense declaration", {4, 3}, {3, 1}, {4, 3}, {0, 1}, Rule::bytes);
  ROW("negative stride", {4}, {1}, {4}, {-1}, Rule::negative_stride);
  ROW("negative stride on extent 1 is nothing", {1, 4}, {4, 1}, {1, 4}, {-4, 1}, ok);
  ROW("negative extent", {4}, {1}, {-4}, {1}, Rule::negative_extent);
  ROW("scalar buffer", {1, 1, 1, 1}, {1, 1, 1, 1}, {}, {}, ok);
  ROW("scalar buffer for two elements", {2}, {1}, {}, {}, Rule::bytes);
  ROW("empty as declared", {0, 3}, {3, 1}, {0, 3}, {3, 1}, ok);
  ROW("empty, any stride", {4, 0, 3}, {0, 3, 1}, {4, 0, 3}, {7, 9, 1}, ok);
  ROW("empty one-dimensional", {4, 0, 3}, {0, 3, 1}, {0}, {1}, ok);
  ROW("empty declared, more given", {0, 3}, {3, 1}, {5, 3}, {3, 1}, ok);
  ROW("empty, batch and rows merged", {0, 4, 5}, {20, 5, 1}, {0, 5}, {5, 1}, ok);
  ROW("empty, batch and rows split", {0, 5}, {5, 1}, {0, 4, 5}, {20, 5, 1}, ok);
  ROW("empty, merged into the empty axis", {2, 4, 0, 5}, {0, 0, 5, 1}, {2, 0, 5}, {0, 5, 1}, ok);
  ROW("empty of another shape", {4, 0, 3}, {0, 3, 1}, {0, 5}, {5, 1}, no);
  ROW("empty buffer for a full declaration", {2, 3}, {3, 1}, {0, 3}, {3, 1}, Rule::bytes);
  ROW("rank beyond what is read", {1}, {1}, Ints(40, 1), Ints(40, 1), Rule::rank);
  const int64_t huge = std::numeric_limits<int64_t>::max() / 2;
  ROW("lying extents do not overflow", {2, 3}, {3, 1}, {huge, huge}, {huge, 1}, no);
  ROW("lying extents, one axis declared", {6}, {1}, {2, huge, huge}, {huge, huge, 1}, no);
  ROW("lying extents, longer than declared", {2, 3}, {3, 1}, {huge, 3}, {3, 1}, ok);
  ROW("lying extents, the outermost one longer", {6}, {1}, {huge, 3}, {3, 1}, ok);
}

void ragged() {
  const Rule ok = Rule::ok, no = Rule::layout;
  // [B, H, S, D] = [2, 3, 4, 5] with BSHD strides: rows of 15 elements
  const Ints d = {2, 3, 4, 5}, s = {60, 5, 15, 1};
  ROW("rows of any count", d, s, {7, 3, 5}, {15, 5, 1}, ok, kRagged);
  ROW("more rows than the declaration", d, s, {99, 3, 5}, {15, 5, 1}, ok, kRagged);
  ROW("rows with merged inner axes", d, s, {7, 15}, {15, 1}, ok, kRagged);
  ROW("one-dimensional", d, s, {7 * 15}, {1}, ok, kRagged);
  ROW("as declared", d, s, d, s, ok, kRagged);
  ROW("batch and rows apart", d, s, {2, 4, 3, 5}, {60, 15, 5, 1}, ok, kRagged);
  ROW("inner axes swapped", d, s, {7, 5, 3}, {15, 3, 1}, no, kRagged);
  ROW("other head count", d, s, {7, 4, 5}, {20, 5, 1}, no, kRagged);
  ROW("max_total_seq_len held", d, s, {8, 3, 5}, {15, 5, 1}, ok, kRagged, 8);
  ROW("max_total_seq_len not held", d, s, {7, 3, 5}, {15, 5, 1}, Rule::bytes, kRagged, 8);
  ROW("no rows", d, s, {0, 3, 5}, {15, 5, 1}, ok, kRagged);
  ROW("one row", d, s, {1, 3, 5}, {15, 5, 1}, ok, kRagged);
  ROW("one row of other heads", d, s, {1, 4, 5}, {20, 5, 1}, no, kRagged);
  ROW("rows and heads merged", d, s, {21, 5}, {5, 1}, ok, kRagged);
  // A slice of packed rows: q of [rows, 3, 3, 5]
  const Ints qkv = {180, 5, 45, 1};
  ROW("packed rows", d, qkv, {7, 3, 5}, {45, 5, 1}, ok, kRagged);
  ROW("packed rows, heads merged", d, qkv, {7, 15}, {45, 1}, ok, kRagged);
  ROW("packed rows, all of them held", d, qkv, {7, 3, 5}, {45, 5, 1}, ok, kRagged, 7);
  ROW("packed rows, one more wanted", d, qkv, {7, 3, 5}, {45, 5, 1}, Rule::bytes, kRagged, 8);
  ROW("packed rows, the whole of q, k and v", d, qkv, {7, 9, 5}, {45, 5, 1}, no, kRagged);
  ROW("packed rows, the whole of one row", d, qkv, {1, 9, 5}, {45, 5, 1}, no, kRagged);
  const Ints one = {2, 3, 1, 5};
  ROW("sequences of one row", one, {45, 5, 45, 1}, {7, 3, 5}, {45, 5, 1}, ok, kRagged);
  ROW("sequences of one row, stride unset", one, {15, 5, 1, 1}, {7, 3, 5}, {15, 5, 1}, ok, kRagged);
}

void reordered() {
  ROW("scale blob of any shape", {128, 4}, {4, 1}, {512}, {1}, Rule::ok, kReordered);
  ROW("scale blob, tiles", {128, 4}, {4, 1}, {32, 16}, {16, 1}, Rule::ok, kReordered);
  ROW("scale blob with gaps", {128, 4}, {4, 1}, {128, 4}, {8, 1}, Rule::layout, kReordered);
  ROW("scale blob too small", {128, 4}, {4, 1}, {511}, {1}, Rule::bytes, kReordered);
}

void overrides() {
  OperandSpec spec;
  prepare(spec, {4, 3}, {3, 1});
  Layout live;
  int64_t bytes = 0;
  auto match = [&](const Ints& dims, const Ints& strides, const Ints& bd, const Ints& bs) {
    set(live, dims, strides);
    return match_override(spec, live, {static_cast<int32_t>(bd.size()), bd.data(), bs.data()}, &bytes);
  };
  CHECK(match({2, 3}, {3, 1}, {4, 3}, {3, 1}) == Rule::ok);
  CHECK(match({2, 3}, {3, 1}, {2, 3}, {3, 1}) == Rule::ok);
  CHECK(match({0, 3}, {3, 1}, {0, 3}, {3, 1}) == Rule::ok);
  CHECK(match({8, 3}, {3, 1}, {4, 3}, {3, 1}) == Rule::bytes);
  CHECK(match({4, 6}, {6, 1}, {4, 3}, {3, 1}) == Rule::bytes);
  CHECK(match({2, 3}, {8, 1}, {4, 3}, {8, 1}) == Rule::ok);      // a strided buffer used as it describes itself
  CHECK(match({2, 3}, {3, 1}, {4, 3}, {8, 1}) == Rule::layout);  // and no other way
}

void outputs() {
  auto once = [](const Ints& dims, const Ints& strides) {
    Layout l;
    set(l, dims, strides);
    return writes_once(l);
  };
  CHECK(once({2, 3}, {3, 1}));
  CHECK(once({2, 3}, {1, 2}));
  CHECK(once({2, 3}, {8, 1}));
  CHECK(once({1, 3}, {0, 1}));
  CHECK(once({0, 3}, {0, 0}));
  CHECK(!once({5}, {0}));
  CHECK(!once({2, 3}, {2, 1}));
  CHECK(!once({2, 3}, {1, 1}));
  const Ints dims = {4, 5}, gap = {6, 1};
  const Ints d = dense(dims);
  CHECK(is_dense({2, dims.data(), d.data()}));
  CHECK(!is_dense({2, dims.data(), gap.data()}));
}

}  // namespace

int main() {
  layouts();
  ragged();
  reordered();
  overrides();
  outputs();
  if (failures) return std::printf("%d failed\n", failures), 1;
  std::puts("native layout tests passed");
  return 0;
}
