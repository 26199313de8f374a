// One call: gather the operands, read them, check them against the contract, check the workspace, run.
// The accepting path allocates nothing, formats nothing and throws nothing; refusals leave through fail() (failure.cpp).
#include <alloca.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "pack/executable.h"
#include "pack/handle.h"
#include "pack/pack.h"
#include "program/python.h"

namespace opgraph {
namespace {

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();
constexpr int kOverrideWords = 512;  // of one set of overrides; larger sets are worked out again on each call

// ---- gathering ------------------------------------------------------------------------------------------------

inline void bind_value(Call& call, int index, PyObject* value) {
  Operand& op = call.operands[index];
  PyObject* old = op.value;
  op.value = Py_NewRef(value);
  Py_XDECREF(old);
}

// A key that is no exact Tensor, int or str hit: numbers that merely compare equal, objects with get_uid, foreign tensors.
// Returns the operand index, -1 to ignore the entry, -2 with an exception set.
OG_COLD int resolve_key(Executable* ex, PyObject* key) {
  if (key == Py_None) return -1;
  Ref index(PyObject_CallMethod(ex->hooks, "key", "(O)", key));
  if (!index) return -2;
  const long i = PyLong_AsLong(index.get());
  if (i == -1 && PyErr_Occurred()) return -2;
  return i >= 0 && i < ex->n ? static_cast<int>(i) : -1;
}

inline bool plain_key(const Executable* ex, PyObject* key) {
  return Py_TYPE(key) == ex->tensor_type || PyLong_CheckExact(key) || PyUnicode_CheckExact(key);
}

// Entries whose key needs Python code to resolve: from a private copy, since that code may change the caller's dict.
OG_COLD bool gather_odd(Call& call, PyObject* mapping) {
  Ref items(PyMapping_Items(mapping));
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); i++) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) return fail(call.ex, Rule::mapping_type, -1, -1, nullptr, mapping);
    PyObject *key = PyTuple_GET_ITEM(item, 0), *value = PyTuple_GET_ITEM(item, 1);
    int index = -2;
    PyObject* found = plain_key(call.ex, key) ? PyDict_GetItemWithError(call.ex->keys, key) : nullptr;
    if (found)
      index = static_cast<int>(PyLong_AsLong(found));
    else if (PyErr_Occurred() || (index = resolve_key(call.ex, key)) == -2)
      return false;
    if (index >= 0 && value != Py_None) bind_value(call, index, value);
  }
  return true;
}

// Remembers the order of an all-Tensor mapping. Runs no Python code.
OG_COLD void remember_order(Executable* ex, PyObject* mapping) {
  if (ex->mappings[kRecords - 1].load(std::memory_order_acquire)) return;  // full
  auto fresh = std::make_unique<MappingRecord>();
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(mapping, &position, &key, &value)) {
    PyObject* found = Py_TYPE(key) == ex->tensor_type ? PyDict_GetItemWithError(ex->keys, key) : nullptr;
    if (!found) return;
    fresh->keys.push_back(key);
    fresh->index.push_back(static_cast<int32_t>(PyLong_AsLong(found)));
  }
  publish(ex->mappings, *ex->record_mutex, std::move(fresh));
}

inline const MappingRecord* order_hint(Executable* ex, PyObject* first, size_t size) {
  for (auto& place : ex->mappings) {
    const MappingRecord* r = place.load(std::memory_order_acquire);
    if (!r) return nullptr;
    if (r->keys.size() == size && r->keys[0] == first) return r;
  }
  return nullptr;
}

bool gather_mapping(Call& call, PyObject* mapping) {
  Executable* ex = call.ex;
  if (OG_UNLIKELY(!PyDict_CheckExact(mapping))) {
    if (PyMapping_Check(mapping) && PyObject_HasAttrString(mapping, "items")) return gather_odd(call, mapping);
    return fail(ex, Rule::mapping_type, -1, -1, nullptr, mapping);
  }
  bool odd = false, error = false, hinted = true, all_tensors = true;
  OG_LOCK(mapping);
  PyObject *key, *value;
  Py_ssize_t position = 0;
  const auto size = static_cast<size_t>(PyDict_GET_SIZE(mapping));
  const MappingRecord* hint = nullptr;
  for (size_t i = 0; PyDict_Next(mapping, &position, &key, &value); i++) {
#ifdef Py_GIL_DISABLED
    Ref held_key(Py_NewRef(key)), held_value(Py_NewRef(value));  // a look-up that waits lets go of the mapping's lock
#endif
    if (i == 0) hint = order_hint(ex, key, size);
    long index;
    if (OG_LIKELY(hint && i < size && hint->keys[i] == key)) {
      index = hint->index[i];
    } else {
      hinted = false;
      all_tensors &= Py_TYPE(key) == ex->tensor_type;
      PyObject* found = OG_LIKELY(plain_key(ex, key)) ? PyDict_GetItemWithError(ex->keys, key) : nullptr;
      if (OG_UNLIKELY(!found)) {
        error = PyErr_Occurred() != nullptr;
        odd = true;
        break;
      }
      index = PyLong_AsLong(found);
    }
    if (OG_LIKELY(index >= 0 && value != Py_None)) bind_value(call, static_cast<int>(index), value);
  }
  if (OG_UNLIKELY(!hinted && all_tensors && !odd && !hint)) remember_order(ex, mapping);
  OG_UNLOCK();
  if (error) return false;
  return OG_LIKELY(!odd) || gather_odd(call, mapping);
}

OG_COLD const OrderRecord* order_record(Executable* ex, PyObject* uids, std::unique_ptr<OrderRecord>& scratch) {
  scratch = std::make_unique<OrderRecord>();
  std::vector<bool> used(ex->n, false);
  Ref sequence(PySequence_Tuple(uids));
  if (!sequence) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence.get()); i++) {
    PyObject* uid = PyTuple_GET_ITEM(sequence.get(), i);
    if (!PyLong_Check(uid) || PyBool_Check(uid)) {
      fail(ex, Rule::ordered_type, -1, static_cast<int>(i), nullptr, uid);
      return nullptr;
    }
    const int64_t value = PyLong_AsLongLong(uid);
    if (value == -1 && PyErr_Occurred()) return nullptr;
    for (const int64_t seen : scratch->uids)
      if (seen == value) {
        fail(ex, Rule::ordered_duplicate, -1, static_cast<int>(i), nullptr, nullptr, value);
        return nullptr;
      }
    Ref exact(PyLong_FromLongLong(value));
    if (!exact) return nullptr;
    PyObject* found = PyDict_GetItemWithError(ex->keys, exact.get());
    int index = found ? static_cast<int>(PyLong_AsLong(found)) : PyErr_Occurred() ? -2 : resolve_key(ex, exact.get());
    if (index == -2) return nullptr;
    scratch->uids.push_back(value);
    scratch->index.push_back(index);
  }
  const OrderRecord* kept = nullptr;
  auto fresh = std::make_unique<OrderRecord>(*scratch);
  kept = publish(ex->orders, *ex->record_mutex, std::move(fresh));
  return kept ? kept : scratch.get();
}

