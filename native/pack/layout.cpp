#include "pack/layout.h"

#include <limits>

namespace opgraph {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// Producers may lie: products and sums of what they say saturate instead of wrapping.
int64_t times(int64_t a, int64_t b) {
  if (a < 0) a = 0;
  if (b < 0) b = 0;
  if (a != 0 && b > kMax / a) return kMax;
  return a * b;
}

int64_t plus(int64_t a, int64_t b) { return a > kMax - b ? kMax : a + b; }

struct Axis {
  int64_t extent;
  int64_t stride;
};

struct Axes {
  int n = 0;
  Axis axis[kMaxBufferRank];
};

// Extent-1 axes carry no information about memory, whatever their stride says.
Axes squeezed(int32_t rank, const int64_t* dims, const int64_t* strides) {
  Axes out;
  for (int i = 0; i < rank; i++)
    if (dims[i] != 1) out.axis[out.n++] = {dims[i], strides[i]};
  return out;
}

// Declared axes by falling stride: the order in which they lie in memory. Stable, so equal strides keep axis order.
// Insertion sort: a handful of axes, and the standard stable sort would allocate.
void storage_order(Axes& axes) {
  for (int i = 1; i < axes.n; i++) {
    const Axis a = axes.axis[i];
    int k = i;
    for (; k > 0 && axes.axis[k - 1].stride < a.stride; k--) axes.axis[k] = axes.axis[k - 1];
    axes.axis[k] = a;
  }
}

bool c_ordered(const Axes& axes) {
  for (int i = 0; i < axes.n; i++) {
    if (axes.axis[i].stride <= 0) return false;
    if (i && axes.axis[i].stride > axes.axis[i - 1].stride) return false;
  }
  return true;
}

int widest(const Axes& axes) {
  int w = 0;
  for (int i = 1; i < axes.n; i++)
    if (axes.axis[i].stride > axes.axis[w].stride) w = i;
  return w;
}

// (a) Axis by axis; the axis of largest stride may be longer than declared.
bool same_axes(const Axes& want, const Axes& have) {
  if (want.n != have.n) return false;
  const int w = widest(want);
  for (int i = 0; i < want.n; i++) {
    if (want.axis[i].stride != have.axis[i].stride) return false;
    if (want.axis[i].extent != have.axis[i].extent && !(i == w && have.axis[i].extent > want.axis[i].extent)) return false;
  }
  return true;
}

// One coarse axis against the fine axes ending at `end` (exclusive); returns where they begin, or -1.
// `outermost` axes may hold more than declared: only the product of the inner ones has to divide.
int split_of(const Axis& coarse, const Axes& fine, int end) {
  int64_t count = 1, stride = coarse.stride;
  for (int i = end - 1; i >= 0; i--) {
    if (fine.axis[i].stride != stride) return -1;
    count = times(count, fine.axis[i].extent);
    if (count == coarse.extent) return i;
    if (count > coarse.extent) return -1;
    stride = times(stride, fine.axis[i].extent);  // dense together: the next axis starts where this one ends
  }
  return -1;
}

// (b) Both lists in storage order. Each coarse axis is a dense run of fine axes; the outermost one of `have` may be longer.
bool merges(const Axes& coarse, const Axes& fine, bool have_is_coarse, bool longer = true) {
  int end = fine.n;
  for (int c = coarse.n - 1; c > 0; c--) {
    end = split_of(coarse.axis[c], fine, end);
    if (end < 0) return false;
  }
  if (coarse.n == 0) return end == 0;
  // Outermost group: fine axes [0, end).
  if (end == 0) return false;
  int64_t inner = 1, stride = coarse.axis[0].stride;
  for (int i = end - 1; i > 0; i--) {
    if (fine.axis[i].stride != stride) return false;
    inner = times(inner, fine.axis[i].extent);
    stride = times(stride, fine.axis[i].extent);
  }
  if (fine.axis[0].stride != stride) return false;
  const int64_t all = times(inner, fine.axis[0].extent);
  const int64_t held = have_is_coarse ? coarse.axis[0].extent : all;
  const int64_t wanted = have_is_coarse ? all : coarse.axis[0].extent;
  if (held == wanted) return true;
  return longer && held > wanted && wanted % inner == 0;
}

bool same_storage(Axes want, const Axes& have, bool longer = true) {
  if (!c_ordered(have)) return false;
  storage_order(want);
  for (int i = 0; i < want.n; i++)
    if (want.axis[i].stride <= 0) return false;
  return have.n <= want.n ? merges(have, want, true, longer) : merges(want, have, false, longer);
}

bool one_dense_axis(const Axes& have) { return have.n == 0 || (have.n == 1 && have.axis[0].stride == 1); }

// The first `c` axes of `coarse` are each the product of a run of the first `f` axes of `fine`.
bool groups_empty(const Axes& coarse, int c, const Axes& fine, int f, bool have_is_coarse) {
  if (c == 0) return f == 0;
  const int64_t extent = coarse.axis[c - 1].extent;
  int64_t product = 1;
  for (int i = f - 1; i >= 0; i--) {
    product = times(product, fine.axis[i].extent);
    const bool fits = product == extent || (have_is_coarse ? product : extent) == 0;
    if (fits && groups_empty(coarse, c - 1, fine, i, have_is_coarse)) return true;
  }
  return false;
}

// No element exists, so strides say nothing; extents still have to tell the same story, merged or split or neither. A
// declared extent of 0 goes with any: nothing of it is read.
bool same_empty_shape(const Axes& want, const Axes& have) {
  if (have.n > kMaxRank) return false;
  return groups_empty(have, have.n, want, want.n, true) || groups_empty(want, want.n, have, have.n, false);
}

int64_t to_bytes(int64_t elements, uint8_t shift) {
  return elements > (kMax >> shift) ? kMax : elements << shift;
}

// Rules every description has to pass before its layout means anything.
Rule sane(const BufferLayout& b) {
  if (b.rank < 0 || b.rank > kMaxBufferRank) return Rule::rank;
  bool empty = false;
  for (int i = 0; i < b.rank; i++) {
    if (b.dims[i] < 0) return Rule::negative_extent;
    empty = empty || b.dims[i] == 0;
  }
  for (int i = 0; i < b.rank && !empty; i++)
    if (b.dims[i] > 1 && b.strides[i] < 0) return Rule::negative_stride;
  return Rule::ok;
}

Axes one_row(const Layout& declared, const RowLayout& rows) {
  Axes out;
  for (int i = 1; i < declared.rank; i++)
    if (i != rows.axis && declared.dims[i] != 1) out.axis[out.n++] = {declared.dims[i], declared.strides[i]};
  storage_order(out);
  return out;
}

// Ragged tensors: rows of any count, each as declared; the batch axis is no evidence.
bool holds_rows(const RowLayout& rows, const Axes& row, const Axes& have) {
  Axes want;
  want.axis[want.n++] = {0, rows.step};
  for (int i = 0; i < row.n; i++) want.axis[want.n++] = row.axis[i];
  for (int i = 0; i < have.n; i++)
    if (have.axis[i].extent == 0) return same_empty_shape(want, have);
  if (!c_ordered(have)) return false;
  if (same_storage(row, have, false)) return true;  // one row
  if (rows.step <= 0 || have.n == 0) return false;
  want.axis[0].extent = times(have.axis[0].extent, have.axis[0].stride) / rows.step;
  return want.axis[0].extent > 1 && same_storage(want, have);
}

Rule match_ragged(const OperandSpec& spec, const BufferLayout& buffer, int64_t* bytes) {
  const Layout& d = spec.declared;
  const Axes have = squeezed(buffer.rank, buffer.dims, buffer.strides);
  *bytes = to_bytes(span_elements(buffer.rank, buffer.dims, buffer.strides), spec.item_shift);
  const RowLayout rows = row_layout(d);
  if (!one_dense_axis(have) && !same_axes(squeezed(d.rank, d.dims, d.strides), have) &&
      !holds_rows(rows, one_row(d, rows), have))
    return Rule::layout;
  return *bytes < ragged_bytes(spec) ? Rule::bytes : Rule::ok;
}

}  // namespace

