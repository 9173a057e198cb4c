// One page: the query as operand, scores, softmax, output, and what a warp accumulates.
#pragma once

#include "types.cuh"

namespace foscar {

// How one operand is packed, and the masks and weights that follow.
template <int kBits>
struct Codes {
  static constexpr int kFields = 8 / kBits;  // of a byte
  static constexpr uint32_t kMask = kBits == 2 ? 0x00030003u : 0x000f000fu;
  // Field f of both halves of a word: two fp16 operands, code * 2^-24 * weight(f).
  static __device__ __forceinline__ uint32_t field(uint32_t word, int f) { return word & (kMask << (kBits * f)); }
  static __device__ __forceinline__ constexpr float inverse_weight(int f) { return 1.f / (1 << (kBits * f)); }
};

// What a warp accumulates for one (sequence, head). Maxima, sums and scores are in powers of two.
template <typename Config>
struct State {
  float o[Shape<Config>::kTiles][4];
  float max[2], sum[2], offset[2];  // of columns 2c and 2c + 1; sum and offset of this lane's tokens only

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Shape<Config>::kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) max[i] = kNoMax, sum[i] = 0.f, offset[i] = 0.f;
  }
};

// The query of one (sequence, head) as B operand, and its sum over channels.
template <typename Config>
struct Query {
  uint32_t fragment[Shape<Config>::kKSteps][2];
  float score_unit[2], sum[2];  // of columns 2c and 2c + 1, in powers of two, sm_scale included
};

template <typename Config>
__device__ __forceinline__ Query<Config> load_query(const DecodeArguments& args, int b, int h) {
  using S = Shape<Config>;
  using K = Codes<Config::kKBits>;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int row = g & S::kRowMask;
  const bool valid = row < args.q_len * args.group && c * S::kRun < S::kHeadDim;
  const int64_t base = b * args.q_strides[0] + (row / args.group) * args.q_strides[1] +
                       (h * args.heads_per_kv + row % args.group) * args.q_strides[2] + c * S::kRun;
  using T = typename Config::T;
  float x[S::kRun];
  float sum = 0.f, top = 0.f;
#pragma unroll
  for (int i = 0; i < S::kRun; i += 8) {
    uint4 loaded = {0, 0, 0, 0};
    if (valid) loaded = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.q) + base + i);
    const T* values = reinterpret_cast<const T*>(&loaded);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[i + j] = static_cast<float>(values[j]);
      sum += x[i + j];
      top = fmaxf(top, fabsf(x[i + j]));
    }
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, d);
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
  }
  // A power of two that brings the largest value into [2^14, 2^15): exact, and far from fp16's ends. NaN stays NaN.
  const int exponent = min(max((static_cast<int>(__float_as_uint(top) >> 23) & 255) - 127, -100), 100);
  const float normaliser = __uint_as_float((127 + 14 - exponent) << 23);
  Query<Config> query;
  constexpr int kChannels = 4 * K::kFields;  // of a word
#pragma unroll
  for (int w = 0; w < S::kRunWords; ++w)
#pragma unroll
    for (int f = 0; f < K::kFields; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Bytes `half` and `half + 2` of the word, field f.
        const int channel = w * kChannels + half * K::kFields + f;
        const float scale = normaliser * K::inverse_weight(f);
        const __half2 pair = __floats2half2_rn(x[channel] * scale, x[channel + 2 * K::kFields] * scale);
        query.fragment[w * K::kFields + f][half] = *reinterpret_cast<const uint32_t*>(&pair);
      }
  const float unit = args.sm_scale * 1.4426950408889634f;
  sum *= unit;
  const float score_unit = unit * kCodeUnit / normaliser;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    query.sum[i] = __shfl_sync(kAllLanes, sum, (2 * c + i) * 4);
    query.score_unit[i] = __shfl_sync(kAllLanes, score_unit, (2 * c + i) * 4);
  }
  return query;
}

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