inline bool same_order(const OrderRecord* record, PyObject* const* uids, Py_ssize_t n) {
  if (static_cast<Py_ssize_t>(record->uids.size()) != n) return false;
  for (Py_ssize_t i = 0; i < n; i++) {
    int64_t uid;
    if (OG_UNLIKELY(!plain_int(uids[i], &uid)) || uid != record->uids[i]) return false;
  }
  return true;
}

bool gather_ordered(Call& call, PyObject* buffers, PyObject* uids) {
  Executable* ex = call.ex;
  const bool lists = (PyList_Check(buffers) || PyTuple_Check(buffers)) && (PyList_Check(uids) || PyTuple_Check(uids));
  if (OG_UNLIKELY(!lists)) return fail(ex, Rule::ordered_form, -1, -1, nullptr, buffers);
#ifdef Py_GIL_DISABLED
  // Another thread may change a caller's list: work on what it held at this moment.
  Ref held_buffers(PySequence_Tuple(buffers)), held_uids(PySequence_Tuple(uids));
  if (!held_buffers || !held_uids) return false;
  buffers = held_buffers.get();
  uids = held_uids.get();
#endif
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(uids);
  if (OG_UNLIKELY(PySequence_Fast_GET_SIZE(buffers) != n))
    return fail(ex, Rule::ordered_length, -1, -1, nullptr, nullptr, PySequence_Fast_GET_SIZE(buffers), n);
  PyObject** uid_items = PySequence_Fast_ITEMS(uids);
  const OrderRecord* order = nullptr;
  for (auto& place : ex->orders) {
    const OrderRecord* r = place.load(std::memory_order_acquire);
    if (!r) break;
    if (same_order(r, uid_items, n)) {
      order = r;
      break;
    }
  }
  std::unique_ptr<OrderRecord> scratch;
  if (OG_UNLIKELY(!order)) {
    if (!(order = order_record(ex, uids, scratch))) return false;
    // That ran Python code for a list subclass, which may have changed either list.
    const auto known = static_cast<Py_ssize_t>(order->index.size());
    if (known != n || PySequence_Fast_GET_SIZE(buffers) != n)
      return fail(ex, Rule::ordered_length, -1, -1, nullptr, nullptr, PySequence_Fast_GET_SIZE(buffers), known);
  }
  PyObject** items = PySequence_Fast_ITEMS(buffers);
  for (Py_ssize_t i = 0; i < n; i++) {
    const int32_t index = order->index[i];
    if (index >= 0 && items[i] != Py_None) bind_value(call, index, items[i]);
  }
  return true;
}

// ---- overrides ------------------------------------------------------------------------------------------------

OG_COLD bool too_many_axes(Executable* ex, int index, PyObject* sequence, Py_ssize_t n) {
  return fail(ex, Rule::override_rank, index, -1, nullptr, sequence, n, ex->specs[index].declared.rank);
}

// Without the GIL another thread may change a list while it is read; tuples hold still.
inline bool holds_still(PyObject* sequence) {
#ifdef Py_GIL_DISABLED
  return PyTuple_CheckExact(sequence);
#else
  return PyTuple_CheckExact(sequence) || PyList_CheckExact(sequence);
#endif
}

// An int that is 0 or more and fits in 64 bits.
inline bool read_extent(PyObject* number, int64_t& out) {
  int overflow = 0;
  out = PyLong_AsLongLongAndOverflow(number, &overflow);
  return !overflow && out >= 0;
}

// Other sequences than lists and tuples, and other integers than exact ints: from a private tuple, since iterating and
// `__index__` run Python code that may change the caller's lists.
OG_COLD bool read_odd_extents(Executable* ex, int index, PyObject* sequence, int64_t* out, int32_t* rank) {
  Ref copy(PySequence_Tuple(sequence));
  if (!copy) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
    PyErr_Clear();
    return fail(ex, Rule::override_type, index, -1, nullptr, sequence);
  }
  const Py_ssize_t n = PyTuple_GET_SIZE(copy.get());
  if (n > kMaxRank) return too_many_axes(ex, index, copy.get(), n);
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject* item = PyTuple_GET_ITEM(copy.get(), i);
    Ref number(PyBool_Check(item) ? nullptr : PyNumber_Index(item));
    if (!number) {
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return false;
      PyErr_Clear();
      return fail(ex, Rule::override_type, index, -1, nullptr, copy.get());
    }
    if (!read_extent(number.get(), out[i])) return fail(ex, Rule::override_extent, index, -1, nullptr, copy.get());
  }
  *rank = static_cast<int32_t>(n);
  return true;
}

bool read_extents(Executable* ex, int index, PyObject* sequence, int64_t* out, int32_t* rank) {
  if (OG_UNLIKELY(!holds_still(sequence))) return read_odd_extents(ex, index, sequence, out, rank);
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence);
  if (n > kMaxRank) return too_many_axes(ex, index, sequence, n);
  PyObject** items = PySequence_Fast_ITEMS(sequence);
  for (Py_ssize_t i = 0; i < n; i++) {
    if (OG_UNLIKELY(!PyLong_CheckExact(items[i]))) return read_odd_extents(ex, index, sequence, out, rank);
    if (OG_UNLIKELY(!read_extent(items[i], out[i]))) return fail(ex, Rule::override_extent, index, -1, nullptr, sequence);
  }
  *rank = static_cast<int32_t>(n);
  return true;
}

OG_COLD int find_uid(Executable* ex, PyObject* uid) {
  if (!PyLong_Check(uid) || PyBool_Check(uid)) {
    fail(ex, Rule::override_type, -1, -1, nullptr, uid);
    return -1;
  }
  PyObject* found = PyDict_GetItemWithError(ex->keys, uid);
  const long index = found ? PyLong_AsLong(found) : -1;
  if (index < 0 && !PyErr_Occurred()) fail(ex, Rule::override_unknown, -1, -1, nullptr, uid);
  return static_cast<int>(index);
}

inline int index_of_uid(Executable* ex, PyObject* uid) {
  int64_t value;
  if (OG_LIKELY(plain_int(uid, &value))) {
    int low = 0, high = ex->n;
    while (low < high) {
      const int mid = (low + high) / 2;
      if (ex->specs[mid].uid < value) low = mid + 1; else high = mid;
    }
    if (low < ex->n && ex->specs[low].uid == value) return low;
  }
  return find_uid(ex, uid);
}

