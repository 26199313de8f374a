// The one place that pulls in Python, and the few helpers every Python-facing file needs.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlpack/dlpack.h>

namespace opgraph {

// One owned reference; error paths need no clean-up code.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* stolen) : p_(stolen) {}
  Ref(Ref&& o) noexcept : p_(o.p_) { o.p_ = nullptr; }
  Ref& operator=(Ref&& o) noexcept {
    PyObject* old = p_;
    p_ = o.p_;
    o.p_ = nullptr;
    Py_XDECREF(old);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(p_); }
  PyObject* get() const { return p_; }
  PyObject* release() {
    PyObject* p = p_;
    p_ = nullptr;
    return p;
  }
  explicit operator bool() const { return p_ != nullptr; }

 private:
  PyObject* p_ = nullptr;
};

#if defined(__GNUC__) || defined(__clang__)
#define OG_COLD __attribute__((noinline, cold))
#define OG_LIKELY(x) __builtin_expect(!!(x), 1)
#define OG_UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define OG_COLD
#define OG_LIKELY(x) (x)
#define OG_UNLIKELY(x) (x)
#endif

// Without the GIL, reading a container another thread may change needs its lock; with it these are nothing.
#if PY_VERSION_HEX >= 0x030d0000
#define OG_LOCK(obj) Py_BEGIN_CRITICAL_SECTION(obj)
#define OG_UNLOCK() Py_END_CRITICAL_SECTION()
#else
#define OG_LOCK(obj) {
#define OG_UNLOCK() }
#endif

// The value of an exact int that fits 64 bits; extents and uids are mostly one digit, read without a call. False for
// anything else; sets no exception.
inline bool plain_int(PyObject* obj, int64_t* out) {
  if (OG_UNLIKELY(!PyLong_CheckExact(obj))) return false;
#if PY_VERSION_HEX >= 0x030c0000
  if (OG_LIKELY(PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(obj)))) {
    *out = PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(obj));
    return true;
  }
#else
  if (const Py_ssize_t digits = Py_SIZE(obj); OG_LIKELY(digits == 0 || digits == 1)) {
    *out = digits ? static_cast<int64_t>(reinterpret_cast<PyLongObject*>(obj)->ob_digit[0]) : 0;
    return true;
  }
#endif
  int overflow = 0;
  *out = PyLong_AsLongLongAndOverflow(obj, &overflow);
  return overflow == 0;
}

inline bool same_device(DLDevice a, DLDevice b) { return a.device_type == b.device_type && a.device_id == b.device_id; }
// Pinned host memory is host memory; the id of a host device names no other memory, so it is not compared.
inline bool is_host(DLDevice d) {
  return d.device_type == kDLCPU || d.device_type == kDLCUDAHost || d.device_type == kDLROCMHost;
}
inline bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

}  // namespace opgraph
