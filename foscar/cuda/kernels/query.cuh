// The query of one (sequence, head) as operand of S^T = K q^T, and the product.
#pragma once

#include "types.cuh"

namespace foscar {

// How one operand is packed, and the masks and weights that follow.
template <int kBits>
struct Codes {
  static constexpr int kFields = 8 / kBits;  // of a byte
  static constexpr uint32_t kMask = kBits == 2 ? 0x00030003u : 0x000f000fu;
  static constexpr uint32_t kOnes = 0x00010001u;
  // Field f of both halves of a word: two subnormal operands, code * weight(f) * 2^-24 as fp16, 2^-133 as bf16.
  static __device__ __forceinline__ uint32_t field(uint32_t word, int f) { return word & (kMask << (kBits * f)); }
  static __device__ __forceinline__ constexpr float weight(int f) { return 1 << (kBits * f); }
  static __device__ __forceinline__ constexpr float inverse_weight(int f) { return 1.f / weight(f); }
};

// K's codes as unsigned bytes: operand n is field n of all four bytes of a word, times weight(n). A weight takes bits
// from the integers that it is multiplied by, and spares a shift.
template <int kBits, bool kWeights>
struct KCodes {
  static constexpr int kOperands = 8 / kBits;
  static constexpr uint32_t kMask = kBits == 2 ? 0x03030303u : 0x0f0f0f0fu;
  static __device__ __forceinline__ constexpr int unshifted(int n) {
    return kWeights && kBits == 2 ? n % 2 * 2 : 0;
  }  // bits
  static __device__ __forceinline__ uint32_t operand(uint32_t word, int n) {
    return word >> (kBits * n - unshifted(n)) & (kMask << unshifted(n));
  }
  static __device__ __forceinline__ constexpr int weight(int n) { return 1 << unshifted(n); }
};

template <typename Pair>
__device__ __forceinline__ uint32_t to_bits(Pair pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// What the product with a slice of K's codes takes of the query: of columns 2c and 2c + 1, but for the operand itself.
template <typename Config>
struct QueryOperand {
  // Channels k and k + 4 of each run, over the weights of their codes' fields; of q times scale, two parts.
  uint32_t pairs[Config::kKChannelWise ? 2 : 1][Shape<Config>::kRuns][4];
  float unit[2];                         // of products, in powers of two, sm_scale included
  float sum[Shape<Config>::kGroups][2];  // over a group's channels; channel-wise, of q times offset
};

// K's codes of 16 tokens and a slice of channels: rows g and g + 8 of A.
template <typename Config>
struct KBlock {
  using S = Shape<Config>;
  using K = Codes<Config::kKBits>;
  uint32_t words[2][S::kRowWords];

  __device__ __forceinline__ KBlock(const uint8_t* record, int block, int slice) {
    const int lane = threadIdx.x % 32, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8_t* row = record + Config::kKCodes + (16 * block + 8 * i + lane / 4) * S::kRowBytes;
      if constexpr (Config::kKBits == 2 && S::kRuns == 3) {
        // Two lanes share the word of their third runs.
        words[i][0] = *reinterpret_cast<const uint32_t*>(row + 4 * c);
        words[i][1] = *reinterpret_cast<const uint32_t*>(row + 16 + c / 2 * 4) >> (c % 2 * 8);
      } else {
        load_words(words[i], row + (c * S::kSlices + slice) * (S::kRowWords * 4));
      }
    }
  }

  // Products of all channels with the query's digits. With kHalves, columns 0 to 3 are those of the high digits, and
  // columns 4 to 7 those of the low ones.
  template <typename Query>
  __device__ __forceinline__ void multiply(int (&product)[4], const Query& query) const {
    using Integers = typename Query::Codes;
    int high[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) product[i] = query.rounding[i % 2];
#pragma unroll
    for (int step = 0; step < Query::kSteps; ++step) {
      const int w = 2 * step / Integers::kOperands, n = 2 * step % Integers::kOperands;
      const uint32_t a0 = Integers::operand(words[0][w], n), a1 = Integers::operand(words[1][w], n);
      const uint32_t a2 = Integers::operand(words[0][w], n + 1), a3 = Integers::operand(words[1][w], n + 1);
      mma_m16n8k32(product, a0, a1, a2, a3, query.digits[0][step][0], query.digits[0][step][1]);
      if constexpr (!Config::kHalves)
        mma_m16n8k32(high, a0, a1, a2, a3, query.digits[1][step][0], query.digits[1][step][1]);
    }
    if constexpr (!Config::kHalves) {
#pragma unroll
      for (int i = 0; i < 4; ++i) product[i] += high[i] * 256;
    }
  }

  // Products with one group of channels. A run of 4-bit codes is a word, one of 2-bit codes its even or odd bytes.
  __device__ __forceinline__ void multiply(float (&product)[4], const QueryOperand<Config>& query, int group) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) product[i] = 0.f;
    const int stop = (group + 1) * S::kGroupRuns;
#pragma unroll
    for (int run = group * S::kGroupRuns; run < stop; ++run) {
      const int w = Config::kKBits == 2 ? run / 2 : run;
      const uint32_t low = words[0][w], high = words[1][w], low_odd = low >> 8, high_odd = high >> 8;
      const bool whole = Config::kKBits == 4 || (run % 2 == 0 && run + 1 < stop);
#pragma unroll
      for (int f = 0; f < K::kFields; ++f)
#pragma unroll
        for (const auto& pairs : query.pairs) {
          if (whole)
            mma_m16n8k16<Config::kKChannelWise>(product, K::field(low, f), K::field(high, f), K::field(low_odd, f),
                                                K::field(high_odd, f), pairs[run][f],
                                                Config::kKBits == 4 ? pairs[run][2 + f] : pairs[run + 1][f]);
          else
            mma_m16n8k8<Config::kKChannelWise>(product, K::field(run % 2 ? low_odd : low, f),
                                               K::field(run % 2 ? high_odd : high, f), pairs[run][f]);
        }
      if (whole && Config::kKBits == 2) ++run;
    }
  }
};

