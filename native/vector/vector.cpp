#include "vector/vector.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
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
  const float k = std::nearbyint(clamped * 1.44269504088896341f);
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

// erf in float32, branch-free: for |x| < 1 the odd Maclaurin-like fit x * P(x^2); beyond, 1 - exp(-Q(|x|)).
// Coefficients: least-squares fits in float64 on Chebyshev nodes, made by tools/fit_erf.py; see its printout for errors.
inline float erf_one(float x) {
  const float a = std::fabs(x), t = a * a;
  float p = -5.61801775e-04f;
  p = p * t + 4.91381530e-03f;
  p = p * t - 2.67075151e-02f;
  p = p * t + 1.12800106e-01f;
  p = p * t - 3.76122952e-01f;
  p = p * t + 1.12837911e+00f;
  const float small = x * p;
  const float b = std::min(a, 4.0f);
  float q = 1.72948930e-05f;
  q = q * b - 3.83208680e-04f;
  q = q * b + 3.88393435e-03f;
  q = q * b - 2.42545605e-02f;
  q = q * b + 1.06777847e-01f;
  q = q * b + 6.34846687e-01f;
  q = q * b + 1.12879119e+00f;
  const float big = std::copysign(1.0f - exp_f32(-q * b), x);
  return a < 1.0f ? small : big;
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
    const float v = x[i];
    const float g = 0.5f * v * (1.0f + erf_one(v * 0.70710678118654752f));
    out[i] = v < -6.0f ? (v == -std::numeric_limits<float>::infinity() ? v * 0.0f : -0.0f) : g;
  }
}

void gelu_f64(const double* x, double* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = 0.5 * x[i] * std::erfc(-x[i] * 0.70710678118654752440);
}

OG_CLONES void softmax_rows_f32(float* x, int64_t rows, int64_t n, int64_t stride, float* max, float* sum) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < rows; r++) {
    float* p = x + r * stride;
    float m = kNone, bad = 0.0f;
    for (int64_t i = 0; i < n; i++) {
      m = p[i] > m ? p[i] : m;
      bad += p[i] != p[i] ? 1.0f : 0.0f;
    }
    if (bad != 0.0f) m = std::numeric_limits<float>::quiet_NaN();
    max[r] = m;
    if (m == kNone) {
      std::memset(p, 0, n * sizeof(float));
      sum[r] = 0.0f;
      continue;
    }
    float s = 0.0f;
    for (int64_t i = 0; i < n; i++) {
      const float d = p[i] - m;
      const float e = exp_f32(d);
      p[i] = d != d ? d : e;
      s += p[i];
    }
    sum[r] = s;
  }
}

void softmax_rows_f64(double* x, int64_t rows, int64_t n, int64_t stride, double* max, double* sum) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  for (int64_t r = 0; r < rows; r++) {
    double* p = x + r * stride;
    double m = kNone;
    for (int64_t i = 0; i < n; i++) m = (p[i] > m || p[i] != p[i]) ? p[i] : m;
    max[r] = m;
    if (m == kNone) {
      std::memset(p, 0, n * sizeof(double));
      sum[r] = 0.0;
      continue;
    }
    double s = 0.0;
    for (int64_t i = 0; i < n; i++) s += p[i] = std::exp(p[i] - m);
    sum[r] = s;
  }
}

OG_CLONES void layernorm_rows_f32(const float* x, const float* scale, const float* bias, float eps, float* y, float* mean,
                                  float* inv_std, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r++) {
    const float* p = x + r * n;
    float* o = y + r * n;
    float total = 0.0f;
    for (int64_t i = 0; i < n; i++) total += p[i];
    const float m = total / static_cast<float>(n);
    float squares = 0.0f;
    for (int64_t i = 0; i < n; i++) squares += (p[i] - m) * (p[i] - m);
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
