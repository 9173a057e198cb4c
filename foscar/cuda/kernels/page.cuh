// One page: the query as operand, scores, softmax, output, and what a warp accumulates.
#pragma once

#include "schedule.cuh"

namespace foscar {

// V's codes as fp16 operands. A word's bytes are tokens, a byte's fields channels. Field f and all below it are taken
// together, as the subnormal (sum of code << kBits * field) * 2^-24; differences of the products single a field out. So
// the last field of a byte that stands alone needs no mask.
template <int kBits>
struct VCodes {
  static constexpr int kFields = 8 / kBits;  // of a byte
  static __device__ __forceinline__ uint32_t up_to_field(uint32_t bytes, int f) {
    return bytes & (0x00ff00ffu >> (8 - kBits * (f + 1)) & 0x00ff00ffu);
  }
};

// K's codes as unsigned bytes. A byte of a word is 8 / kBits neighbouring channels. Operand 2 i + j of kOperands has
// field 2 i + j of all four bytes, times weight(j).
template <int kBits>
struct KCodes {
  static constexpr int kOperands = 8 / kBits;
  static constexpr uint32_t kMask = kBits == 2 ? 0x03030303u : 0x0f0f0f0fu;
  static __device__ __forceinline__ uint32_t operand(uint32_t word, int n) {
    if (kBits == 4) return (n ? word >> 4 : word) & kMask;
    return (n / 2 ? word >> 4 : word) & (kMask << (n % 2 * 2));
  }
  static __device__ __forceinline__ constexpr int weight(int n) { return kBits == 2 && n % 2 ? 4 : 1; }
};

// What a warp accumulates for one (sequence, head). Maxima and scores are in powers of two. With kHalves, columns 4 to 7
// of o are of no meaning.
template <typename Config>
struct State {
  float o[Shape<Config>::kTiles][4];  // products of fields taken together, or values
  float max[2], sum[2], offset[2];    // of columns 2c and 2c + 1; sum and offset of this lane's tokens only
  int flags;

  static constexpr int kFresh = 1;     // shifted by the column: no token seen yet, max is 0, and not one
  static constexpr int kInValues = 4;  // o is in units of values
  __device__ __forceinline__ bool is_fresh(int col) const { return flags & kFresh << col; }
  __device__ __forceinline__ bool any_fresh() const { return flags & 3 * kFresh; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Shape<Config>::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) max[i] = sum[i] = offset[i] = 0.f;
    flags = 3 * kFresh;
  }

  // Raises the maxima to where a lane's `top`, a maximum of scores less the present one, is at most 0. Returns by how
  // much.
  __device__ __forceinline__ float2 raise(float2 top) {
    float rise[2] = {top.x, top.y};
#pragma unroll
    for (int col = 0; col < 2; ++col) {
#pragma unroll
      for (int d = Config::kHalves ? 2 : 4; d < 32; d *= 2)
        rise[col] = fmaxf(rise[col], __shfl_xor_sync(kAllLanes, rise[col], d));
      if (!is_fresh(col)) rise[col] = fmaxf(rise[col], 0.f);
      const bool seen = rise[col] > -CUDART_INF_F;
      if (seen) flags &= ~(kFresh << col);
      else rise[col] = 0.f;
      const float factor = ex2(fminf(-rise[col], 0.f));  // what is fresh is 0
      max[col] += rise[col];
      sum[col] *= factor;
      offset[col] *= factor;
#pragma unroll
      for (int t = 0; t < Shape<Config>::kTiles; ++t) o[t][col] *= factor, o[t][col + 2] *= factor;
    }
    return {rise[0], rise[1]};
  }

