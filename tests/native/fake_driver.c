// A CUDA driver that records what it is asked instead of doing it: built by the tests and put in the driver's place, so
// that programs, patches, grids, memsets, streams and error paths are tested without a GPU. One line per call goes into
// a log that fake_log() returns; fake_fail(symbol, result) makes the next call of a symbol return an error.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char* g_log;
static size_t g_used, g_size;
static char g_fail_symbol[64];
static int g_fail_result;
static void* g_current;
static int g_capturing;

static void say(const char* text) {
  size_t n = strlen(text);
  if (g_used + n + 2 > g_size) {
    g_size = (g_used + n + 2) * 2 + 4096;
    g_log = realloc(g_log, g_size);
  }
  memcpy(g_log + g_used, text, n);
  g_used += n;
  g_log[g_used++] = '\n';
  g_log[g_used] = 0;
}

static int failing(const char* symbol) {
  if (strcmp(symbol, g_fail_symbol)) return 0;
  g_fail_symbol[0] = 0;
  return g_fail_result;
}

#define RECORD(symbol, ...)                     \
  do {                                          \
    int failed_ = failing(symbol);              \
    if (failed_) return failed_;                \
    char line_[8192];                           \
    snprintf(line_, sizeof line_, __VA_ARGS__); \
    say(line_);                                 \
  } while (0)

const char* fake_log(void) { return g_log ? g_log : ""; }
void fake_reset(void) {
  g_used = 0;
  if (g_log) g_log[0] = 0;
  g_fail_symbol[0] = 0;
}
void fake_fail(const char* symbol, int result) {
  snprintf(g_fail_symbol, sizeof g_fail_symbol, "%s", symbol);
  g_fail_result = result;
}
void fake_set_current(void* context) { g_current = context; }
void* fake_current(void) { return g_current; }
void fake_set_capturing(int status) { g_capturing = status; }