// A lane's part of the query of one (sequence, head), as loaded: runs of 8 channels of row g; 0 if there is no such
// row.
template <typename Config>
struct QueryRuns {
  static constexpr int kRuns = Config::kHeadDim / 32;
  uint4 runs[kRuns];

  __device__ __forceinline__ QueryRuns(const DecodeArguments& args, int segment) {
    const int lane = threadIdx.x % 32, row = lane / 4 & Shape<Config>::kRowMask;
    const bool valid = row < args.q_len * args.group;
    const Row which(args, row);
    const int b = segment / Config::kKVHeads, head = segment % Config::kKVHeads * args.heads_per_kv + which.head;
    const auto* const q = static_cast<const typename Config::T*>(args.q) + b * args.q_strides[0] +
                          which.token * args.q_strides[1] + head * args.q_strides[2] + lane % 4 * 8;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      runs[r] = {0, 0, 0, 0};
      if (valid) runs[r] = *reinterpret_cast<const uint4*>(q + 32 * r);
    }
  }
  __device__ __forceinline__ float operator()(int run, int place) const {
    return static_cast<float>(reinterpret_cast<const typename Config::T*>(runs + run)[place]);
  }
};

// Token-wise K in groups: the operand, in fp16, is the same for all pages.
template <typename Config, bool kChannelWise = Config::kKChannelWise, bool kIntegers = Shape<Config>::kIntegers>
struct Query {
  QueryOperand<Config> shared[Shape<Config>::kSlices];

  __device__ __forceinline__ const QueryOperand<Config>& operand(const uint8_t*, int slice) const {
    return shared[slice];
  }

  __device__ __forceinline__ Query(const DecodeArguments& args, const QueryRuns<Config>& x) {
    using S = Shape<Config>;
    using K = Codes<Config::kKBits>;
    float sum[S::kSlices][S::kGroups] = {}, top = 0.f;
#pragma unroll
    for (int r = 0; r < S::kSlices * S::kRuns; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[r / S::kRuns][r % S::kRuns / S::kGroupRuns] += x(r, i);
        top = fmaxf(top, fabsf(x(r, i)));
      }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
#pragma unroll
      for (auto& parts : sum)
#pragma unroll
        for (float& part : parts) part += __shfl_xor_sync(kAllLanes, part, d);
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
    }
    // A power of two brings the largest value into [2^14, 2^15): exact, and far from fp16's ends. NaN stays NaN.
    const int exponent = 14 - min(max((static_cast<int>(__float_as_uint(top) >> 23) & 255) - 127, -100), 100);
    const float unit = args.sm_scale * kLog2e, product_unit = unit * kCodeUnit * power_of_two(-exponent);
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice) {
#pragma unroll
      for (int r = 0; r < S::kRuns; ++r)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float scale = power_of_two(exponent) * K::inverse_weight(k % K::kFields);
          const int run = slice * S::kRuns + r;
          shared[slice].pairs[0][r][k] = to_bits(__floats2half2_rn(x(run, k) * scale, x(run, k + 4) * scale));
        }
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        const int source = (2 * (threadIdx.x % 4) + col) * 4;
        shared[slice].unit[col] = __shfl_sync(kAllLanes, product_unit, source);
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i)
          shared[slice].sum[i][col] = __shfl_sync(kAllLanes, sum[slice][i] * unit, source);
      }
    }
  }
};