  // Brings o from products of fields taken together to those of values.
  __device__ __forceinline__ void to_values() {
    constexpr int kFields = VCodes<Config::kVBits>::kFields;
    if (flags & kInValues) return;
    flags |= kInValues;
#pragma unroll
    for (int i = 2 * Shape<Config>::kTiles - 1; i >= 0; --i)  // 8 channels, of field i % kFields
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        float& own = o[i / 2][i % 2 * 2 + col];
        if (i % kFields > 0) own -= o[(i - 1) / 2][(i - 1) % 2 * 2 + col];
        own *= kCodeUnit / (1 << Config::kVBits * (i % kFields));
      }
  }

  // Sums over lanes and brings o to numerators of the output.
  __device__ __forceinline__ void settle() {
    to_values();
#pragma unroll
    for (int col = 0; col < 2; ++col) {
#pragma unroll
      for (int d = Config::kHalves ? 2 : 4; d < 32; d *= 2) {
        sum[col] += __shfl_xor_sync(kAllLanes, sum[col], d);
        offset[col] += __shfl_xor_sync(kAllLanes, offset[col], d);
      }
#pragma unroll
      for (int t = 0; t < Shape<Config>::kTiles; ++t) o[t][col] += offset[col], o[t][col + 2] += offset[col];
      if (is_fresh(col)) max[col] = kNoMax;
    }
  }
};

// A lane's part of the query of one (sequence, head): a run of channels of row g.
template <typename Config>
struct QueryRun {
  uint4 loaded[Shape<Config>::kRun / 8];

  __device__ __forceinline__ QueryRun(const DecodeArguments& args, int segment) {
    using S = Shape<Config>;
    const int lane = threadIdx.x % 32, c = lane % 4, row = lane / 4 & S::kRowMask;
    const bool valid = row < args.q_len * args.group && c * S::kRun < S::kHeadDim;
    const Row which(args, row);
    const int b = segment / Config::kKVHeads, head = segment % Config::kKVHeads * args.heads_per_kv + which.head;
    const auto* const q = static_cast<const typename Config::T*>(args.q) + b * args.q_strides[0] +
                          which.token * args.q_strides[1] + head * args.q_strides[2] + c * S::kRun;
#pragma unroll
    for (int i = 0; i < S::kRun / 8; ++i) {
      loaded[i] = {0, 0, 0, 0};
      if (valid) loaded[i] = reinterpret_cast<const uint4*>(q)[i];
    }
  }
  __device__ __forceinline__ float operator[](int channel) const {
    return static_cast<float>(reinterpret_cast<const typename Config::T*>(loaded)[channel]);
  }
};

// The query of one (sequence, head) as B operand: integers of 16 bits, row by row, in two digits.
template <typename Config>
struct Query {
  uint32_t high[Shape<Config>::kKSteps][2], low[Shape<Config>::kKSteps][2];  // signed and unsigned digits
  int rounding[2];              // of columns 2c and 2c + 1: what rounding took from the integers, times the mean code
  float score_unit[2], sum[2];  // in powers of two, sm_scale included

  Query() = default;
  __device__ __forceinline__ Query(const DecodeArguments& args, const QueryRun<Config>& x) {
    using S = Shape<Config>;
    using K = KCodes<Config::kKBits>;
    const int c = threadIdx.x % 4;
    float sums[8] = {}, tops[8] = {};
#pragma unroll
    for (int i = 0; i < S::kRun; ++i) sums[i % 8] += x[i], tops[i % 8] = fmaxf(tops[i % 8], fabsf(x[i]));
#pragma unroll
    for (int n = 4; n > 0; n /= 2)
#pragma unroll
      for (int j = 0; j < n; ++j) sums[j] += sums[j + n], tops[j] = fmaxf(tops[j], tops[j + n]);
    float top = fmaxf(tops[0], kLeastQuery);
#pragma unroll
    for (int d = 1; d < 4; d *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
    const float scale = 32767.f / top;

    // Adding 1.5 * 2^23 rounds to an integer, whose two's complement is in the low bits then.
    constexpr float kMagic = 12582912.f;
    float residual = 0.f;
#pragma unroll
    for (int n = 0; n < 2 * S::kKSteps; ++n) {  // operands of all words
      constexpr int kOperands = K::kOperands;
      const int weight = K::weight(n % kOperands);
      uint32_t bits[4];
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const float exact = x[n / kOperands * (4 * kOperands) + byte * kOperands + n % kOperands] * (scale / weight);
        const float rounded = exact + kMagic;
        residual = fmaf(exact - (rounded - kMagic), weight, residual);
        bits[byte] = __float_as_uint(rounded);
      }
      const uint32_t lower = __byte_perm(bits[0], bits[1], 0x5140), upper = __byte_perm(bits[2], bits[3], 0x5140);
      low[n / 2][n % 2] = __byte_perm(lower, upper, 0x5410);
      high[n / 2][n % 2] = __byte_perm(lower, upper, 0x7632);
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
      sum[i] = __shfl_sync(kAllLanes, total, lane);
      score_unit[i] = __shfl_sync(kAllLanes, its_unit, lane);
    }
  }
};