int64_t span_elements(int32_t rank, const int64_t* dims, const int64_t* strides) {
  int64_t last = 0;
  for (int i = 0; i < rank; i++) {
    if (dims[i] == 0) return 0;
    if (dims[i] > 1) last = plus(last, times(dims[i] - 1, strides[i]));
  }
  return plus(last, 1);
}

RowLayout row_layout(const Layout& declared) {
  RowLayout out;
  for (int i = 1; i < declared.rank; i++)
    if ((declared.dims[i] != 1 || i == declared.rank - 2) && (out.axis < 0 || declared.strides[i] > out.step))
      out.axis = i, out.step = declared.strides[i];
  const Axes row = one_row(declared, out);
  for (int i = 0; i < row.n; i++)
    out.width = plus(out.width, times(row.axis[i].extent - 1, row.axis[i].stride));
  return out;
}

int64_t ragged_bytes(const OperandSpec& spec) {
  if (spec.ragged_rows <= 0) return 0;
  const RowLayout rows = row_layout(spec.declared);
  return to_bytes(plus(times(spec.ragged_rows - 1, rows.step), rows.width), spec.item_shift);
}

void c_order(int32_t rank, const int64_t* dims, int64_t* strides) {
  int64_t step = 1;
  for (int i = rank - 1; i >= 0; i--) {
    strides[i] = step;
    step = times(step, dims[i] > 0 ? dims[i] : 1);
  }
}