// How many bf16 a value is the sum of.
template <typename T>
constexpr int kBf16Parts = 2;
template <>
constexpr int kBf16Parts<__nv_bfloat16> = 1;

// Channel-wise K: the operand is made for each page, of q times scale, and is bf16: with float32's range it needs no
// normaliser. A bfloat16 q and a scale have 8 bits each, so that their product is the sum of two bf16, exactly; of a
// float16 q about 16 bits are kept.
template <typename Config>
struct Query<Config, true, false> {
  // q is multiplied by 2^kExponent first: products with codes stay well above the smallest float32, 2^-126.
  static constexpr int kExponent = 40;
  __nv_bfloat162 pairs[Shape<Config>::kSlices][kBf16Parts<typename Config::T>][Shape<Config>::kRuns][4];
  float unit;

  __device__ __forceinline__ Query(const DecodeArguments& args, const QueryRuns<Config>& x) {
    using S = Shape<Config>;
    using K = Codes<Config::kKBits>;
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice)
#pragma unroll
      for (int r = 0; r < S::kRuns; ++r)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float factor = power_of_two(kExponent) * K::inverse_weight(k % K::kFields);
          float low = x(slice * S::kRuns + r, k) * factor, high = x(slice * S::kRuns + r, k + 4) * factor;
#pragma unroll
          for (auto& part : pairs[slice]) {
            part[r][k] = __floats2bfloat162_rn(low, high);
            low -= __low2float(part[r][k]);
            high -= __high2float(part[r][k]);
          }
        }
    unit = args.sm_scale * kLog2e;
  }

  __device__ __forceinline__ QueryOperand<Config> operand(const uint8_t* record, int slice) const {
    using S = Shape<Config>;
    using K = Codes<Config::kKBits>;
    const uint8_t* const params = record + Config::kKParams + (slice * S::kRuns * 32 + threadIdx.x % 4 * 8) * 4;
    QueryOperand<Config> result;
    float sums[K::kFields][4] = {};  // of q times offset, over the weights of fields
#pragma unroll
    for (int r = 0; r < S::kRuns; ++r) {
      uint32_t words[8];  // of a channel: the scale in the high half, the offset in the low half
      load_words(words, params + r * 128);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t scales = __byte_perm(words[k], words[k + 4], 0x7632);
        const uint32_t offsets = __byte_perm(words[k], words[k + 4], 0x5410);
        const auto scale = *reinterpret_cast<const __nv_bfloat162*>(&scales);
        const __nv_bfloat162 rounded = __hmul2(pairs[slice][0][r][k], scale);
        __nv_bfloat162 rest = __hneg2(rounded);
#pragma unroll
        for (const auto& part : pairs[slice]) {
          rest = __hfma2(part[r][k], scale, rest);
          mma_m16n8k8<true>(sums[k % K::kFields], offsets, 0u, to_bits(part[r][k]));
        }
        result.pairs[0][r][k] = to_bits(rounded);
        result.pairs[1][r][k] = to_bits(rest);
      }
    }
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      float sum = 0.f;
#pragma unroll
      for (int f = 0; f < K::kFields; ++f) sum = fmaf(K::weight(f), sums[f][col], sum);
      result.unit[col] = unit * power_of_two(133 - kExponent);
      result.sum[0][col] = unit * power_of_two(-kExponent) * sum;
    }
    return result;
  }
};

// Byte kByte of each of four words.
template <int kByte>
__device__ __forceinline__ uint32_t gather_bytes(const uint32_t (&words)[4]) {
  constexpr uint32_t kTwo = (kByte + 4) << 4 | kByte;
  return __byte_perm(__byte_perm(words[0], words[1], kTwo), __byte_perm(words[2], words[3], kTwo), 0x5410);
}

