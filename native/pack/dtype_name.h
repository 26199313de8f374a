// Spells a DLPack dtype the way its users do: float32, bfloat16, float8_e4m3fn, float4_e2m1fn_x2, or by its fields.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdio>

namespace opgraph {

inline void dtype_name(DLDataType t, char (&out)[32]) {
  const char* base = nullptr;
  switch (t.code) {
    case kDLInt: base = "int"; break;
    case kDLUInt: base = "uint"; break;
    case kDLFloat: base = "float"; break;
    case kDLBfloat: base = "bfloat"; break;
    case kDLComplex: base = "complex"; break;
    case kDLBool: base = "bool"; break;
    case kDLFloat8_e4m3fn: base = "float8_e4m3fn"; break;
    case kDLFloat8_e5m2: base = "float8_e5m2"; break;
    case kDLFloat8_e8m0fnu: base = "float8_e8m0fnu"; break;
    case kDLFloat4_e2m1fn: base = "float4_e2m1fn"; break;
    default: break;
  }
  const bool bare = t.code == kDLBool || (t.code >= kDLFloat8_e3m4 && base);
  int n;
  if (!base)
    n = std::snprintf(out, sizeof out, "dlpack(%d,%d,%d)", t.code, t.bits, t.lanes);
  else if (bare)
    n = std::snprintf(out, sizeof out, "%s", base);
  else
    n = std::snprintf(out, sizeof out, "%s%d", base, t.bits);
  if (base && t.lanes != 1 && n > 0 && n < 31) std::snprintf(out + n, sizeof out - n, "_x%d", t.lanes);
}

}  // namespace opgraph
