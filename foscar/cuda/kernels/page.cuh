// One page: scores, softmax, output, and what a warp accumulates.
#pragma once

#include "query.cuh"

namespace foscar {

// What a warp accumulates for one (sequence, head). Maxima, sums and scores are in powers of two.
template <typename Config>
struct State {
  float o[Shape<Config>::kTiles][4];
  float max[2], sum[2];              // of columns 2c and 2c + 1; the sum is of this lane's tokens only
  float offset[Config::kVGroups][2];  // sums of p times offset, of this lane's tokens; not used if V is channel-wise

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      max[col] = kNoMax;
      map(col, [](float) { return 0.f; });
    }
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
};

// Attends to one page. `position` is that of its first token; `masked`: not all its tokens are seen by all rows.
template <typename Config>
__device__ __forceinline__ void attend_page(const DecodeArguments& args, const uint8_t* record,
                                            const Query<Config>& query, State<Config>& state, int position, int length,
                                            bool masked) {
  using S = Shape<Config>;
  using V = Codes<Config::kVBits>;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;

  // This lane's tokens are 8 (first + i) + g, for i below kTokens.
  constexpr int kTokens = 2 * S::kBlocks;
  const int half = Config::kHalves ? c / 2 : 0, first = half * kTokens;
  const int first_key = position + 8 * first + g;

  // S^T = K q^T: rows are tokens 16 j + g and 16 j + 8 + g.
  float s[kTokens][2];
#pragma unroll
  for (int slice = 0; slice < S::kSlices; ++slice) {
    const QueryOperand<Config>& operand = query.operand(record, slice);
    // Parameters: the whole word is the scale, its low half the offset. Groups share the registers there are.
    constexpr int kAtOnce = S::kGroups > 1 ? 2 : 4;
    uint32_t params[S::kGroups][kAtOnce];
#pragma unroll
    for (int j = 0; j < S::kBlocks; ++j) {
      const KBlock<Config> block(record, j, slice), other(record, Config::kHalves ? j + 2 : j, slice);
      if constexpr (!Config::kKChannelWise) {
        const uint8_t* source = record + Config::kKParams + slice * S::kGroups * 256 + g * 32 + (first + 2 * j) * 4;
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i)
          if (2 * j % kAtOnce == 0) load_words(params[i], source + i * 256);
      }
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
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int col = 0; col < 2; ++col) {
            float scale = 1.f, of_group = operand.sum[i][col];
            if constexpr (!Config::kKChannelWise) {
              const uint32_t word = params[i][2 * j % kAtOnce + t];
              scale = __uint_as_float(word);
              of_group *= __uint_as_float(word << 16);
            }
            scaled[t][col] = i ? fmaf(scale, product[2 * t + col], scaled[t][col]) : scale * product[2 * t + col];
            offset[t][col] = i ? offset[t][col] + of_group : of_group;
          }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int col = 0; col < 2; ++col) {
          float& score = s[2 * j + t][col];
          score = fmaf(scaled[t][col], operand.unit[col], slice ? score + offset[t][col] : offset[t][col]);
        }
      if (S::kSlices > 1) __syncwarp();  // what comes next is not loaded before this is done, to spare registers
    }
  }
  if (args.softcap > 0.f) {
    const float cap = args.softcap * kLog2E, slope = __fdividef(2.f * kLog2E, cap);
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int col = 0; col < 2; ++col)
        // tanh(y) = 1 - 2 / (1 + e^2y): exact at both ends, where e^2y is 0 or infinite.
        s[i][col] = cap * (1.f - __fdividef(2.f, 1.f + ex2(s[i][col] * slope)));
  }
  if (masked) {
    // Whatever the score of a token that is not seen, NaN for instance, it is replaced here.
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

  // Token-wise V: the maximum is that of p * v_scale, so that the second product's operand stays within fp16's range.
  uint32_t v_words[Config::kVGroups][kTokens];
  if constexpr (!Config::kVChannelWise) {
#pragma unroll
    for (int i = 0; i < Config::kVGroups; ++i)
      load_words(v_words[i], record + Config::kVParams + i * 256 + g * 32 + first * 4);
    if (masked) {
#pragma unroll
      for (int i = 0; i < Config::kVGroups; ++i)
#pragma unroll
        for (int t = 0; t < kTokens; ++t)
          if (first_key + 8 * t >= length) v_words[i][t] = 0;
    }
  }
  float rise[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float weight = 0.f;
    if constexpr (!Config::kVChannelWise) {
      float scale = __uint_as_float(v_words[0][i]);
#pragma unroll
      for (int j = 1; j < Config::kVGroups; ++j) scale = fmaxf(scale, __uint_as_float(v_words[j][i]));
      weight = fmaxf(lg2(scale), -40.f);
    }
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
      state.map(col, [&](float x) { return x * factor; });
    }
  }

  // P^T as B operand, two tokens a register. With halves, a half's columns are zero for the other half's tokens.
  uint32_t p[Config::kVGroups][4][2];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float e[2];
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      e[col] = ex2(s[i][col] - state.max[col]);
      state.sum[col] += e[col];
    }
