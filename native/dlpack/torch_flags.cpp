// torch's borrowing call carries neither the negative bit (a lazily negated view) nor autograd state, and asking through
// Python costs 60-120 ns an operand, more than reading it. Both live at fixed places of the tensor's implementation
// object, inside which the borrowed `shape` points while the rank is at most 5. The places are learnt once, from
// samples that torch itself makes and that differ in nothing but the bit looked for; nothing is assumed about where
// they are. If exactly one place explains every sample it is used; otherwise every operand is asked through Python.
#include "dlpack/read.h"

#include <cstring>
#include <utility>

namespace opgraph {

std::atomic<const FlagPlaces*> g_flag_places{nullptr};

namespace {

// How far from `shape` the implementation object is known to extend: past the two inline arrays, the offset, the
// element count and the type words (80 + 8 + 8 + 16), and before them the size, slot, version and autograd words.
constexpr int kBack = 64, kAhead = 112;
constexpr int kSamples = 6;

// Samples cannot be made in some modes (fake tensors, inference mode), so failing is retried, a bounded number of times.
std::atomic<int> g_attempts{32};

struct Samples {
  Ref keep[kSamples];
  DLTensor t[kSamples];

  bool take(const TypeEntry& entry, int i, Ref tensor) {
    keep[i] = std::move(tensor);
    if (!keep[i] || Py_TYPE(keep[i].get()) != entry.type) return false;
    return entry.borrow(keep[i].get(), &t[i]) == 0 && inline_sizes(t[i]);
  }
};

Ref host_tensor(PyObject* torch, const char* make) {
  Ref function(PyObject_GetAttrString(torch, make)), args(Py_BuildValue("((ii))", 2, 3)), kwargs(Py_BuildValue("{s:s}", "device", "cpu"));
  if (!function || !args || !kwargs) return Ref();
  return Ref(PyObject_Call(function.get(), args.get(), kwargs.get()));
}

bool take_samples(const TypeEntry& entry, PyObject* torch, Samples& plain, Samples& negative, Samples& grad) {
  for (int i = 0; i < kSamples; i++) {
    const char* make = i % 2 ? "zeros" : "ones";
    if (!plain.take(entry, i, host_tensor(torch, make))) return false;
    if (!negative.take(entry, i, Ref(PyObject_CallMethod(torch, "_neg_view", "O", plain.keep[i].get())))) return false;
    Ref fresh = host_tensor(torch, make);
    if (!fresh || !grad.take(entry, i, Ref(PyObject_CallMethod(fresh.get(), "requires_grad_", nullptr)))) return false;
  }
  return true;
}

// The one word, and the one bit in it, that every negated sample has and no other sample has.
bool find_negative(const Samples& plain, const Samples& negative, const Samples& grad, FlagPlaces& out) {
  int found = 0;
  for (int offset = 0; offset < kAhead; offset += 8) {
    uint64_t on = ~uint64_t{0}, off = 0;
    for (int i = 0; i < kSamples; i++) {
      on &= word_near_shape(negative.t[i], offset);
      off |= word_near_shape(plain.t[i], offset) | word_near_shape(grad.t[i], offset);
    }
    const uint64_t mask = on & ~off;
    if (!mask) continue;
    if (mask & (mask - 1)) return false;
    out.negative_offset = offset;
    out.negative_mask = mask;
    found++;
  }
  return found == 1;
}

bool find_autograd(const Samples& plain, const Samples& grad, FlagPlaces& out) {
  int found = 0;
  for (int offset = -kBack; offset < 0; offset += 8) {
    bool fits = true;
    for (int i = 0; i < kSamples; i++) fits = fits && word_near_shape(plain.t[i], offset) == 0 && word_near_shape(grad.t[i], offset) != 0;
    if (!fits) continue;
    out.autograd_offset = offset;
    found++;
  }
  return found == 1;
}

bool learn(const DLPackExchangeAPI* api, PyObject* torch, FlagPlaces& places) {
  Ref base(PyObject_GetAttrString(torch, "Tensor"));
  if (!base || !PyType_Check(base.get())) return false;
  const TypeEntry* entry = find_exchange(reinterpret_cast<PyTypeObject*>(base.get()));
  if (!entry || entry->api != api || !entry->borrow) return false;
  Samples plain, negative, grad;
  places.api = api;
  return take_samples(*entry, torch, plain, negative, grad) && find_negative(plain, negative, grad, places) &&
         find_autograd(plain, grad, places);
}

}  // namespace

OG_COLD void learn_torch_flags(const DLPackExchangeAPI* api) {
  if (g_flag_places.load(std::memory_order_acquire) || g_attempts.fetch_sub(1) <= 0) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref torch(PyImport_GetModule(Ref(PyUnicode_FromString("torch")).get()));  // looks it up, never imports
  FlagPlaces places{};
  if (torch && learn(api, torch.get(), places)) {
    const FlagPlaces* none = nullptr;
    auto* fresh = new FlagPlaces(places);
    if (!g_flag_places.compare_exchange_strong(none, fresh)) delete fresh;
  }
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

}  // namespace opgraph
