// One page: scores, softmax, output, and what a warp accumulates.
#pragma once

#include "query.cuh"
#include "schedule.cuh"

namespace foscar {

// Whether V's parameters must not be loaded before the scores are done.
template <typename Config>
constexpr bool kShortOfRegisters = Config::kExact || Config::kVBits == 4;

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

// What a warp accumulates for one (sequence, head). Maxima and scores are in powers of two. With kHalves, columns 4 to
// 7 of o are of no meaning.
template <typename Config>
struct State {
  float o[Shape<Config>::kTiles][4];  // products of fields taken together, or values
  float max[2], sum[2];               // of columns 2c and 2c + 1; the sum is of this lane's tokens only
  float offset[Config::kVGroups][2];  // sums of p times offset, of this lane's tokens; not used if V is channel-wise
  bool in_values;                     // of o; without exact tokens it is not until the end
  int any_fresh;                      // whether any column of the warp is; a bool would take one instruction more

  // A maximum of -0 is none: no token has been seen yet.
  __device__ __forceinline__ bool is_fresh(int col) const { return __float_as_uint(max[col]) == 0x80000000u; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      max[col] = -0.f;
      map(col, [](float) { return 0.f; });
    }
    in_values = false;
    any_fresh = true;
  }

  // Replaces all that a column has, but for its maximum.
  template <typename Function>
  __device__ __forceinline__ void map(int col, Function function) {
    sum[col] = function(sum[col]);
#pragma unroll
    for (int i = 0; i < Shape<Config>::kOffsets; ++i) offset[i][col] = function(offset[i][col]);
#pragma unroll
    for (int t = 0; t < Shape<Config>::kTiles; ++t)
      o[t][col] = function(o[t][col]), o[t][col + 2] = function(o[t][col + 2]);
  }

  // Raises the maxima to where `top`, a lane's largest score less the present maximum, is at most kRaised. Returns by
  // how much.
  __device__ __forceinline__ float2 raise(float2 top) {
    float rise[2] = {top.x, top.y};
#pragma unroll
    for (int col = 0; col < 2; ++col) {
#pragma unroll
      for (int d = Config::kHalves ? 2 : 4; d < 32; d *= 2)
        rise[col] = fmaxf(rise[col], __shfl_xor_sync(kAllLanes, rise[col], d));
      rise[col] -= kRaised;
      if (!is_fresh(col)) rise[col] = fmaxf(rise[col], 0.f);
      const bool seen = rise[col] > -CUDART_INF_F;
      const float raised = seen ? max[col] + rise[col] + 0.f : max[col];  // not -0
      rise[col] = raised - max[col];                                      // as rounded
      const float factor = ex2(fminf(-rise[col], 0.f));                   // what is fresh is 0
      max[col] = raised;
      map(col, [&](float x) { return x * factor; });
    }
    any_fresh = __any_sync(kAllLanes, is_fresh(0) || is_fresh(1));
    return {rise[0], rise[1]};
  }

  // Brings o from sums of products to those of values.
  __device__ __forceinline__ void to_values() {
    constexpr int kFields = 8 / Config::kVBits;
    if (Config::kExact && in_values) return;
    in_values = true;
#pragma unroll
    for (int i = 2 * Shape<Config>::kTiles - 1; i >= 0; --i)  // 8 channels, of field i % kFields
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        float& own = o[i / 2][i % 2 * 2 + col];
        if (!Config::kVChannelWise && i % kFields > 0) own -= o[(i - 1) / 2][(i - 1) % 2 * 2 + col];
        own *= kCodeUnit / (1 << Config::kVBits * (i % kFields));
      }
  }

  // Sums over lanes and brings o to numerators of the output.
  __device__ __forceinline__ void settle() {
    using S = Shape<Config>;
    to_values();
#pragma unroll
    for (int col = 0; col < 2; ++col) {
#pragma unroll
      for (int d = Config::kHalves ? 2 : 4; d < 32; d *= 2) {
        sum[col] += __shfl_xor_sync(kAllLanes, sum[col], d);
#pragma unroll
        for (int i = 0; i < S::kOffsets; ++i) offset[i][col] += __shfl_xor_sync(kAllLanes, offset[i][col], d);
      }
      if constexpr (S::kOffsets > 0) {
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          const float its_offset = offset[t * S::kOffsets / S::kTiles][col];
          o[t][col] += its_offset, o[t][col + 2] += its_offset;
        }
      }
      if (is_fresh(col)) max[col] = kNoMax;
    }
  }
};