// Token-wise K of one group: integers of 16 bits, row by row, in two signed digits: the low and the high ones, or, with
// kHalves, the high ones in columns 0 to 3 and the low ones in columns 4 to 7.
template <typename Config>
struct Query<Config, false, true> {
  // No weights for float16: its output is held to 1e-3, and a weight costs two bits of q.
  using Codes = KCodes<Config::kKBits, Config::kBf16>;
  static constexpr int kSteps = Shape<Config>::kRowWords * Codes::kOperands / 2;
  uint32_t digits[Config::kHalves ? 1 : 2][kSteps][2];
  // Of columns 2c and 2c + 1, for low digits: what rounding took from the integers, times the mean code.
  int rounding[2];
  float score_unit[2], sum[2];  // in powers of two, sm_scale included

  __device__ __forceinline__ Query(const DecodeArguments& args, const QueryRuns<Config>& x) {
    using S = Shape<Config>;
    const int c = threadIdx.x % 4;
    const bool is_low = threadIdx.x % 32 >= 16;  // of this lane's column
    float sums[8] = {}, tops[8] = {};
#pragma unroll
    for (int r = 0; r < S::kRuns; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += x(r, i), tops[i] = fmaxf(tops[i], fabsf(x(r, i)));
#pragma unroll
    for (int n = 4; n > 0; n /= 2)
#pragma unroll
      for (int j = 0; j < n; ++j) sums[j] += sums[j + n], tops[j] = fmaxf(tops[j], tops[j + n]);
    float top = fmaxf(tops[0], kLeastQuery);
#pragma unroll
    for (int d = 1; d < 4; d *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
    // A power of two, so that the larger ones of bfloat16 or float16 values are integers as they are; below 2^15, with
    // room for the digits' rounding.
    const int exponent = static_cast<int>(__float_as_uint(top * 1.004f) >> 23) - 127;
    const float scale = power_of_two(14 - exponent);

    // Adding 1.5 * 2^23 rounds to an integer, whose two's complement is in the low bits then.
    constexpr float kMagic = 12582912.f;
    float residual = 0.f;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {  // operands of all words
      const int word = n / Codes::kOperands, field = n % Codes::kOperands, weight = Codes::weight(field);
      uint32_t low_bits[4], high_bits[4];
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        // Where a row's runs are odd in number, the last word's odd bytes are not this lane's.
        const int run = Config::kKBits == 4 ? word : 2 * word + byte % 2;
        const int place = Config::kKBits == 4 ? 2 * byte + field : byte / 2 * 4 + field;
        const float exact = run < S::kRuns ? x(run, place) * (scale / weight) : 0.f;
        const float rounded = exact + kMagic;
        residual = fmaf(exact - (rounded - kMagic), weight, residual);
        low_bits[byte] = __float_as_uint(rounded);
        high_bits[byte] = __float_as_uint(rounded + 128.f);
      }
      const uint32_t low = gather_bytes<0>(low_bits), high = gather_bytes<1>(high_bits);
      if constexpr (Config::kHalves) {
        digits[0][n / 2][n % 2] = is_low ? low : high;
      } else {
        digits[0][n / 2][n % 2] = low;
        digits[1][n / 2][n % 2] = high;
      }
    }
    float total = sums[0];
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      total += __shfl_xor_sync(kAllLanes, total, d);
      residual += __shfl_xor_sync(kAllLanes, residual, d);
    }
    constexpr float kMeanCode = ((1 << Config::kKBits) - 1) / 2.f;
    const int mean_residual = static_cast<int>(residual * kMeanCode);
    const float unit = args.sm_scale * kLog2e;
    total *= unit;
    // If q is not finite, neither is its row.
    const float its_unit = fabsf(total) < CUDART_INF_F ? unit / scale : CUDART_NAN_F;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int lane = (2 * c + i) * 4;
      rounding[i] = __shfl_sync(kAllLanes, mean_residual, lane);
      if (Config::kHalves && c < 2) rounding[i] = 0;
      sum[i] = __shfl_sync(kAllLanes, total, lane);
      score_unit[i] = __shfl_sync(kAllLanes, its_unit, lane);
    }
  }
};

}  // namespace foscar