static int f_init(unsigned flags) { (void)flags; return failing("cuInit"); }
static int f_version(int* v) { *v = 13000; return 0; }
static int f_name(int r, const char** s) {
  *s = r == 0 ? "CUDA_SUCCESS" : r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : r == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : r == 400 ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
static int f_string(int r, const char** s) { *s = r == 2 ? "out of memory" : "a recorded error"; return 0; }
static int f_count(int* n) { *n = 2; return 0; }
static int f_device(int* d, int i) { if (i > 1) return 101; *d = i; return failing("cuDeviceGet"); }
static int f_device_name(char* out, int n, int d) { snprintf(out, (size_t)n, "Fake GPU %d", d); return 0; }
static int f_attribute(int* v, int a, int d) { (void)d; *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 97 ? 232448 : 0; return 0; }
static int f_retain(void** c, int d) { *c = (void*)(uintptr_t)(0x1000 + d); return failing("cuDevicePrimaryCtxRetain"); }
static int f_current(void** c) { *c = g_current; return 0; }
static int f_set(void* c) { RECORD("cuCtxSetCurrent", "context %p", c); g_current = c; return 0; }
static int f_context_device(int* d) { *d = g_current ? (int)((uintptr_t)g_current - 0x1000) : 0; return 0; }
static int f_load(void** m, const void* image, unsigned n, int* o, void** v) {
  (void)n; (void)o; (void)v;
  RECORD("cuModuleLoadDataEx", "load %.8s", (const char*)image);
  *m = (void*)0x2000;
  return 0;
}
static int f_unload(void* m) { RECORD("cuModuleUnload", "unload %p", m); return 0; }
static int f_function(void** f, void* m, const char* name) {
  (void)m;
  RECORD("cuModuleGetFunction", "function %s", name);
  *f = (void*)(uintptr_t)(0x3000 + strlen(name));
  return 0;
}
static int f_function_attribute(void* f, int a, int v) { RECORD("cuFuncSetAttribute", "attribute %p %d=%d", f, a, v); return 0; }

typedef struct { int id; char pad[4]; uint32_t words[16]; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void* stream; Attribute* attributes; unsigned count; } Config;

// Parameters are recorded as 8-byte words: the tests lay them out that way.
static int g_parameters;
void fake_parameters(int n) { g_parameters = n; }

static int f_launch(const Config* c, void* f, void** params, void** extra) {
  (void)extra;
  int failed = failing("cuLaunchKernelEx");
  if (failed) return failed;
  char line[8192];
  int n = snprintf(line, sizeof line, "launch %p grid %u,%u,%u block %u,%u,%u shared %u stream %p", f, c->grid[0], c->grid[1], c->grid[2],
                   c->block[0], c->block[1], c->block[2], c->shared, c->stream);
  for (unsigned i = 0; i < c->count; i++)
    n += snprintf(line + n, sizeof line - (size_t)n, " attr %d=%u,%u,%u", c->attributes[i].id, c->attributes[i].words[0], c->attributes[i].words[1], c->attributes[i].words[2]);
  for (int i = 0; i < g_parameters; i++) {
    uint64_t w;
    memcpy(&w, params[i], 8);
    n += snprintf(line + n, sizeof line - (size_t)n, " p%d=%llx", i, (unsigned long long)w);
  }
  say(line);
  return 0;
}

#define MEMSET1(name, bits, type)                                                                             \
  static int name(unsigned long long dst, type value, size_t n, void* stream) {                               \
    RECORD("cuMemset", "memset%d %llx value %x n %zu stream %p", bits, dst, (unsigned)value, n, stream);      \
    return 0;                                                                                                 \
  }
MEMSET1(f_m8, 8, unsigned char)
MEMSET1(f_m16, 16, unsigned short)
MEMSET1(f_m32, 32, unsigned)
#define MEMSET2(name, bits, type)                                                                                        \
  static int name(unsigned long long dst, size_t pitch, type value, size_t w, size_t h, void* stream) {                  \
    RECORD("cuMemset", "memset2d%d %llx pitch %zu value %x %zux%zu stream %p", bits, dst, pitch, (unsigned)value, w, h,  \
           stream);                                                                                                      \
    return 0;                                                                                                            \
  }
MEMSET2(f_2d8, 8, unsigned char)
MEMSET2(f_2d16, 16, unsigned short)
MEMSET2(f_2d32, 32, unsigned)
static int f_capturing(void* s, int* status) { (void)s; *status = g_capturing; return 0; }
static int f_synchronize(void* s) { RECORD("cuStreamSynchronize", "synchronize %p", s); return 0; }

typedef struct { const char* symbol; void* entry; } Entry;
static const Entry kEntries[] = {
    {"cuInit", f_init}, {"cuDriverGetVersion", f_version}, {"cuGetErrorName", f_name}, {"cuGetErrorString", f_string},
    {"cuDeviceGetCount", f_count}, {"cuDeviceGet", f_device}, {"cuDeviceGetName", f_device_name},
    {"cuDeviceGetAttribute", f_attribute}, {"cuDevicePrimaryCtxRetain", f_retain}, {"cuCtxGetCurrent", f_current},
    {"cuCtxSetCurrent", f_set}, {"cuCtxGetDevice", f_context_device}, {"cuModuleLoadDataEx", f_load},
    {"cuModuleUnload", f_unload}, {"cuModuleGetFunction", f_function}, {"cuFuncSetAttribute", f_function_attribute},
    {"cuLaunchKernelEx", f_launch}, {"cuMemsetD8Async", f_m8}, {"cuMemsetD16Async", f_m16}, {"cuMemsetD32Async", f_m32},
    {"cuMemsetD2D8Async", f_2d8}, {"cuMemsetD2D16Async", f_2d16}, {"cuMemsetD2D32Async", f_2d32},
    {"cuStreamIsCapturing", f_capturing}, {"cuStreamSynchronize", f_synchronize},
};

int cuGetProcAddress_v2(const char* symbol, void** entry, int version, uint64_t flags, int* status) {
  (void)version; (void)flags;
  if (getenv("FAKE_DRIVER_WITHOUT") && !strcmp(getenv("FAKE_DRIVER_WITHOUT"), symbol)) return 500;
  for (size_t i = 0; i < sizeof kEntries / sizeof kEntries[0]; i++)
    if (!strcmp(symbol, kEntries[i].symbol)) {
      *entry = kEntries[i].entry;
      if (status) *status = 0;
      return 0;
    }
  return 500;
}