#pragma unroll
    for (int j = 0; j < Config::kVGroups; ++j) {
      uint32_t pair;
      if constexpr (Config::kVChannelWise) {
        pair = to_bits(__floats2half2_rn(e[0], e[1]));
      } else {
        const float scale = __uint_as_float(v_words[j][i]), offset = __uint_as_float(v_words[j][i] << 16);
#pragma unroll
        for (int col = 0; col < 2; ++col) state.offset[j][col] = fmaf(e[col], offset, state.offset[j][col]);
        pair = to_bits(__floats2half2_rn(e[0] * scale, e[1] * scale));
      }
      pair = movmatrix_trans(pair);
      p[j][i / 2][i % 2] = Config::kHalves && g >= 4 ? 0u : pair;
      if constexpr (Config::kHalves) p[j][i / 2 + 2][i % 2] = g >= 4 ? pair : 0u;
    }
  }

  // O^T += V^T P^T: rows are channels 16 t + g and 16 t + 8 + g.
  if constexpr (!Config::kVChannelWise) {
#pragma unroll
    for (int chunk = 0; chunk < S::kVWords; ++chunk) {
      uint32_t words[4];
      load_words(words, record + Config::kVCodes + chunk * 512 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int number = 4 * chunk + i, j = number / S::kVWords, w = number % S::kVWords;
        const int group = w * Config::kVGroups / S::kVWords;
        const uint32_t odd = words[i] >> 8;
#pragma unroll
        for (int f = 0; f < V::kFields; f += 2)
          mma_m16n8k16(state.o[(w * V::kFields + f) / 2], V::field(words[i], f), V::field(words[i], f + 1),
                       V::field(odd, f), V::field(odd, f + 1), p[group][j][0], p[group][j][1]);
      }
    }
  } else {
    // Codes that are all 1 give the sum of p, in the unit that the products of their field have.
    float sum[V::kFields / 2][4] = {};
#pragma unroll
    for (int f = 0; f < V::kFields; f += 2)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        mma_m16n8k16(sum[f / 2], V::kOnes << (Config::kVBits * f), V::kOnes << (Config::kVBits * (f + 1)),
                     V::kOnes << (Config::kVBits * f), V::kOnes << (Config::kVBits * (f + 1)),
                     p[0][j][0], p[0][j][1]);
    // Words of a block of tokens whose loads are whole.
    constexpr int kAtOnce = S::kVWords % 4 == 0 ? 4 : S::kVWords;
#pragma unroll
    for (int start = 0; start < S::kVWords; start += kAtOnce) {
      uint32_t words[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int chunk = kAtOnce == 4 ? (i * S::kVWords + start) / 4 : i;
        load_words(words[i], record + Config::kVCodes + chunk * 512 + lane * 16);
      }
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w)
#pragma unroll
        for (int f = 0; f < V::kFields; f += 2) {
          float product[4] = {};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int number = j * kAtOnce + w;
            const uint32_t word = words[number / 4][number % 4], odd = word >> 8;
            mma_m16n8k16(product, V::field(word, f), V::field(word, f + 1), V::field(odd, f), V::field(odd, f + 1),
                         p[0][j][0], p[0][j][1]);
          }
          const int tile = ((start + w) * V::kFields + f) / 2;
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
#pragma unroll
      for (int i = 0; i < S::kOffsets; ++i)
        state.offset[i][col] += __shfl_xor_sync(kAllLanes, state.offset[i][col], d);
    }
    if constexpr (Config::kHalves) {  // lanes c and c ^ 2 have the same row
      const float top = fmaxf(state.max[col], __shfl_xor_sync(kAllLanes, state.max[col], 2));
      const float factor = ex2(state.max[col] - top);
      state.max[col] = top;
      state.map(col, [&](float x) { return x * factor + __shfl_xor_sync(kAllLanes, x * factor, 2); });
    }
    const auto begun = begin(2 * c + col, state.max[col], state.sum[col]);
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float out = state.o[t][2 * half + col] * (kCodeUnit * V::inverse_weight((2 * t + half) % V::kFields));
        if constexpr (S::kOffsets > 0) out += state.offset[t * S::kOffsets / S::kTiles][col];
        store(begun, 16 * t + 8 * half + g, out);
      }
  }
}

}  // namespace foscar