bool apply_override(Call& call, int index, PyObject* shape, PyObject* stride) {
  Executable* ex = call.ex;
  const OperandSpec& spec = ex->specs[index];
  Operand& op = call.operands[index];
  if (OG_UNLIKELY(op.layout != &spec.declared)) return fail(ex, Rule::override_duplicate, index);
  if (OG_UNLIKELY(spec.flags & (kByValue | kReordered | kPacked | kRagged))) return fail(ex, Rule::override_scalar, index);
  int32_t rank = 0, stride_rank = 0;
  if (!read_extents(ex, index, shape, op.live.dims, &rank)) return false;
  if (!read_extents(ex, index, stride, op.live.strides, &stride_rank)) return false;
  if (OG_UNLIKELY(rank != spec.declared.rank))
    return fail(ex, Rule::override_rank, index, -1, nullptr, shape, rank, spec.declared.rank);
  if (stride_rank == 0 && rank != 0) {
    c_order(rank, op.live.dims, op.live.strides);
  } else if (OG_UNLIKELY(stride_rank != rank)) {
    return fail(ex, Rule::override_rank, index, -1, nullptr, stride, stride_rank, rank);
  }
  op.live.rank = rank;
  op.layout = &op.live;
  if (OG_UNLIKELY(span_elements(rank, op.live.dims, op.live.strides) > (kUnbounded >> spec.item_shift)))
    return fail(ex, Rule::override_extent, index, -1, nullptr, shape);  // spans more bytes than 64 bits count
  if (OG_UNLIKELY(spec.has(kOutput) && !writes_once(op.live))) return fail(ex, Rule::self_overlap, index, -1, nullptr, stride);
  return true;
}

// The caller's three lists (uids, shapes, strides) as the words of an OverrideRecord. Returns how many, or -1 where they
// are not plain: exact lists or tuples of exact ints, as many strides as extents. Runs no Python code, decides nothing.
int plain_overrides(PyObject* const* lists, Py_ssize_t n, int64_t* words) {
  int at = 0;
  if (!holds_still(lists[0]) || !holds_still(lists[1]) || !holds_still(lists[2])) return -1;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *shape = PySequence_Fast_GET_ITEM(lists[1], i), *stride = PySequence_Fast_GET_ITEM(lists[2], i);
    if (OG_UNLIKELY(!holds_still(shape) || !holds_still(stride))) return -1;
    const Py_ssize_t rank = PySequence_Fast_GET_SIZE(shape);
    if (OG_UNLIKELY(rank > kMaxRank || PySequence_Fast_GET_SIZE(stride) != rank || at + 2 + 2 * rank > kOverrideWords)) return -1;
    if (OG_UNLIKELY(!plain_int(PySequence_Fast_GET_ITEM(lists[0], i), &words[at]))) return -1;
    words[at + 1] = rank;
    int64_t *dims = &words[at + 2], *strides = dims + rank;
    PyObject **d = PySequence_Fast_ITEMS(shape), **s = PySequence_Fast_ITEMS(stride);
    for (Py_ssize_t k = 0; k < rank; k++)
      if (OG_UNLIKELY(!plain_int(d[k], &dims[k]) || !plain_int(s[k], &strides[k]))) return -1;
    at += static_cast<int>(2 + 2 * rank);
  }
  return at;
}

// Overrides that an earlier call gave in the same words, and that passed every rule then: the rules look at nothing but
// these words and the executable.
inline bool recall_overrides(Call& call, PyObject* const* lists, Py_ssize_t n) {
  const OverrideRecord* r = call.ex->override_sets[0].load(std::memory_order_acquire);
  if (!r) return false;
  int64_t words[kOverrideWords];
  const int count = plain_overrides(lists, n, words);
  if (count < 0) return false;
  for (auto& place : call.ex->override_sets) {
    r = place.load(std::memory_order_acquire);
    if (!r) return false;
    if (static_cast<int>(r->words.size()) != count || std::memcmp(r->words.data(), words, count * sizeof(int64_t)) != 0) continue;
    for (size_t i = 0; i < r->operand.size(); i++) {
      Operand& op = call.operands[r->operand[i]];
      op.live = r->layout[i];
      op.layout = &op.live;
    }
    call.geometry = r->geometry;
    return true;
  }
  return false;
}

// Remembers the overrides of a call that passed. Reading the operands may have run code that changed the caller's lists,
// so what they say now has to be what this call used, entry by entry.
OG_COLD void remember_overrides(Call& call, const CallArguments& a) {
  Executable* ex = call.ex;
  if (ex->override_sets[kRecords - 1].load(std::memory_order_acquire)) return;  // full
  PyObject* lists[3] = {a.override_uids, a.override_shapes, a.override_strides};
  for (PyObject* list : lists)
    if (!list || !holds_still(list) || PySequence_Fast_GET_SIZE(list) != PySequence_Fast_GET_SIZE(lists[0])) return;
  int64_t words[kOverrideWords];
  const int count = plain_overrides(lists, PySequence_Fast_GET_SIZE(lists[0]), words);
  if (count <= 0) return;
  int32_t overridden = 0;
  for (int i = 0; i < ex->n; i++) overridden += call.operands[i].layout != &ex->specs[i].declared;
  auto fresh = std::make_unique<OverrideRecord>();
  std::vector<bool> seen(ex->n, false);
  for (int at = 0; at < count;) {
    int i = 0;
    while (i < ex->n && ex->specs[i].uid != words[at]) i++;
    if (i == ex->n || seen[i]) return;
    seen[i] = true;
    const Layout& used = *call.operands[i].layout;
    const int64_t rank = words[at + 1];
    if (used.rank != rank || std::memcmp(used.dims, &words[at + 2], rank * sizeof(int64_t)) != 0 ||
        std::memcmp(used.strides, &words[at + 2 + rank], rank * sizeof(int64_t)) != 0)
      return;
    fresh->operand.push_back(i);
    fresh->layout.push_back(used);
    at += static_cast<int>(2 + 2 * rank);
  }
  if (static_cast<int32_t>(fresh->operand.size()) != overridden) return;
  fresh->words.assign(words, words + count);
  fresh->geometry = Py_NewRef(call.geometry);
  if (!publish(ex->override_sets, *ex->record_mutex, std::move(fresh))) Py_DECREF(call.geometry);
}

