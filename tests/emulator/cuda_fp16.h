// What kernels use of CUDA's language and of its 16-bit types, for a host compiler.
#pragma once

#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __shared__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return std::min(a, static_cast<unsigned>(b)); }

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned x) { return bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return bit_cast<unsigned>(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline unsigned atomicAdd(unsigned* sum, unsigned x) {
  const unsigned old = *sum;
  *sum += x;
  return old;
}

// The device's division is off by up to two units in the last place, here by one or the other.
inline float __fdividef(float a, float b) {
  const float quotient = a / b;
  if (!std::isfinite(quotient) || quotient == 0.f) return quotient;
  return __uint_as_float(__float_as_uint(quotient) + (__float_as_uint(a) % 2 ? 2 : -2));
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value(x) {}
  operator float() const { return value; }
};
struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }
inline __half2 __habs2(__half2 a) { return __floats2half2_rn(std::fabs(float(a.x)), std::fabs(float(a.y))); }
inline __half2 __hmax2(__half2 a, __half2 b) { return __floats2half2_rn(fmaxf(a.x, b.x), fmaxf(a.y, b.y)); }
inline __half2 __hmin2(__half2 a, __half2 b) { return __floats2half2_rn(fminf(a.x, b.x), fminf(a.y, b.y)); }
inline bool __hble2(__half2 a, __half2 b) { return float(a.x) <= float(b.x) && float(a.y) <= float(b.y); }