bool writes_once(const BufferLayout& layout) {
  Axes axes = squeezed(layout.rank, layout.dims, layout.strides);
  for (int i = 0; i < axes.n; i++)
    if (axes.axis[i].extent == 0) return true;
  storage_order(axes);
  int64_t span = 1;
  for (int i = axes.n - 1; i >= 0; i--) {
    if (axes.axis[i].stride < span) return false;
    span = plus(span, times(axes.axis[i].extent - 1, axes.axis[i].stride));
  }
  return true;
}

bool is_dense(const BufferLayout& buffer) {
  Axes axes = squeezed(buffer.rank, buffer.dims, buffer.strides);
  for (int i = 0; i < axes.n; i++)
    if (axes.axis[i].extent == 0) return true;
  storage_order(axes);
  int64_t step = 1;
  for (int i = axes.n - 1; i >= 0; i--) {
    if (axes.axis[i].stride != step) return false;
    step = times(step, axes.axis[i].extent);
  }
  return true;
}

Rule match_layout(const OperandSpec& spec, const BufferLayout& buffer, int64_t* bytes) {
  if (const Rule r = sane(buffer); r != Rule::ok) return r;
  if (spec.has(kRagged)) return match_ragged(spec, buffer, bytes);
  *bytes = to_bytes(span_elements(buffer.rank, buffer.dims, buffer.strides), spec.item_shift);
  if (spec.has(kReordered)) {
    // The extents are those of padded tiles: the buffer only has to be one dense block that is large enough.
    if (!is_dense(buffer)) return Rule::layout;
    return *bytes < spec.span_bytes ? Rule::bytes : Rule::ok;
  }
  const Layout& d = spec.declared;
  const Axes want = squeezed(d.rank, d.dims, d.strides);
  const Axes have = squeezed(buffer.rank, buffer.dims, buffer.strides);
  if (spec.span_bytes == 0) {
    if (have.n <= 1 || same_empty_shape(want, have)) return Rule::ok;
    Axes sorted = want;
    storage_order(sorted);
    return same_empty_shape(sorted, have) ? Rule::ok : Rule::layout;
  }
  if (*bytes < spec.span_bytes) return Rule::bytes;
  if (same_axes(want, have) || same_storage(want, have)) return Rule::ok;
  if (one_dense_axis(have)) return Rule::ok;  // (c): one-dimensional, dense, holds the span
  return Rule::layout;
}

Rule match_override(const OperandSpec& spec, const Layout& live, const BufferLayout& buffer, int64_t* bytes) {
  if (const Rule r = sane(buffer); r != Rule::ok) return r;
  *bytes = to_bytes(span_elements(buffer.rank, buffer.dims, buffer.strides), spec.item_shift);
  const int64_t need = to_bytes(span_elements(live.rank, live.dims, live.strides), spec.item_shift);
  if (*bytes < need) return Rule::bytes;
  if (need == 0 || is_dense(buffer)) return Rule::ok;
  // A strided buffer has memory between its elements that is not its own: it may be used only as it describes itself.
  const Axes want = squeezed(live.rank, live.dims, live.strides);
  const Axes have = squeezed(buffer.rank, buffer.dims, buffer.strides);
  return same_axes(want, have) || same_storage(want, have) ? Rule::ok : Rule::layout;
}

}  // namespace opgraph
