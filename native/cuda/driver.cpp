#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace opgraph::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kDevices = 64;

std::mutex g_mutex;
// Replaced only by tests, while no call is under way; a replaced table is kept, since a step may still name it.
std::atomic<const Driver*> g_driver{nullptr};
std::string g_failure;
std::atomic<Context> g_primary[kDevices];

using GetProcAddress = Result (*)(const char*, void**, int, uint64_t, int*);

// What a caller can do about the results that reach users most.
struct Advice {
  const char* name;
  const char* text;
};
constexpr Advice kAdvice[] = {
    {"CUDA_ERROR_NO_DEVICE", "no GPU is visible: look at CUDA_VISIBLE_DEVICES"},
    {"CUDA_ERROR_OUT_OF_MEMORY", "free device memory, or build with a smaller workspace"},
    {"CUDA_ERROR_NO_BINARY_FOR_GPU", "the kernel was compiled for another GPU: clear the kernel cache and build again"},
    {"CUDA_ERROR_INVALID_IMAGE", "a cached kernel is damaged: clear the kernel cache and build again"},
    {"CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel touched memory that is not its own; this process's CUDA context is lost: restart it"},
    {"CUDA_ERROR_INVALID_HANDLE", "the stream or module belongs to another context, or was destroyed"},
    {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "this step cannot be captured: run the plan once before capturing"},
    {"CUDA_ERROR_INVALID_CONTEXT", "no CUDA context is current and the device's own could not be used"},
};

Driver* load_into_new(const char* path, std::string& failure) {
  auto* table = new Driver();
  failure = load_driver(*table, path);
  if (!failure.empty()) *table = Driver();
  return table;
}

}  // namespace

std::string load_driver(Driver& table, const char* path) {
  const char* name = path && *path ? path : kLibrary;
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    return std::string("no CUDA driver: ") + (why ? why : name);
  }
  auto resolve = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (!resolve) return std::string("the CUDA driver in ") + name + " is older than CUDA 12: it has no cuGetProcAddress_v2";
#define OG_RESOLVE(field, symbol, version, ...)                                                                        \
  {                                                                                                                    \
    void* entry = nullptr;                                                                                             \
    if (resolve(symbol, &entry, version, 0, nullptr) != kSuccess || !entry)                                            \
      return std::string("the CUDA driver in ") + name + " lacks " symbol;                                             \
    table.field = reinterpret_cast<Driver::field##_t>(entry);                                                          \
  }
  OG_DRIVER_FUNCTIONS(OG_RESOLVE)
#undef OG_RESOLVE
  if (const Result r = table.init(0); r != kSuccess) return "the CUDA driver does not start: " + explain(table, r, "cuInit");
  return {};
}

const Driver& driver() {
  if (const Driver* d = g_driver.load(std::memory_order_acquire)) return *d;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (const Driver* d = g_driver.load(std::memory_order_acquire)) return *d;
  const Driver* fresh = load_into_new(nullptr, g_failure);
  g_driver.store(fresh, std::memory_order_release);
  return *fresh;
}

const std::string& driver_failure() {
  driver();
  return g_failure;
}

std::string use_driver(const char* path) {
  std::lock_guard<std::mutex> lock(g_mutex);
  std::string failure;
  const Driver* fresh = load_into_new(path, failure);
  for (auto& context : g_primary) context.store(nullptr);
  g_failure = failure;
  g_driver.store(fresh, std::memory_order_release);
  return failure;
}

std::string explain(const Driver& table, Result result, const char* what) {
  const char *name = nullptr, *text = nullptr;
  if (table.error_name) table.error_name(result, &name);
  if (table.error_string) table.error_string(result, &text);
  std::string out = std::string(what) + ": " + (name ? name : "CUDA error " + std::to_string(result));
  if (text) out += std::string(" (") + text + ")";
  for (const Advice& a : kAdvice)
    if (name && std::string(name) == a.name) out += std::string("; ") + a.text;
  return out;
}

Result primary_context(const Driver& table, int ordinal, Context* out) {
  if (ordinal < 0 || ordinal >= kDevices) return 101;  // CUDA_ERROR_INVALID_DEVICE
  if (Context known = g_primary[ordinal].load(std::memory_order_acquire)) {
    *out = known;
    return kSuccess;
  }
  Device device;
  if (const Result r = table.device_get(&device, ordinal); r != kSuccess) return r;
  if (const Result r = table.primary_retain(out, device); r != kSuccess) return r;
  g_primary[ordinal].store(*out, std::memory_order_release);  // retained once too often in a race: harmless
  return kSuccess;
}

ContextGuard::ContextGuard(const Driver& table, int ordinal) : table_(table) {
  Context wanted;
  if ((result_ = primary_context(table, ordinal, &wanted)) != kSuccess) return;
  if ((result_ = table.context_current(&previous_)) != kSuccess || previous_ == wanted) return;
  result_ = table.context_set(wanted);
  changed_ = result_ == kSuccess;
}

ContextGuard::~ContextGuard() {
  if (changed_) table_.context_set(previous_);
}

}  // namespace opgraph::cuda