bool gather_overrides(Call& call, const CallArguments& a) {
  Executable* ex = call.ex;
  PyObject* lists[3] = {a.override_uids, a.override_shapes, a.override_strides};
  Py_ssize_t n = -1;
#ifdef Py_GIL_DISABLED
  Ref held[3];  // what the lists hold at this moment: another thread may change them
#endif
  for (int i = 0; i < 3; i++) {
    PyObject* list = lists[i];
    if (list && list != Py_None && !PyList_Check(list) && !PyTuple_Check(list))
      return fail(ex, Rule::override_type, -1, -1, nullptr, list);
#ifdef Py_GIL_DISABLED
    if (list && list != Py_None) {
      held[i] = Ref(PySequence_Tuple(list));
      if (!held[i]) return false;
      list = lists[i] = held[i].get();
    }
#endif
    const Py_ssize_t size = list && list != Py_None ? PySequence_Fast_GET_SIZE(list) : 0;
    if (n >= 0 && size != n) return fail(ex, Rule::override_length, -1, -1, nullptr, nullptr, size, n);
    n = size;
  }
  if (n <= 0) return true;
  if (!ex->overrides) return fail(ex, Rule::overrides_unsupported, -1);
  if (OG_LIKELY(!ex->dynamic) && recall_overrides(call, lists, n)) return true;
  for (Py_ssize_t i = 0; i < n; i++) {
    // Reading an entry may run Python code that changes the lists: look again, and hold what is being read.
    for (PyObject* list : lists)
      if (OG_UNLIKELY(PySequence_Fast_GET_SIZE(list) != n))
        return fail(ex, Rule::override_length, -1, -1, nullptr, nullptr, PySequence_Fast_GET_SIZE(list), n);
    Ref uid(Py_NewRef(PySequence_Fast_GET_ITEM(lists[0], i)));
    Ref shape(Py_NewRef(PySequence_Fast_GET_ITEM(lists[1], i))), stride(Py_NewRef(PySequence_Fast_GET_ITEM(lists[2], i)));
    const int index = index_of_uid(ex, uid.get());
    if (index < 0 || !apply_override(call, index, shape.get(), stride.get())) return false;
  }
  return true;
}

// Appends the overridden operands of this call as comparable words.
int override_words(const Call& call, int64_t* words, int capacity) {
  int n = 0;
  for (int i = 0; i < call.ex->n; i++) {
    const Operand& op = call.operands[i];
    if (op.layout != &op.live) continue;
    const int need = 2 + 2 * op.live.rank;
    if (n + need > capacity) return -1;
    words[n++] = i;
    words[n++] = op.live.rank;
    for (int k = 0; k < op.live.rank; k++) words[n++] = op.live.dims[k];
    for (int k = 0; k < op.live.rank; k++) words[n++] = op.live.strides[k];
  }
  return n;
}

PyObject* extents_tuple(const int64_t* values, int n) {
  PyObject* t = PyTuple_New(n);
  for (int i = 0; t && i < n; i++) {
    PyObject* v = PyLong_FromLongLong(values[i]);
    if (!v) {
      Py_CLEAR(t);
      break;
    }
    PyTuple_SET_ITEM(t, i, v);
  }
  return t;
}

// First sight of a set of overrides: the graph's own shape rules decide (hooks.geometry); accepted sets are remembered.
OG_COLD bool check_geometry(Call& call, const int64_t* words, int n) {
  Executable* ex = call.ex;
  Ref overrides(PyDict_New());
  if (!overrides) return false;
  for (int i = 0; i < ex->n; i++) {
    const Operand& op = call.operands[i];
    if (op.layout != &op.live) continue;
    Ref dims(extents_tuple(op.live.dims, op.live.rank)), strides(extents_tuple(op.live.strides, op.live.rank));
    Ref key(PyLong_FromLong(i));
    if (!dims || !strides || !key) return false;
    Ref pair(PyTuple_Pack(2, dims.get(), strides.get()));
    if (!pair || PyDict_SetItem(overrides.get(), key.get(), pair.get()) < 0) return false;
  }
  PyObject* geometry = PyObject_CallMethod(ex->hooks, "geometry", "(O)", overrides.get());
  if (!geometry) return false;
  if (n >= 0) {
    auto fresh = std::make_unique<GeometryRecord>();
    fresh->words.assign(words, words + n);
    fresh->geometry = geometry;
    if (const GeometryRecord* kept = publish(ex->geometries, *ex->record_mutex, std::move(fresh))) {
      call.geometry = kept->geometry;
      return true;
    }
  }
  call.geometry = geometry;
  call.owns_geometry = true;
  return true;
}

bool resolve_geometry(Call& call) {
  int64_t words[512];
  const int n = override_words(call, words, 512);
  if (n == 0) return true;
  if (n > 0)
    for (auto& place : call.ex->geometries) {
      const GeometryRecord* r = place.load(std::memory_order_acquire);
      if (!r) break;
      if (static_cast<int>(r->words.size()) == n && std::memcmp(r->words.data(), words, n * sizeof(int64_t)) == 0) {
        call.geometry = r->geometry;
        return true;
      }
    }
  return check_geometry(call, words, n);
}

// ---- checking one operand ---------------------------------------------------------------------------------------

inline bool same_extents(int32_t rank, const int64_t* a, const int64_t* b) {
  int64_t difference = 0;
  for (int i = 0; i < rank; i++) difference |= a[i] ^ b[i];
  return difference == 0;
}

inline bool layout_is(const DLTensor& t, int32_t rank, const int64_t* dims, const int64_t* strides) {
  return t.ndim == rank && same_extents(rank, t.shape, dims) && same_extents(rank, t.strides, strides);
}

// Live extents from the buffer itself (is_dynamic_shape_enabled): the buffer has to speak the declared axis order.
bool take_live_layout(Operand& op, const OperandSpec& spec) {
  const DLTensor& t = op.reading.t;
  if (t.ndim != spec.declared.rank || spec.flags & (kByValue | kReordered | kPacked | kRagged)) return false;
  op.live.rank = t.ndim;
  for (int i = 0; i < t.ndim; i++) {
    if (t.shape[i] < 0 || t.strides[i] < 0) return false;
    op.live.dims[i] = t.shape[i];
    op.live.strides[i] = t.strides[i];
  }
  if (spec.has(kOutput) && !writes_once(op.live)) return false;
  op.layout = &op.live;
  return true;
}

// The declared strides with other extents: live ones, also where the buffer is merely longer along its widest axis, which
// would serve the declaration as it is.
bool other_extents(const Layout& declared, const DLTensor& t) {
  if (t.ndim != declared.rank || same_extents(t.ndim, t.shape, declared.dims)) return false;
  for (int i = 0; i < t.ndim; i++)
    if (t.strides[i] != declared.strides[i] && (t.shape[i] != 1 || declared.dims[i] != 1)) return false;
  return true;
}

// A buffer of an output in which several elements share an address is named as that, whatever else it breaks.
OG_COLD Rule output_layout(const OperandSpec& spec, const DLTensor& t, Rule rule) {
  const bool shape = rule == Rule::layout || rule == Rule::bytes;
  return shape && spec.has(kOutput) && !writes_once(BufferLayout{t.ndim, t.shape, t.strides}) ? Rule::self_overlap : rule;
}