// Whether the row in a column does not see a key, or the key is not one of [begin, end).
template <typename Config>
__device__ __forceinline__ bool is_hidden(const DecodeArguments& args, const Visible& visible, int column, int key,
                                          int begin, int end) {
  const int last = visible.length - args.tail + Row(args, column & Shape<Config>::kRowMask).token;
  return key < begin || key >= end || key > last || (args.window_left >= 0 && key < last - args.window_left);
}

// Scores of a lane's tokens of a pass, 8 (first + i) + g for i below kTokens, plus `shift`.
template <typename Config>
__device__ __forceinline__ void score(float (&s)[Shape<Config>::kTokens][2], const uint8_t* record,
                                      const Query<Config>& query, int pass, const float (&shift)[2]) {
  using S = Shape<Config>;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int half = Config::kHalves ? c / 2 : 0, first = (Config::kHalves ? half : pass) * S::kTokens;
  const uint8_t* const params = record + Config::kKParams + g * 32 + first * 4;
  // S^T = K q^T: rows are tokens 16 j + g and 16 j + 8 + g. Parameters: the whole word is the scale, its low half the
  // offset.
  if constexpr (S::kIntegers) {
    int products[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      KBlock<Config>(record, 2 * pass + j, 0).multiply(products[j], query);
      if constexpr (Config::kHalves) {
        // Lanes c and c ^ 2 have the digits of the same rows, and want the tokens of a half of the page each.
        int other[4];
        KBlock<Config>(record, j + 2, 0).multiply(other, query);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int kept = half ? other[i] : products[j][i], given = half ? products[j][i] : other[i];
          products[j][i] = kept * (half ? 1 : 256) + __shfl_xor_sync(kAllLanes, given, 2) * (half ? 256 : 1);
        }
      }
    }
    uint32_t words[S::kTokens];
    load_words(words, params);
#pragma unroll
    for (int i = 0; i < S::kTokens; ++i) {
      const float scale = __uint_as_float(words[i]), offset = __uint_as_float(words[i] << 16);
#pragma unroll
      for (int col = 0; col < 2; ++col)
        s[i][col] = fmaf(scale * query.score_unit[col], static_cast<float>(products[i / 2][i % 2 * 2 + col]),
                         fmaf(offset, query.sum[col], shift[col]));
    }
  } else {
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice) {
      const QueryOperand<Config>& operand = query.operand(record, slice);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const KBlock<Config> block(record, 2 * pass + j, slice), other(record, Config::kHalves ? j + 2 : j, slice);
        float scaled[2][2], offset[2][2];
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i) {
          float product[4];
          block.multiply(product, operand, i);
          if constexpr (Config::kHalves) {
            float other_product[4];
            other.multiply(other_product, operand, i);
#pragma unroll
            for (int e = 0; e < 4; ++e) product[e] = half ? other_product[e] : product[e];
          }
          uint32_t words[2];
          if constexpr (!Config::kKChannelWise) load_words(words, params + ((slice * S::kGroups + i) * 64 + 2 * j) * 4);
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int col = 0; col < 2; ++col) {
              float scale = 1.f, of_group = operand.sum[i][col];
              if constexpr (!Config::kKChannelWise) {
                scale = __uint_as_float(words[t]);
                of_group *= __uint_as_float(words[t] << 16);
              }
              scaled[t][col] = i ? fmaf(scale, product[2 * t + col], scaled[t][col]) : scale * product[2 * t + col];
              offset[t][col] = i ? offset[t][col] + of_group : of_group;
            }
        }
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int col = 0; col < 2; ++col) {
            float& its = s[2 * j + t][col];
            its = fmaf(scaled[t][col], operand.unit[col], (slice ? its : shift[col]) + offset[t][col]);
          }
        if (S::kSlices > 1) __syncwarp();  // what comes next is not loaded before this is done, to spare registers
      }
    }
  }
}

