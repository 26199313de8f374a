#include "vector/vector.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

// One source, compiled for several instruction sets and chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OG_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OG_CLONES
#endif

namespace opgraph {
namespace {

// exp in float32: 2^k * p(r), |r| <= ln2/2, degree-6 Taylor remainder below half an ulp; flushes below -87.3 to 0.
inline float exp_f32(float x) {
  const float clamped = std::min(std::max(x, -88.0f), 88.7f);
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer and vectorises on every instruction set.
  const float k = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const float r = (clamped - k * 0.693145751953125f) - k * 1.42860682030941723212e-6f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float scale = std::bit_cast<float>((static_cast<int32_t>(k) + 127) << 23);
  return x < -87.33654f ? 0.0f : p * scale;
}

// Coefficients, highest power first, as printed by fit_erf.py: 1.2e-7 absolute, 2.4 ulp.
constexpr float kErfSmall[] = {7.889376036e-05f, -8.020924202e-04f, 5.189545635e-03f, -2.685445072e-02f,
                               1.128360035e-01f, -3.761262716e-01f, 1.128379166e+00f};
constexpr float kErfBig[] = {-2.081932159e-06f, 3.348695195e-05f, -2.127548607e-04f, 4.965388551e-04f, 1.841148022e-03f,
                             -2.131616359e-02f, 1.042279629e-01f, 6.360660624e-01f, 1.128471311e+00f};

template <int N>
inline float horner(const float (&c)[N], float x) {
  float p = c[0];
  for (int i = 1; i < N; i++) p = p * x + c[i];
  return p;
}

// erf in float32, branch-free: x P(x^2) below 1, 1 - exp(-|x| Q(|x|)) beyond.
inline float erf_one(float x) {
  const float a = std::fabs(x), b = std::min(a, 4.0f);
  const float big = std::copysign(1.0f - exp_f32(-horner(kErfBig, b) * b), x);
  return a < 1.0f ? x * horner(kErfSmall, a * a) : big;
}

// Sums and maxima run in lanes: compilers may not reorder a float sum, so the order is written out.
constexpr int kLanes = 16;

template <class T, class Term>
inline T lane_sum(int64_t n, Term term) {
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; l++) lanes[l] += term(i + l);
  T total = 0;
  for (int l = 0; l < kLanes; l++) total += lanes[l];
  for (; i < n; i++) total += term(i);
  return total;
}

// Largest of n values; NaN when any is NaN.
template <class T>
inline T lane_max(const T* x, int64_t n) {
  T lanes[kLanes];
  for (int l = 0; l < kLanes; l++) lanes[l] = -std::numeric_limits<T>::infinity();
  int64_t i = 0;
  T poison = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
  T m = lanes[0];
  for (int l = 1; l < kLanes; l++) m = lanes[l] > m ? lanes[l] : m;
  for (; i < n; i++) m = x[i] > m ? x[i] : m;
  poison = lane_sum<T>(n, [x](int64_t k) { return x[k] != x[k] ? T{1} : T{0}; });
  return poison != 0 ? std::numeric_limits<T>::quiet_NaN() : m;
}

template <class T, class Exp>
inline void softmax_rows(T* x, int64_t rows, int64_t n, int64_t stride, T* max, T* sum, Exp exp) {
  for (int64_t r = 0; r < rows; r++) {
    T* p = x + r * stride;
    const T m = lane_max(p, n);
    max[r] = m;
    if (m == -std::numeric_limits<T>::infinity()) {
      std::fill(p, p + n, T{0});
      sum[r] = 0;
      continue;
    }
    for (int64_t i = 0; i < n; i++) p[i] = exp(p[i] - m);
    sum[r] = lane_sum<T>(n, [p](int64_t i) { return p[i]; });
  }
}

}  // namespace

OG_CLONES void erf_f32(const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float e = erf_one(x[i]);
    out[i] = x[i] != x[i] ? x[i] : e;
  }
}

void erf_f64(const double* x, double* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = std::erf(x[i]);
}

OG_CLONES void gelu_f32(const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    // 1 + erf loses all digits for x below about -4; there erfc(-z) = exp(-z Q(z)) is taken directly.
    const float v = x[i], z = v * 0.70710678118654752f, a = std::fabs(z);
    const float b = std::min(a, 4.0f);
    const float erfc = exp_f32(-horner(kErfBig, b) * b) * (a > 4.0f ? 0.0f : 1.0f);  // of |z|
    const float near = 1.0f + z * horner(kErfSmall, a * a), far = v < 0.0f ? erfc : 2.0f - erfc;
    const float g = 0.5f * std::max(v, -1e30f) * (a < 1.0f ? near : far);  // -inf would meet its zero factor
    out[i] = v != v ? v : g;
  }
}

void gelu_f64(const double* x, double* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = 0.5 * x[i] * std::erfc(-x[i] * 0.70710678118654752440);
}

OG_CLONES void softmax_rows_f32(float* x, int64_t rows, int64_t n, int64_t stride, float* max, float* sum) {
  softmax_rows(x, rows, n, stride, max, sum, [](float d) {
    const float e = exp_f32(d);
    return d != d ? d : e;
  });
}

void softmax_rows_f64(double* x, int64_t rows, int64_t n, int64_t stride, double* max, double* sum) {
  softmax_rows(x, rows, n, stride, max, sum, [](double d) { return std::exp(d); });
}

OG_CLONES void layernorm_rows_f32(const float* x, const float* scale, const float* bias, float eps, float* y, float* mean,
                                  float* inv_std, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r++) {
    const float* p = x + r * n;
    float* o = y + r * n;
    const float m = lane_sum<float>(n, [p](int64_t i) { return p[i]; }) / static_cast<float>(n);
    const float squares = lane_sum<float>(n, [p, m](int64_t i) { return (p[i] - m) * (p[i] - m); });
    const float inv = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
    if (mean) mean[r] = m;
    if (inv_std) inv_std[r] = inv;
    if (scale && bias)
      for (int64_t i = 0; i < n; i++) o[i] = (p[i] - m) * inv * scale[i] + bias[i];
    else if (scale)
      for (int64_t i = 0; i < n; i++) o[i] = (p[i] - m) * inv * scale[i];
    else
      for (int64_t i = 0; i < n; i++) o[i] = (p[i] - m) * inv;
  }
}

}  // namespace opgraph