OG_COLD Rule check_layout_slow(Call& call, int index) {
  Executable* ex = call.ex;
  const OperandSpec& spec = ex->specs[index];
  Operand& op = call.operands[index];
  const DLTensor& t = op.reading.t;
  if (OG_UNLIKELY(ex->dynamic) && other_extents(spec.declared, t) && take_live_layout(op, spec)) {
    op.available = span_elements(t.ndim, t.shape, t.strides);
    op.available = op.available > (kUnbounded >> spec.item_shift) ? kUnbounded : op.available << spec.item_shift;
    return Rule::ok;
  }
  const BufferLayout given{t.ndim, t.shape, t.strides};
  if (const SeenLayout* s = find_seen(spec, given)) {
    op.available = s->bytes;
    return Rule::ok;
  }
  const Rule r = match_layout(spec, given, &op.available);
  if (r == Rule::ok) {
    publish_seen(ex->specs[index], given, op.available, *ex->record_mutex);
    return r;
  }
  if (ex->dynamic && (r == Rule::layout || r == Rule::bytes) && take_live_layout(op, spec)) return Rule::ok;
  return output_layout(spec, t, r);
}

OG_COLD bool host_rule(const Executable* ex, const OperandSpec& spec, const Reading& r) {
  return is_host(r.t.device) && (is_host(ex->device) || spec.has(kByValue));
}

// The storage of packed pairs may also be shown as bytes; an unpacked array of the same element type may not.
inline Rule check_dtype(const OperandSpec& spec, const DLDataType& given) {
  if (OG_LIKELY(same_dtype(given, spec.dtype))) return Rule::ok;
  if (spec.has(kPacked)) {
    if (given.code == kDLUInt && given.bits == 8 && given.lanes == 1) return Rule::ok;
    if (given.code == spec.dtype.code) return Rule::subbyte;
  }
  return Rule::dtype;
}

// An operand whose layout is replaced for this call. Mostly the buffer is an allocation of the declared size, which holds
// whatever does not span more; match_override has the whole rule.
__attribute__((noinline)) Rule check_overridden(const OperandSpec& spec, Operand& op) {
  const DLTensor& t = op.reading.t;
  const Layout& live = op.live;
  op.nbytes = op.available = span_elements(live.rank, live.dims, live.strides) << spec.item_shift;
  if (op.nbytes <= spec.span_bytes && spec.has(kDense) && layout_is(t, spec.declared.rank, spec.declared.dims, spec.declared.strides)) {
    op.available = spec.span_bytes;
    return Rule::ok;
  }
  if (layout_is(t, live.rank, live.dims, live.strides)) return Rule::ok;
  const Rule r = match_override(spec, live, {t.ndim, t.shape, t.strides}, &op.available);
  return r == Rule::ok ? r : output_layout(spec, t, r);
}

// Everything that can be wrong with the operand once it is read.
inline Rule check_operand(Call& call, int index) {
  Executable* ex = call.ex;
  const OperandSpec& spec = ex->specs[index];
  Operand& op = call.operands[index];
  const Reading& r = op.reading;
  op.nbytes = spec.span_bytes;
  if (OG_UNLIKELY(r.address_only)) {
    op.available = kUnbounded;
    if (op.layout == &op.live)
      op.nbytes = span_elements(op.live.rank, op.live.dims, op.live.strides) << spec.item_shift;
    else if (spec.has(kRagged)) {
      if (OG_UNLIKELY(!r.t.data && op.nbytes > 0)) return Rule::null_address;
      op.nbytes = ragged_bytes(spec);  // 0 where unknown: the caller vouches for it
    }
  } else {
    if (const Rule d = check_dtype(spec, r.t.dtype); OG_UNLIKELY(d != Rule::ok)) return d;
    if (OG_UNLIKELY(!same_device(r.t.device, ex->device)) && !host_rule(ex, spec, r)) return Rule::device;
    if (OG_UNLIKELY(op.layout == &op.live)) {
      if (const Rule o = check_overridden(spec, op); o != Rule::ok) return o;
    } else if (OG_LIKELY(layout_is(r.t, spec.declared.rank, spec.declared.dims, spec.declared.strides) && !spec.has(kRagged))) {
      op.available = spec.span_bytes;
    } else {
      if (const Rule l = check_layout_slow(call, index); l != Rule::ok) return l;
      if (spec.has(kRagged)) op.nbytes = op.available;
      if (op.layout == &op.live) op.nbytes = op.available;
    }
    if (OG_UNLIKELY(r.flags_of != nullptr))
      if (const Rule f = check_flags(op.value, r, spec.has(kOutput)); OG_UNLIKELY(f != Rule::ok)) return f;
    if (OG_UNLIKELY(spec.has(kOutput) && (r.read_only || is_input_slot(op.value)))) return Rule::read_only;
  }
  if (OG_UNLIKELY(!r.t.data && op.nbytes > 0)) return Rule::null_address;
  return Rule::ok;
}

OG_COLD bool refuse(Call& call, int index, Rule rule) {
  Operand& op = call.operands[index];
  const OperandSpec& spec = call.ex->specs[index];
  if (rule == Rule::producer) return fail_producer(call.ex, rule, index, nullptr, op.value);
  if (PyErr_Occurred()) return fail_producer(call.ex, rule, index, nullptr, op.value);
  const bool described = rule != Rule::type && rule != Rule::boolean && rule != Rule::capsule && rule != Rule::address;
  int64_t need = spec.span_bytes;
  if (op.layout == &op.live) need = span_elements(op.live.rank, op.live.dims, op.live.strides) << spec.item_shift;
  return fail(call.ex, rule, index, -1, described ? &op.reading : nullptr, op.value, described ? op.available : -1, need);
}