// O^T += V^T P^T: rows are channels 16 t + g and 16 t + 8 + g. Of p, a register has two tokens; its blocks of 16 are a
// pass's.
template <typename Config, int kBlocks>
__device__ __forceinline__ void add_values(State<Config>& state, const uint8_t* record,
                                           const uint32_t (&p)[Config::kVGroups][kBlocks][2], int pass) {
  using S = Shape<Config>;
  const int lane = threadIdx.x % 32, g = lane / 4;
  constexpr int kFields = 8 / Config::kVBits;
  const int first = pass * kBlocks * S::kVWords;  // of this lane's words of the page
  auto codes = [&](int number) { return record + Config::kVCodes + number / 4 * 512 + lane * 16 + number % 4 * 4; };
  if constexpr (!Config::kVChannelWise) {
    using V = VCodes<Config::kVBits>;
    constexpr int kAtOnce = kBlocks * S::kVWords % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int start = 0; start < kBlocks * S::kVWords; start += kAtOnce) {
      uint32_t words[kAtOnce];
      load_words(words, codes(first + start));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int j = (start + i) / S::kVWords, w = (start + i) % S::kVWords;
        const uint32_t (&b)[2] = p[w * Config::kVGroups / S::kVWords][j];
        const uint32_t even = words[i], odd = __byte_perm(words[i], 0, 0x4341);  // bytes 1 and 3
#pragma unroll
        for (int f = 0; f < kFields; f += 2)
          mma_m16n8k16(state.o[(w * kFields + f) / 2], V::up_to_field(even, f), V::up_to_field(even, f + 1),
                       V::up_to_field(odd, f), f + 2 < kFields ? V::up_to_field(odd, f + 1) : odd, b[0], b[1]);
      }
    }
  } else {
    // Each pass's output is scaled when it is complete. Codes that are all 1 give the sum of p, in the unit that the
    // products of their field have.
    using V = Codes<Config::kVBits>;
    float sum[kFields / 2][4] = {};
#pragma unroll
    for (int f = 0; f < kFields; f += 2)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
        mma_m16n8k16(sum[f / 2], V::kOnes << (Config::kVBits * f), V::kOnes << (Config::kVBits * (f + 1)),
                     V::kOnes << (Config::kVBits * f), V::kOnes << (Config::kVBits * (f + 1)), p[0][j][0], p[0][j][1]);
    constexpr int kAtOnce = S::kVWords % 4 == 0 ? 4 : S::kVWords % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int start = 0; start < S::kVWords; start += kAtOnce) {
      uint32_t words[kBlocks][kAtOnce];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) load_words(words[j], codes(first + j * S::kVWords + start));
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w)
#pragma unroll
        for (int f = 0; f < kFields; f += 2) {
          float product[4] = {};
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) {
            const uint32_t word = words[j][w], odd = word >> 8;
            mma_m16n8k16(product, V::field(word, f), V::field(word, f + 1), V::field(odd, f), V::field(odd, f + 1),
                         p[0][j][0], p[0][j][1]);
          }
          const int tile = ((start + w) * kFields + f) / 2;
          uint32_t params[2];
          load_words(params, record + Config::kVParams + (g * S::kTiles + tile) * 8);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float scale = __uint_as_float(params[i / 2] & 0xffff0000u);
            const float offset = __uint_as_float(params[i / 2] << 16);
            state.o[tile][i] = fmaf(scale, product[i], fmaf(offset, sum[f / 2][i], state.o[tile][i]));
          }
        }
    }
  }
}

// Attends to a pass's tokens of a page. kPlain is the fast way, for what all pages in the middle of a sequence are: all
// tokens seen, no cap on scores, and no maximum to be raised. Returns false, with nothing done, if one has to be.
template <bool kPlain, typename Config>
__device__ __forceinline__ bool attend_pass(const DecodeArguments& args, const uint8_t* record,
                                            const Query<Config>& query, State<Config>& state, const Unit& unit,
                                            int pass) {
  using S = Shape<Config>;
  constexpr int kTokens = S::kTokens;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int first = (Config::kHalves ? c / 2 : pass) * kTokens;
  const bool masked = !kPlain && unit.what & Unit::kMasked, capped = !kPlain && args.softcap > 0.f;
  const int first_key = unit.position() + 8 * first + g;

  float s[kTokens][2];
  score(s, record, query, pass, {capped ? 0.f : -state.max[0], capped ? 0.f : -state.max[1]});
  if (capped) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int col = 0; col < 2; ++col) s[i][col] = soft_cap(args.softcap, s[i][col]) - state.max[col];
  }
  if (masked) {  // whatever the score of a token that is not seen, NaN for instance, it is replaced here
    const Visible visible = visible_keys<Config>(args, unit.segment / Config::kKVHeads);
#pragma unroll
    for (int col = 0; col < 2; ++col)
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (is_hidden<Config>(args, visible, 2 * c + col, first_key + 8 * i, visible.begin, visible.end))
          s[i][col] = -CUDART_INF_F;
  }

  if constexpr (kShortOfRegisters<Config>) compiler_fence();
  auto load_params = [&](uint32_t (&words)[kTokens], int group) {
    load_words(words, record + Config::kVParams + group * 256 + g * 32 + first * 4);
    if (masked) {
      const Visible visible = visible_keys<Config>(args, unit.segment / Config::kKVHeads);
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        if (first_key + 8 * i < visible.begin || first_key + 8 * i >= visible.end) words[i] = 0;
    }
  };
  // A float16 output is held to a bound that is near what rounding p * v_scale does: the other sums take what is left
  // of p.
  constexpr bool kConsistent = !Config::kBf16 && Config::kVGroups == 1;
  // The sums of p and of p * v_offset, and p * v_scale, whose maximum is kept within fp16's range: raised when it must
  // be.
  float sum[2], offset[Config::kVGroups][2];
  __half2 scaled[Config::kVGroups][kTokens];
  auto exponentiate = [&] {
    __half2 top = __float2half2_rn(0.f);
    float p[kTokens][2];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) p[i][0] = ex2(s[i][0]), p[i][1] = ex2(s[i][1]);