// Reads N words that are aligned to their size.
template <int N>
__device__ __forceinline__ void load_words(uint32_t (&words)[N], const uint8_t* source) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) *reinterpret_cast<uint4*>(words + i) = *reinterpret_cast<const uint4*>(source + 4 * i);
  } else if constexpr (N == 2) {
    *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(source);
  } else {
    static_assert(N == 1, "words come in ones, twos and fours");
    words[0] = *reinterpret_cast<const uint32_t*>(source);
  }
}

__device__ __forceinline__ float soft_cap(const DecodeArguments& args, float score) {
  // tanh(y) = 1 - 2 / (1 + e^2y): exact at both ends, where e^2y is 0 or infinite.
  const float cap = args.softcap * kLog2e;
  return cap * (1.f - __fdividef(2.f, 1.f + ex2(score * __fdividef(2.f * kLog2e, cap))));
}

// Whether the row in a column does not see a key, or the key is not one of [begin, end).
template <typename Config>
__device__ __forceinline__ bool is_hidden(const DecodeArguments& args, const Visible& visible, int column, int key,
                                         int begin, int end) {
  const int last = visible.length - args.tail + Row(args, column & Shape<Config>::kRowMask).token;
  return key < begin || key >= end || key > last || (args.window_left >= 0 && key < last - args.window_left);
}