// Attends to one page. `position` is that of its first token; `masked` says that not all its tokens are seen by all rows.
template <typename Config>
__device__ __forceinline__ void attend_page(const DecodeArguments& args, const uint8_t* record,
                                            const Query<Config>& query, State<Config>& state, int position, int length,
                                            bool masked) {
  using S = Shape<Config>;
  using K = Codes<Config::kKBits>;
  using V = Codes<Config::kVBits>;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;

  // S^T = K q^T: rows are tokens 16 j + g and 16 j + 8 + g.
  float products[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t low[S::kRunWords], high[S::kRunWords];
    const uint8_t* row = record + Config::kKCodes + (16 * j + g) * S::kRowBytes + c * (S::kRunWords * 4);
    load_words(low, row);
    load_words(high, row + 8 * S::kRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) products[j][i] = 0.f;
#pragma unroll
    for (int w = 0; w < S::kRunWords; ++w) {
      const uint32_t low_odd = low[w] >> 8, high_odd = high[w] >> 8;
#pragma unroll
      for (int f = 0; f < K::kFields; ++f) {
        const uint32_t(&b)[2] = query.fragment[w * K::kFields + f];
        mma_m16n8k16(products[j], K::field(low[w], f), K::field(high[w], f), K::field(low_odd, f),
                     K::field(high_odd, f), b[0], b[1]);
      }
    }
  }

  // This lane's tokens are 8 (first + i) + g, for i below kTokens.
  constexpr int kTokens = 2 * S::kBlocks;
  const int half = Config::kHalves ? c / 2 : 0, first = half * kTokens;
  float s[kTokens][2];
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      s[i][col] = products[i / 2][i % 2 * 2 + col];
      if (Config::kHalves && half) s[i][col] = products[i / 2 + 2][i % 2 * 2 + col];
    }

  // Parameters: the whole word is the scale, its low half the offset.
  uint32_t k_words[kTokens], v_words[kTokens];
  load_words(k_words, record + Config::kKParams + g * 32 + first * 4);
  load_words(v_words, record + Config::kVParams + g * 32 + first * 4);
  const int first_key = position + 8 * first + g;
  if (masked) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
      if (first_key + 8 * i >= length) k_words[i] = v_words[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float scale = __uint_as_float(k_words[i]), offset = __uint_as_float(k_words[i] << 16);
#pragma unroll
    for (int col = 0; col < 2; ++col)
      s[i][col] = fmaf(scale * query.score_unit[col], s[i][col], offset * query.sum[col]);
  }
  if (args.softcap > 0.f) {
    const float cap = args.softcap * 1.4426950408889634f, slope = __fdividef(2.f * 1.4426950408889634f, cap);
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int col = 0; col < 2; ++col)
        // tanh(y) = 1 - 2 / (1 + e^2y): exact at both ends, where e^2y is 0 or infinite.
        s[i][col] = cap * (1.f - __fdividef(2.f, 1.f + ex2(s[i][col] * slope)));
  }
  if (masked) {
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      const int last = length - args.tail + ((2 * c + col) & S::kRowMask) / args.group;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const int key = first_key + 8 * i;
        if (key > last || (args.window_left >= 0 && key < last - args.window_left)) s[i][col] = -CUDART_INF_F;
      }
    }
  }

  // The maximum is that of p * v_scale, so that the second product's operand stays within fp16's range.
  float rise[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float weight = fmaxf(lg2(__uint_as_float(v_words[i])), -40.f);
#pragma unroll
    for (int col = 0; col < 2; ++col) rise[col] = fmaxf(rise[col], s[i][col] + weight);
  }
  if (__any_sync(kAllLanes, rise[0] > state.max[0] + kLazyRise || rise[1] > state.max[1] + kLazyRise)) {
#pragma unroll
    for (int col = 0; col < 2; ++col) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) rise[col] = fmaxf(rise[col], __shfl_xor_sync(kAllLanes, rise[col], d));
      const float raised = fmaxf(state.max[col], rise[col]);
      const float factor = ex2(state.max[col] - raised);
      state.max[col] = raised;
      state.sum[col] *= factor;
      state.offset[col] *= factor;
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) state.o[t][col] *= factor, state.o[t][col + 2] *= factor;
    }
  }

  // P^T as B operand, two tokens a register. A half's columns are zero for the other half's tokens.
  uint32_t p[4][2];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float scale = __uint_as_float(v_words[i]), offset = __uint_as_float(v_words[i] << 16);
    float e[2];
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      e[col] = ex2(s[i][col] - state.max[col]);
      state.sum[col] += e[col];
      state.offset[col] = fmaf(e[col], offset, state.offset[col]);
    }
    const __half2 pair = __floats2half2_rn(e[0] * scale, e[1] * scale);
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
    if constexpr (Config::kHalves) {
      p[i / 2][i % 2] = movmatrix_trans(half ? 0u : bits);
      p[i / 2 + 2][i % 2] = movmatrix_trans(half ? bits : 0u);
    } else {
      p[i / 2][i % 2] = movmatrix_trans(bits);
    }
  }

  // O^T += V^T P^T: rows are channels 16 t + g and 16 t + 8 + g.
#pragma unroll
  for (int chunk = 0; chunk < S::kVWords; ++chunk) {
    uint32_t words[4];
    load_words(words, record + Config::kVCodes + chunk * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int number = 4 * chunk + i, j = number / S::kVWords, w = number % S::kVWords;
      const uint32_t odd = words[i] >> 8;
#pragma unroll
      for (int f = 0; f < V::kFields; f += 2)
        mma_m16n8k16(state.o[(w * V::kFields + f) / 2], V::field(words[i], f), V::field(words[i], f + 1),
                     V::field(odd, f), V::field(odd, f + 1), p[j][0], p[j][1]);
    }
  }
}

// Sums over lanes, calls `begin(row, max, sum)` for each of a lane's rows, and `store(begun, channel, output)` for each
// of its channels.
template <typename Config, typename Begin, typename Store>
__device__ __forceinline__ void finish_state(State<Config>& state, Begin begin, Store store) {
  using S = Shape<Config>;
  using V = Codes<Config::kVBits>;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int col = 0; col < 2; ++col) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      state.sum[col] += __shfl_xor_sync(kAllLanes, state.sum[col], d);
      state.offset[col] += __shfl_xor_sync(kAllLanes, state.offset[col], d);
    }
    if constexpr (Config::kHalves) {  // lanes c and c ^ 2 have the same row
      const float top = fmaxf(state.max[col], __shfl_xor_sync(kAllLanes, state.max[col], 2));
      const float factor = ex2(state.max[col] - top);
      auto merge = [&](float x) { return x * factor + __shfl_xor_sync(kAllLanes, x * factor, 2); };
      state.max[col] = top;
      state.sum[col] = merge(state.sum[col]);
      state.offset[col] = merge(state.offset[col]);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
        state.o[t][col] = merge(state.o[t][col]), state.o[t][col + 2] = merge(state.o[t][col + 2]);
    }
    const auto begun = begin(2 * c + col, state.max[col], state.sum[col]);
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float unit = kCodeUnit * V::inverse_weight((2 * t + half) % V::kFields);
        store(begun, 16 * t + 8 * half + g, fmaf(state.o[t][2 * half + col], unit, state.offset[col]));
      }
  }
}

}  // namespace foscar