#pragma unroll
    for (int j = 0; j < Config::kVGroups; ++j) {
      uint32_t words[kTokens];
      if constexpr (!Config::kVChannelWise) load_params(words, j);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const float scale = Config::kVChannelWise ? 1.f : __uint_as_float(words[i]);
        scaled[j][i] = __floats2half2_rn(p[i][0] * scale, p[i][1] * scale);
        top = __hmax2(top, __habs2(scaled[j][i]));
        if constexpr (kConsistent) {  // what p is in the product
          const float2 rounded = __half22float2(scaled[j][i]);
          const float inverse = __fdividef(1.f, scale);
          if (rounded.x != 0.f) p[i][0] = rounded.x * inverse;
          if (rounded.y != 0.f) p[i][1] = rounded.y * inverse;
        }
        if constexpr (!Config::kVChannelWise) {
#pragma unroll
          for (int col = 0; col < 2; ++col)
            offset[j][col] = fmaf(p[i][col], __uint_as_float(words[i] << 16), i ? offset[j][col] : 0.f);
        }
      }
    }
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      sum[col] = p[0][col];
#pragma unroll
      for (int i = 1; i < kTokens; ++i) sum[col] += p[i][col];
    }
    return !__hble2(top, __float2half2_rn(kMostScaled));
  };
  if constexpr (kPlain) {
    if (__any_sync(kAllLanes, exponentiate())) return false;
  } else if (state.any_fresh || __any_sync(kAllLanes, exponentiate())) {
    float scales[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) scales[i] = Config::kVChannelWise ? 1.f : 0.f;
    if constexpr (!Config::kVChannelWise) {
#pragma unroll
      for (int j = 0; j < Config::kVGroups; ++j) {
        uint32_t words[kTokens];
        load_params(words, j);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) scales[i] = fmaxf(scales[i], fabsf(__uint_as_float(words[i])));
      }
    }
    float2 top = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float weight = lg2(scales[i]);
      top.x = fmaxf(top.x, s[i][0] + weight), top.y = fmaxf(top.y, s[i][1] + weight);
    }
    const float2 rise = state.raise(top);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) s[i][0] -= rise.x, s[i][1] -= rise.y;
    exponentiate();
  }
#pragma unroll
  for (int col = 0; col < 2; ++col) {
    state.sum[col] += sum[col];
#pragma unroll
    for (int j = 0; j < S::kOffsets; ++j) state.offset[j][col] += offset[j][col];
  }

  uint32_t p[Config::kVGroups][4 / S::kPasses][2];
#pragma unroll
  for (int j = 0; j < Config::kVGroups; ++j)
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      p[j][i / 2][i % 2] = movmatrix_trans(to_bits(scaled[j][i]));
      // The rows of columns 4 to 7 are those of columns 0 to 3, their tokens the page's second half.
      // Nothing is asked of those columns then: zeros take the least power.
      if constexpr (Config::kHalves) {
        p[j][i / 2 + 2][i % 2] = __shfl_xor_sync(kAllLanes, p[j][i / 2][i % 2], 16);
        if (lane >= 16) p[j][i / 2][i % 2] = p[j][i / 2 + 2][i % 2] = 0;
      }
    }
  add_values(state, record, p, pass);
  return true;
}

template <typename Config>
__device__ __forceinline__ void attend_page(const DecodeArguments& args, const uint8_t* record,
                                            const Query<Config>& query, State<Config>& state, const Unit& unit) {
#pragma unroll 1
  for (int pass = 0; pass < Shape<Config>::kPasses; ++pass) {
    const bool is_plain = !(unit.what & Unit::kMasked) && !state.any_fresh && !(args.softcap > 0.f);
    if (is_plain && attend_pass<true>(args, record, query, state, unit, pass)) continue;
    attend_pass<false>(args, record, query, state, unit, pass);
  }
}

}  // namespace foscar
