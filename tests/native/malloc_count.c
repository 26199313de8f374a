/* Preloaded into a process, counts the allocations that one thread makes between count_begin() and count_end(). glibc. */
#include <errno.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

/* In static TLS: a look-up that itself allocates would never end. */
static __thread long count __attribute__((tls_model("initial-exec")));
static __thread int counting __attribute__((tls_model("initial-exec")));

void count_begin(void) {
  count = 0;
  counting = 1;
}

long count_end(void) {
  counting = 0;
  return count;
}

void *malloc(size_t size) {
  count += counting;
  return __libc_malloc(size);
}

void *calloc(size_t number, size_t size) {
  count += counting;
  return __libc_calloc(number, size);
}

void *realloc(void *block, size_t size) {
  count += counting;
  return __libc_realloc(block, size);
}

void *memalign(size_t alignment, size_t size) {
  count += counting;
  return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
  count += counting;
  return __libc_memalign(alignment, size);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  count += counting;
  void *block = __libc_memalign(alignment, size);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}
