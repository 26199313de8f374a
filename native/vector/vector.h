// Vectorised host loops for the CPU engine where NumPy has nothing fit. Plain C++, no Python: compilers unroll them.
#pragma once

#include <cstdint>

namespace opgraph {

// out may be x. Exact to about 1 ulp (double: libm); float32 uses a rational approximation within 2 ulp of erf.
void erf_f32(const float* x, float* out, int64_t n);
void erf_f64(const double* x, double* out, int64_t n);
// 0.5 x (1 + erf(x / sqrt 2))
void gelu_f32(const float* x, float* out, int64_t n);
void gelu_f64(const double* x, double* out, int64_t n);

// In place, per row of n: m = max, x = exp(x - m), s = sum x. A row whose max is -inf becomes zeros with s = 0.
void softmax_rows_f32(float* x, int64_t rows, int64_t n, int64_t stride, float* max, float* sum);
void softmax_rows_f64(double* x, int64_t rows, int64_t n, int64_t stride, double* max, double* sum);

// y = (x - mean) / sqrt(var + eps) * scale + bias per row; scale, bias, mean, inv_std may be null.
void layernorm_rows_f32(const float* x, const float* scale, const float* bias, float eps, float* y, float* mean, float* inv_std,
                        int64_t rows, int64_t n);

}  // namespace opgraph