// Pass-by-value: Python numbers and NumPy scalars through the hook, one-element host arrays by copying their bytes.
OG_COLD bool read_scalar(Call& call, int index, const ReadContext& context) {
  Operand& op = call.operands[index];
  const OperandSpec& spec = call.ex->specs[index];
  PyObject* v = op.value;
  const int64_t size = int64_t{1} << spec.item_shift;
  op.nbytes = size;
  if (PyLong_Check(v) || PyFloat_Check(v) || PyComplex_Check(v) || is_numpy_scalar(v)) {
    Ref bytes(PyObject_CallMethod(call.ex->hooks, "scalar", "Oi", v, index));
    if (!bytes) return false;
    if (!PyBytes_Check(bytes.get()) || PyBytes_GET_SIZE(bytes.get()) != size || size > 16) {
      PyErr_SetString(PyExc_RuntimeError, "hooks.scalar did not return the bytes of one element");
      return false;
    }
    std::memcpy(op.scalar, PyBytes_AS_STRING(bytes.get()), size);
  } else {
    ReadContext host = context;
    host.device = {kDLCPU, 0};
    const TypeEntry* none = nullptr;
    Rule r = read_buffer(v, host, op.reading, none);
    if (r == Rule::ok) {
      if (!same_dtype(op.reading.t.dtype, spec.dtype)) r = Rule::dtype;
      else if (!is_host(op.reading.t.device)) r = Rule::device;
      for (int i = 0; r == Rule::ok && i < op.reading.t.ndim; i++)
        if (op.reading.t.shape[i] != 1) r = Rule::scalar;
      if (r == Rule::ok && !op.reading.t.data) r = Rule::null_address;
      if (r == Rule::ok && op.reading.flags_of) r = check_flags(v, op.reading, false);
    }
    if (r != Rule::ok) {
      op.available = -1;
      return refuse(call, index, r);
    }
    std::memcpy(op.scalar, op.reading.t.data, size);
  }
  op.reading.t.data = op.scalar;
  op.available = size;
  return true;
}

// Offsets of a ragged operand, where they lie in host memory: not negative, not falling, ending inside the buffer. The
// buffer may end with its last row, before the next one would begin (a slice of packed rows), and the last offset then
// lies behind it; so what counts there is where the last whole row ends.
template <class T>
bool offsets_fit(const T* offsets, const Layout& layout, int64_t multiplier, int64_t elements, const RowLayout& rows) {
  int64_t count = 1, step = 1, previous = 0, limit = elements;
  if (elements != kUnbounded && rows.step > 0 && elements >= rows.width)
    limit = std::max(elements, ((elements - rows.width) / rows.step + 1) * rows.step);
  for (int i = 0; i < layout.rank; i++)
    if (layout.dims[i] != 1) count = layout.dims[i], step = layout.strides[i];
  for (int64_t i = 0; i < count; i++) {
    const int64_t o = offsets[i * step];
    if (o < previous || o > limit / multiplier) return false;
    const int64_t begin = previous * multiplier, end = o * multiplier;
    if (end > elements && end - begin >= rows.width &&
        begin + (end - begin - rows.width) / rows.step * rows.step + rows.width > elements)
      return false;
    previous = o;
  }
  return true;
}

OG_COLD bool check_ragged(Call& call) {
  Executable* ex = call.ex;
  if (!is_host(ex->device)) return true;
  for (int i = 0; i < ex->n; i++) {
    const OperandSpec& spec = ex->specs[i];
    if (spec.ragged_offset < 0 || !call.operands[i].value) continue;
    const Operand& at = call.operands[spec.ragged_offset];
    if (!at.value || !at.reading.t.data) continue;
    const int64_t elements = call.operands[i].available == kUnbounded ? kUnbounded : call.operands[i].available >> spec.item_shift;
    const RowLayout rows = row_layout(spec.declared);
    const bool wide = ex->specs[spec.ragged_offset].dtype.bits == 64;
    const bool fits =
        wide ? offsets_fit(static_cast<const int64_t*>(at.reading.t.data), *at.layout, spec.ragged_multiplier, elements, rows)
             : offsets_fit(static_cast<const int32_t*>(at.reading.t.data), *at.layout, spec.ragged_multiplier, elements, rows);
    if (!fits) return fail(ex, Rule::ragged_offsets, i, spec.ragged_offset, &call.operands[i].reading, nullptr,
                           elements == kUnbounded ? -1 : elements);
  }
  return true;
}

// ---- overlap ----------------------------------------------------------------------------------------------------

// Extents and strides agree wherever a stride is used.
inline bool same_layout(const Layout& a, const Layout& b) {
  if (a.rank != b.rank || !same_extents(a.rank, a.dims, b.dims)) return false;
  for (int i = 0; i < a.rank; i++)
    if (a.dims[i] != 1 && a.strides[i] != b.strides[i]) return false;
  return true;
}

// Where the elements of an operand lie. Those of a ragged one are the rows its buffer holds, in place of the batch and
// the rows of an entry.
Layout element_layout(const OperandSpec& spec, const Operand& op) {
  Layout out = *op.layout;
  if (!spec.has(kRagged)) return out;
  const RowLayout rows = row_layout(out);
  const int64_t held = op.nbytes >> spec.item_shift;
  if (rows.axis >= 0) out.dims[rows.axis] = 1;
  out.dims[0] = held < rows.width ? 0 : rows.step > 0 ? (held - rows.width) / rows.step + 1 : 1;
  out.strides[0] = rows.step;
  return out;
}

OG_COLD bool ranges_meet(Call& call, int a, int b) {
  Executable* ex = call.ex;
  const Operand &x = call.operands[a], &y = call.operands[b];
  const bool full = x.reading.t.data == y.reading.t.data && x.nbytes == y.nbytes && same_layout(*x.layout, *y.layout) &&
                    same_dtype(ex->specs[a].dtype, ex->specs[b].dtype);
  const bool b_output = ex->specs[b].has(kOutput);
  if (full && !b_output) {
    if ((*ex->inplace)[static_cast<size_t>(a) * ex->n + b]) return true;
    return fail(ex, Rule::inplace, a, b);
  }
  // Interleaved layouts (slices of one packed buffer) share a range of addresses but no element. Where the layouts are
  // the contract's own, the answer depends on the distance of the addresses alone and is remembered by it.
  const int64_t distance = static_cast<const char*>(y.reading.t.data) - static_cast<const char*>(x.reading.t.data);
  const auto fixed = [&](int i) { return call.operands[i].layout == &ex->specs[i].declared && !ex->specs[i].has(kRagged); };
  const bool declared = fixed(a) && fixed(b);
  if (declared)
    for (auto& place : ex->disjoint) {
      const DisjointRecord* r = place.load(std::memory_order_acquire);
      if (!r) break;
      if (r->a == a && r->b == b && r->distance == distance) return true;
    }
  const Layout xl = element_layout(ex->specs[a], x), yl = element_layout(ex->specs[b], y);
  Ref xd(extents_tuple(xl.dims, xl.rank)), xs(extents_tuple(xl.strides, xl.rank));
  Ref yd(extents_tuple(yl.dims, yl.rank)), ys(extents_tuple(yl.strides, yl.rank));
  if (!xd || !xs || !yd || !ys) return false;
  Ref verdict(PyObject_CallMethod(ex->hooks, "overlaps", "(LOOi)(LOOi)", 0LL, xd.get(), xs.get(), 1 << ex->specs[a].item_shift,
                                  static_cast<long long>(distance), yd.get(), ys.get(), 1 << ex->specs[b].item_shift));
  if (!verdict) return false;
  const int meets = PyObject_IsTrue(verdict.get());
  if (meets < 0) return false;
  if (meets) return fail(ex, Rule::overlap, a, b);
  if (declared) {
    auto fresh = std::make_unique<DisjointRecord>(DisjointRecord{a, b, distance});
    publish(ex->disjoint, *ex->record_mutex, std::move(fresh));
  }
  return true;
}