// Attends to one page.
template <typename Config>
__device__ __forceinline__ void attend_page(const DecodeArguments& args, const uint8_t* record,
                                            const Query<Config>& query, State<Config>& state, const Unit& unit) {
  using S = Shape<Config>;
  using K = KCodes<Config::kKBits>;
  using V = VCodes<Config::kVBits>;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;

  // S^T = K q^T: rows are tokens 16 j + g and 16 j + 8 + g.
  int products[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t low[S::kRunWords], high[S::kRunWords];
    const uint8_t* row = record + Config::kKCodes + (16 * j + g) * S::kRowBytes + c * (S::kRunWords * 4);
    load_words(low, row);
    load_words(high, row + 8 * S::kRowBytes);
    int digits[2][4] = {{}, {query.rounding[0], query.rounding[1], query.rounding[0], query.rounding[1]}};
#pragma unroll
    for (int step = 0; step < S::kKSteps; ++step) {
      const int word = 2 * step / K::kOperands, n = 2 * step % K::kOperands;
      const uint32_t a0 = K::operand(low[word], n), a1 = K::operand(high[word], n);
      const uint32_t a2 = K::operand(low[word], n + 1), a3 = K::operand(high[word], n + 1);
      mma_m16n8k32<true>(digits[0], a0, a1, a2, a3, query.high[step][0], query.high[step][1]);
      mma_m16n8k32<false>(digits[1], a0, a1, a2, a3, query.low[step][0], query.low[step][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) products[j][i] = digits[0][i] * 256 + digits[1][i];
  }

  // This lane's tokens are 8 (first + i) + g, for i below kTokens.
  constexpr int kTokens = 2 * S::kBlocks;
  const int half = Config::kHalves ? c / 2 : 0, first = half * kTokens;
  float s[kTokens][2];
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      int product = products[i / 2][i % 2 * 2 + col];
      if (Config::kHalves && half) product = products[i / 2 + 2][i % 2 * 2 + col];
      s[i][col] = static_cast<float>(product);
    }

  // Parameters: the whole word is the scale, its low half the offset.
  uint32_t k_words[kTokens], v_words[kTokens];
  load_words(k_words, record + Config::kKParams + g * 32 + first * 4);
  const bool masked = unit.position & Unit::kMasked;
  const int first_key = unit.position - Unit::kMasked + 8 * first + g;  // if masked
  // Scores, less the maximum.
  const bool capped = args.softcap > 0.f;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float scale = __uint_as_float(k_words[i]), offset = __uint_as_float(k_words[i] << 16);
#pragma unroll
    for (int col = 0; col < 2; ++col)
      s[i][col] = fmaf(scale * query.score_unit[col], s[i][col],
                       fmaf(offset, query.sum[col], capped ? 0.f : -state.max[col]));
  }
  if (capped) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int col = 0; col < 2; ++col) s[i][col] = soft_cap(args, s[i][col]) - state.max[col];
  }
  if (masked) {
    const Visible visible = visible_keys<Config>(args, unit.segment / Config::kKVHeads);
#pragma unroll
    for (int col = 0; col < 2; ++col)
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (is_hidden<Config>(args, visible, 2 * c + col, first_key + 8 * i, visible.begin, visible.end))
          s[i][col] = -CUDART_INF_F;
  }

  if constexpr (!Config::kHalves || Config::kExact) asm volatile("" ::: "memory");  // not earlier: registers are short
  load_words(v_words, record + Config::kVParams + g * 32 + first * 4);
  if (masked) {
    const Visible visible = visible_keys<Config>(args, unit.segment / Config::kKVHeads);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int key = first_key + 8 * i;
      if (key < visible.begin || key >= visible.end) v_words[i] = 0;
    }
  }
  // The sums of p and of p * v_offset, and p * v_scale, whose maximum is kept within fp16's range: raised when it must be.
  float sum[2], offset[2];
  __half2 scaled[kTokens];
  auto exponentiate = [&] {
    __half2 top = __float2half2_rn(0.f);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float scale = __uint_as_float(v_words[i]);
      float p[2];
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        p[col] = ex2(s[i][col]);
        sum[col] = i ? sum[col] + p[col] : p[col];
        offset[col] = fmaf(p[col], __uint_as_float(v_words[i] << 16), i ? offset[col] : 0.f);
      }
      scaled[i] = __floats2half2_rn(p[0] * scale, p[1] * scale);
      top = __hmax2(top, __habs2(scaled[i]));
    }
    return !__hble2(top, __float2half2_rn(kMostScaled));
  };
  if (__any_sync(kAllLanes, exponentiate() || state.any_fresh())) {
    float2 top = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float weight = lg2(fabsf(__uint_as_float(v_words[i])));
      top.x = fmaxf(top.x, s[i][0] + weight), top.y = fmaxf(top.y, s[i][1] + weight);
    }
    const float2 rise = state.raise(top);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) s[i][0] -= rise.x, s[i][1] -= rise.y;
    exponentiate();
  }
#pragma unroll
  for (int col = 0; col < 2; ++col) state.sum[col] += sum[col], state.offset[col] += offset[col];

  // P^T as B operand, two tokens a register.
  uint32_t p[4][2];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    p[i / 2][i % 2] = movmatrix_trans(*reinterpret_cast<const uint32_t*>(&scaled[i]));
    // The rows of columns 4 to 7 are those of columns 0 to 3, their tokens the page's second half.
    if constexpr (Config::kHalves) p[i / 2 + 2][i % 2] = __shfl_xor_sync(kAllLanes, p[i / 2][i % 2], 16);
  }

  // O^T += V^T P^T: rows are channels 16 t + g and 16 t + 8 + g.
#pragma unroll
  for (int chunk = 0; chunk < S::kVWords; ++chunk) {
    uint32_t words[4];
    load_words(words, record + Config::kVCodes + chunk * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int number = 4 * chunk + i, j = number / S::kVWords, w = number % S::kVWords;
      const uint32_t even = words[i], odd = __byte_perm(words[i], 0, 0x4341);  // bytes 1 and 3
#pragma unroll
      for (int f = 0; f < V::kFields; f += 2)
        mma_m16n8k16<__half>(state.o[(w * V::kFields + f) / 2], V::up_to_field(even, f), V::up_to_field(even, f + 1),
                             V::up_to_field(odd, f), f + 2 < V::kFields ? V::up_to_field(odd, f + 1) : odd, p[j][0],
                             p[j][1]);
    }
  }
}

}  // namespace foscar
