#pragma once

#include "cuda_fp16.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(double x) {
    // Through a float32 that is rounded to odd, so that nothing is rounded twice.
    float f = static_cast<float>(x);
    if (std::isfinite(f) && f != x) {
      if (std::fabs(static_cast<double>(f)) > std::fabs(x)) f = bit_cast<float>(bit_cast<uint32_t>(f) - 1);
      f = bit_cast<float>(bit_cast<uint32_t>(f) | 1);
    }
    const uint32_t u = bit_cast<uint32_t>(f);
    bits = std::isfinite(f) ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : u >> 16 | (f != f);
  }
  operator float() const { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float __low2float(__nv_bfloat162 a) { return a.x; }
inline float __high2float(__nv_bfloat162 a) { return a.y; }
inline __nv_bfloat162 __hneg2(__nv_bfloat162 a) { return __floats2bfloat162_rn(-float(a.x), -float(a.y)); }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  auto fma = [](double x, double y, double z) { return __nv_bfloat16(x * y + z); };
  return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hfma2(a, b, {__nv_bfloat16(0.0), __nv_bfloat16(0.0)});
}
inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(fminf(a.x, b.x), fminf(a.y, b.y));
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
}