inline bool check_overlaps(Call& call) {
  Executable* ex = call.ex;
  for (const int32_t a : *ex->outputs) {
    const Operand& x = call.operands[a];
    if (!x.value || !x.nbytes) continue;
    const auto x0 = reinterpret_cast<uintptr_t>(x.reading.t.data), x1 = x0 + x.nbytes;
    for (int b = 0; b < ex->n; b++) {
      if (b == a) continue;
      const Operand& y = call.operands[b];
      const auto y0 = reinterpret_cast<uintptr_t>(y.reading.t.data);
      if (OG_LIKELY(!y.value || y0 >= x1 || y0 + y.nbytes <= x0)) continue;
      if (!y.nbytes || ex->specs[b].has(kByValue)) continue;
      if (ex->specs[b].has(kOutput) && b < a) continue;  // the pair was looked at from the other side
      if (!ranges_meet(call, a, b)) return false;
    }
  }
  return true;
}

// ---- workspace --------------------------------------------------------------------------------------------------

OG_COLD bool check_workspace(Call& call, PyObject* workspace, const ReadContext& context) {
  Executable* ex = call.ex;
  const bool given = workspace && workspace != Py_None;
  if (!given) {
    if (ex->workspace_bytes == 0) return true;
    return fail(ex, Rule::workspace_missing, -1, -1, nullptr, nullptr, 0, ex->workspace_bytes);
  }
  call.workspace = Py_NewRef(workspace);
  Reading& r = call.workspace_reading;
  const TypeEntry* none = nullptr;
  const Rule read = call.owning ? read_owning(workspace, context, r) : read_buffer(workspace, context, r, none);
  if (read != Rule::ok) {
    const bool raised = PyErr_Occurred() != nullptr;
    if (read == Rule::producer || raised) return fail_producer(ex, read, -1, nullptr, workspace);
    return fail(ex, read, -1, -1, read == Rule::device ? &r : nullptr, workspace, -1, ex->workspace_bytes);
  }
  if (!r.address_only) {
    const BufferLayout layout{r.t.ndim, r.t.shape, r.t.strides};
    if (r.t.ndim > kMaxBufferRank) return fail(ex, Rule::rank, -1, -1, &r, workspace);
    for (int i = 0; i < r.t.ndim; i++)
      if (r.t.shape[i] < 0 || (r.t.shape[i] > 1 && r.t.strides[i] < 0))
        return fail(ex, Rule::workspace_strided, -1, -1, &r, workspace);
    if (!is_dense(layout)) return fail(ex, Rule::workspace_strided, -1, -1, &r, workspace);
    if (!same_device(r.t.device, ex->device) && !(is_host(r.t.device) && is_host(ex->device)))
      return fail(ex, Rule::device, -1, -1, &r, workspace);
    if (r.flags_of)
      if (const Rule f = check_flags(workspace, r, true); f != Rule::ok) {
        if (PyErr_Occurred()) return fail_producer(ex, f, -1, nullptr, workspace);
        return fail(ex, f, -1, -1, &r, workspace);
      }
    if (r.read_only || is_input_slot(workspace)) return fail(ex, Rule::read_only, -1, -1, &r, workspace);
    const int64_t units = span_elements(r.t.ndim, r.t.shape, r.t.strides);
    const int64_t bits = int64_t{r.t.dtype.bits} * r.t.dtype.lanes;
    call.workspace_size = bits && units > kUnbounded / bits ? kUnbounded : units * bits / 8;
    if (call.workspace_size < ex->workspace_bytes)
      return fail(ex, Rule::workspace_small, -1, -1, &r, nullptr, call.workspace_size, ex->workspace_bytes);
  }
  if (!r.t.data && ex->workspace_bytes > 0)
    return fail(ex, Rule::workspace_missing, -1, -1, nullptr, nullptr, 0, ex->workspace_bytes);
  const int64_t size = call.workspace_size >= 0 ? call.workspace_size : ex->workspace_bytes;
  const auto w0 = reinterpret_cast<uintptr_t>(r.t.data), w1 = w0 + size;
  for (int i = 0; i < ex->n && size > 0; i++) {
    const Operand& op = call.operands[i];
    if (!op.value || !op.nbytes || ex->specs[i].has(kByValue)) continue;
    const auto a0 = reinterpret_cast<uintptr_t>(op.reading.t.data), a1 = a0 + op.nbytes;
    if (a0 < w1 && w0 < a1) return fail(ex, Rule::workspace_overlap, i);
  }
  return true;
}

// ---- stream -----------------------------------------------------------------------------------------------------

bool resolve_stream(Call& call, PyObject* handle) {
  Executable* ex = call.ex;
  call.stream = ex->stream;
  if (OG_LIKELY(!handle || handle == Py_None)) return true;
  if (!PyObject_TypeCheck(handle, HandleType)) return fail(ex, Rule::handle_type, -1, -1, nullptr, handle);
  auto* h = reinterpret_cast<Handle*>(handle);
  if (!same_device(h->device, ex->device) && !(is_host(h->device) && is_host(ex->device)))
    return fail(ex, Rule::handle_device, -1, -1, nullptr, nullptr, h->device.device_type, h->device.device_id);
  call.stream = h->stream;
  return true;
}

// Without a handle, work goes to the current stream of the first device operand's framework.
OG_COLD bool framework_stream(Call& call) {
  for (int i = 0; i < call.ex->n; i++) {
    const Operand& op = call.operands[i];
    if (!op.value || op.reading.address_only || is_host(op.reading.t.device)) continue;
    const TypeEntry* e = find_exchange(Py_TYPE(op.value));
    if (!e || !e->api->current_work_stream) continue;
    void* stream = nullptr;
    if (e->api->current_work_stream(call.ex->device.device_type, call.ex->device.device_id, &stream) != 0) {
      if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s does not tell its current stream", Py_TYPE(op.value)->tp_name);
      return false;
    }
    call.stream = static_cast<int64_t>(reinterpret_cast<uintptr_t>(stream));
    return true;
  }
  return true;
}

}  // namespace

namespace {
thread_local int t_depth = 0;  // calls of this thread that are under way
}

bool prepare_call(Call& call, const CallArguments& a) {
  Executable* ex = call.ex;
  const int n = ex->n;
  for (int i = 0; i < n; i++) {
    Operand& op = call.operands[i];
    op.value = nullptr;
    op.layout = &ex->specs[i].declared;
    op.nbytes = 0;
    op.available = -1;
    op.reading.reset();
  }
  call.workspace_reading.reset();
  if (!resolve_stream(call, a.handle)) return false;
  if (!a.tensor_dict) return fail(ex, Rule::mapping_type, -1);
  if (OG_UNLIKELY(a.override_uids || a.override_shapes || a.override_strides))
    if (!gather_overrides(call, a)) return false;
  if (a.tensor_uids && a.tensor_uids != Py_None ? !gather_ordered(call, a.tensor_dict, a.tensor_uids)
                                                 : !gather_mapping(call, a.tensor_dict))
    return false;
  const ReadContext context{ex->device, call.stream, ex->hooks};
  const TypeEntry* last = nullptr;
  for (int i = 0; i < n; i++) {
    Operand& op = call.operands[i];
    if (OG_UNLIKELY(!op.value)) {
      if (ex->has_defaults && ex->defaults[i]) {
        op.value = Py_NewRef(ex->defaults[i]);
      } else if (ex->specs[i].has(kOptional)) {
        continue;
      } else {
        return fail(ex, Rule::missing, i);
      }
    }
    if (OG_UNLIKELY(ex->specs[i].has(kByValue))) {
      if (!read_scalar(call, i, context)) return false;
      continue;
    }
    const Rule read = OG_UNLIKELY(call.owning) ? read_owning(op.value, context, op.reading)
                                               : read_buffer(op.value, context, op.reading, last);
    const Rule rule = OG_LIKELY(read == Rule::ok) ? check_operand(call, i) : read;
    if (OG_UNLIKELY(rule != Rule::ok)) return refuse(call, i, rule);
  }
  if (OG_UNLIKELY((a.override_uids || ex->dynamic) && !call.geometry)) {
    if (!resolve_geometry(call)) return false;
    if (call.geometry && !ex->dynamic) remember_overrides(call, a);
  }
  if (!check_overlaps(call)) return false;
  if (OG_UNLIKELY(ex->has_ragged) && !check_ragged(call)) return false;
  if (OG_UNLIKELY(ex->workspace_bytes != 0 || (a.workspace && a.workspace != Py_None)))
    if (!check_workspace(call, a.workspace, context)) return false;
  if (OG_UNLIKELY(!is_host(ex->device) && call.stream == 0 && (!a.handle || a.handle == Py_None))) return framework_stream(call);
  return true;
}

bool run_call(Call& call) {
  if (!call.ex->run) return true;  // the empty native step
  if (call.ex->program) return run_program(*call.ex->program, call);
  Ref pack(reinterpret_cast<PyObject*>(pack_new(call)));
  if (!pack) return false;
  Ref result(PyObject_CallOneArg(call.ex->run, pack.get()));
  return static_cast<bool>(result);
}

void finish_call(Call& call) {
  for (int i = 0; i < call.ex->n; i++) {
    release(call.operands[i].reading);
    Py_XDECREF(call.operands[i].value);
  }
  if (OG_UNLIKELY(call.workspace != nullptr)) {
    release(call.workspace_reading);
    Py_DECREF(call.workspace);
  }
  if (OG_UNLIKELY(call.owns_geometry)) Py_XDECREF(call.geometry);
}

PyObject* execute(Executable* ex, const CallArguments& arguments) {
  Call call;
  call.ex = ex;
  const size_t bytes = sizeof(Operand) * static_cast<size_t>(ex->n);
  // A producer may call execute() again while its buffer is read. Nested packs go to the heap, so that a runaway meets
  // Python's recursion limit and not the end of the stack.
  const bool heap = ex->n > kStackOperands || t_depth > 0;
  t_depth++;
  call.operands = static_cast<Operand*>(OG_UNLIKELY(heap) ? PyMem_Malloc(bytes) : alloca(bytes));
  if (!call.operands) return t_depth--, PyErr_NoMemory();
  Py_INCREF(reinterpret_cast<PyObject*>(ex));  // a rebuild in another thread must not take it away under us
  const bool done = prepare_call(call, arguments) && run_call(call);
  finish_call(call);
  t_depth--;
  Py_DECREF(reinterpret_cast<PyObject*>(ex));
  if (OG_UNLIKELY(heap)) PyMem_Free(call.operands);
  if (OG_UNLIKELY(!done)) return nullptr;
  Py_RETURN_NONE;
}

namespace {

struct Keyword {
  const char* name;
  PyObject* CallArguments::* field;
};

constexpr Keyword kKeywords[] = {
    {"tensor_dict", &CallArguments::tensor_dict},         {"workspace", &CallArguments::workspace},
    {"handle", &CallArguments::handle},                   {"override_uids", &CallArguments::override_uids},
    {"override_shapes", &CallArguments::override_shapes}, {"override_strides", &CallArguments::override_strides},
    {"tensor_uids", &CallArguments::tensor_uids},
};
constexpr int kKeywordCount = sizeof(kKeywords) / sizeof(kKeywords[0]);
PyObject* g_interned[kKeywordCount];  // set once by call_init, before any call

OG_COLD bool bad_keyword(const char* name, PyObject* key, bool twice) {
  if (twice)
    PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument %R", name, key);
  else
    PyErr_Format(PyExc_TypeError,
                 "%s() got an unexpected keyword argument %R; it takes tensor_dict, workspace, handle, override_uids, "
                 "override_shapes, override_strides, tensor_uids",
                 name, key);
  return false;
}

int keyword_index(PyObject* key) {
  for (int i = 0; i < kKeywordCount; i++)
    if (key == g_interned[i]) return i;
  for (int i = 0; i < kKeywordCount; i++)
    if (PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, kKeywords[i].name) == 0) return i;
  return -1;
}

}  // namespace

bool call_init() {
  for (int i = 0; i < kKeywordCount; i++)
    if (!(g_interned[i] = PyUnicode_InternFromString(kKeywords[i].name))) return false;
  return true;
}

bool parse_call(const char* name, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, CallArguments& out) {
  if (OG_UNLIKELY(nargs > kKeywordCount)) {
    PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments (%zd given)", name, kKeywordCount, nargs);
    return false;
  }
  for (Py_ssize_t i = 0; i < nargs; i++) out.*kKeywords[i].field = args[i];
  if (kwnames) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
      PyObject* key = PyTuple_GET_ITEM(kwnames, i);
      const int k = keyword_index(key);
      if (OG_UNLIKELY(k < 0)) return bad_keyword(name, key, false);
      if (OG_UNLIKELY(k < nargs)) return bad_keyword(name, key, true);
      out.*kKeywords[k].field = args[nargs + i];
    }
  }
  // None is how a caller spells "not given".
  for (PyObject* CallArguments::* f : {&CallArguments::override_uids, &CallArguments::override_shapes, &CallArguments::override_strides})
    if (out.*f == Py_None) out.*f = nullptr;
  return true;
}

}  // namespace opgraph
