// Decode attention over packed pages for up to 8 query rows of a KV head.
//
// Work. A unit is one page of one (sequence, KV head); units are numbered sequence by sequence, head by head. Every
// warp of the grid takes an equal run of them, whatever the lengths are. A run may begin or end inside a (sequence,
// head): what a warp has of such a one is a partial result, merged within the CTA through shared memory, and across
// CTAs by the one that arrives last.
//
// Products. Codes enter the tensor cores as they lie: a 2-bit or 4-bit field of a 16-bit half is the fp16 subnormal
// code * 2^-24, times the field's weight. Both products are transposed, S^T = K q^T and O^T = V^T P^T, so that the
// packed operand is always A. Scale and offset are folded into scores and probabilities (docs/numerics.md).
//
// Halves. With at most 4 rows, columns 4 to 7 of an accumulator would be idle. They repeat the rows instead, and each
// half of the columns does the softmax of half of a page's tokens. Their results are merged at the end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "ptx.cuh"

namespace foscar {

constexpr int kPageSize = 64;
constexpr int kRows = 8;              // columns of an accumulator: the query rows of one KV head
constexpr float kNoMax = -1e30f;      // below every score
constexpr float kLazyRise = 6.f;      // a maximum is raised when a score exceeds it by this, in powers of two
constexpr float kCodeUnit = 16777216.f;  // 2^24, the inverse of the smallest fp16 subnormal
constexpr unsigned kAllLanes = 0xffffffffu;

struct DecodeArguments {
  const void* q;                // [batch, q_len, num_q_heads, head_dim], rows contiguous and 16-byte aligned
  const uint8_t* pages;         // [num_pages, num_kv_heads, record_bytes]
  const int* block_table;       // [batch, block_table_stride]
  const int* seq_lens;          // [batch]
  const float* sinks;           // [num_q_heads] or null
  void* out;                    // as q
  float* lse;                   // [batch, q_len, num_q_heads]
  float* warp_partials;         // [grid * warps, kRows * (head_dim + 2)]
  float* cta_partials;          // [grid * 2, kRows * (head_dim + 2)]
  uint32_t* arrivals;           // [batch * num_kv_heads], zero between launches
  int64_t q_strides[3];         // batch, token, head; in elements
  int64_t out_strides[3];
  int64_t lse_strides[2];       // batch, token
  int batch, num_kv_heads;
  int q_len, tail;              // query tokens, and the tokens from the first of them to the end of the sequence
  int group, heads_per_kv;      // query heads of a KV head: those attended here, and all in q
  int block_table_stride;
  int window_left;              // -1: none
  float sm_scale, softcap;      // softcap 0: none
};

// How one operand is packed, and the masks and weights that follow.
template <int kBits>
struct Codes {
  static constexpr int kFields = 8 / kBits;  // of a byte
  static constexpr uint32_t kMask = kBits == 2 ? 0x00030003u : 0x000f000fu;
  // Field f of both halves of a word: two fp16 operands, code * 2^-24 * weight(f).
  static __device__ __forceinline__ uint32_t field(uint32_t word, int f) { return word & (kMask << (kBits * f)); }
  static __device__ __forceinline__ constexpr float inverse_weight(int f) { return 1.f / (1 << (kBits * f)); }
};

template <typename Config>
struct Shape {
  static constexpr int kHeadDim = Config::kHeadDim;
  // Channels of a token's K row that one lane of four takes; with head_dim 96 the fourth takes none.
  static constexpr int kRun = kHeadDim == 64 ? 16 : kHeadDim == 256 ? 64 : 32;
  static constexpr int kRowBytes = kHeadDim * Config::kKBits / 8;
  static constexpr int kRunWords = kRun * Config::kKBits / 32;
  static constexpr int kKSteps = kRun / 4;         // mma steps along head_dim
  static constexpr int kVWords = kHeadDim * Config::kVBits / 64;  // a lane's words for 16 tokens
  static constexpr int kTiles = kHeadDim / 16;     // 16-channel tiles of O^T
  static constexpr int kPartialFloats = kRows * (kHeadDim + 2);
  static constexpr int kRowMask = Config::kHalves ? kRows / 2 - 1 : kRows - 1;  // column to row
  static constexpr int kBlocks = Config::kHalves ? 2 : 4;  // of 16 tokens, of a page, whose softmax a lane takes part in
};

// What lies in a stage.
struct Unit {
  int segment;  // sequence * num_kv_heads + head
  int page;     // among the sequence's visible pages; -1: none, the sequence is empty
};

template <typename Config>
struct alignas(128) SharedMemory {
  uint8_t records[Config::kWarps][Config::kStages][Config::kRecordBytes];  // a warp's last partial result in the end
  uint64_t full[Config::kWarps][Config::kStages];
  Unit units[Config::kWarps][Config::kStages];
  int partial_segments[2 * Config::kWarps];  // of each warp's first and last partial result; -1: none
  float partial_max[2 * Config::kWarps][kRows], partial_sum[2 * Config::kWarps][kRows];
  float weights[2 * Config::kWarps][kRows];
  float merged_max[kRows], merged_sum[kRows];
  int scan[Config::kWarps];
  int is_last;
  int cumulative[1];  // [batch + 1] units of one head, by sequence
  static_assert(sizeof(records[0]) >= Shape<Config>::kPartialFloats * sizeof(float), "a partial fits a warp's stages");
};

// The keys that a sequence's queries can see, and the pages that hold them.
struct Visible {
  int length, first_page, num_pages;
};

__device__ __forceinline__ Visible visible_pages(const DecodeArguments& args, int b) {
  const int length = args.seq_lens[b];
  int first = 0;
  if (args.window_left >= 0) first = max(length - args.tail - args.window_left, 0) / kPageSize;
  return {length, first, (length + kPageSize - 1) / kPageSize - first};
}

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

// A warp's partial result keeps its maxima and sums in shared memory; that of a CTA follows [kRows][head_dim] outputs by
// kRows maxima and kRows sums.
template <typename Config>
__device__ __forceinline__ float* row_max(float* partial, int row) {
  return partial + kRows * Shape<Config>::kHeadDim + row;
}

// Merges the partials of warps in slots [first_slot, stop_slot), those that there are, and hands each element of the
// result to `finish(row, channel, output, max, sum)`. All threads of the CTA take part.
template <typename Config, typename Finish>
__device__ __forceinline__ void merge_warps(SharedMemory<Config>& smem, const float* spilled, int rows, int first_slot,
                                            int stop_slot, Finish finish) {
  using S = Shape<Config>;
  constexpr int kSlots = 2 * Config::kWarps;
  static_assert(kSlots <= 32, "a lane for each slot");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool taken = lane >= first_slot && lane < stop_slot && smem.partial_segments[lane] >= 0;
  for (int row = warp; row < rows; row += Config::kWarps) {
    const float max = taken ? smem.partial_max[lane][row] : kNoMax;
    float top = max;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
    const float weight = taken ? ex2(max - top) : 0.f;
    float sum = taken ? weight * smem.partial_sum[lane][row] : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    if (lane < kSlots) smem.weights[lane][row] = weight;
    if (lane == 0) smem.merged_max[row] = top, smem.merged_sum[row] = sum;
  }
  __syncthreads();
  for (int e = threadIdx.x * 4; e < rows * S::kHeadDim; e += Config::kWarps * 32 * 4) {
    const int row = e / S::kHeadDim;
    float4 out = {0.f, 0.f, 0.f, 0.f};
    auto add = [&](float weight, const float* source) {
      const float4 v = *reinterpret_cast<const float4*>(source + e);
      out.x = fmaf(weight, v.x, out.x), out.y = fmaf(weight, v.y, out.y);
      out.z = fmaf(weight, v.z, out.z), out.w = fmaf(weight, v.w, out.w);
    };
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const float first = smem.weights[2 * w][row], last = smem.weights[2 * w + 1][row];
      if (first != 0.f) add(first, spilled + w * S::kPartialFloats);
      if (last != 0.f) add(last, reinterpret_cast<const float*>(smem.records[w]));
    }
    finish(row, e % S::kHeadDim, out, smem.merged_max[row], smem.merged_sum[row]);
  }
}

// The same for the partials of CTAs, `partial(0)` to `partial(count - 1)`, read past the first-level cache.
template <typename Config, typename Partial, typename Finish>
__device__ __forceinline__ void merge_ctas(SharedMemory<Config>& smem, int rows, int count, Partial partial,
                                           Finish finish) {
  using S = Shape<Config>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < rows; row += Config::kWarps) {
    float top = kNoMax, sum = 0.f;
    for (int i = lane; i < count; i += 32) {
      const float* source = row_max<Config>(partial(i), row);
      const float max = __ldcg(source), more = __ldcg(source + kRows);
      const float raised = fmaxf(top, max);
      sum = fmaf(sum, ex2(top - raised), more * ex2(max - raised));
      top = raised;
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float other_top = __shfl_xor_sync(kAllLanes, top, d), more = __shfl_xor_sync(kAllLanes, sum, d);
      const float raised = fmaxf(top, other_top);
      sum = fmaf(sum, ex2(top - raised), more * ex2(other_top - raised));
      top = raised;
    }
    if (lane == 0) smem.merged_max[row] = top, smem.merged_sum[row] = sum;
  }
  __syncthreads();
  for (int e = threadIdx.x * 4; e < rows * S::kHeadDim; e += Config::kWarps * 32 * 4) {
    const int row = e / S::kHeadDim;
    const float top = smem.merged_max[row];
    float4 out = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      float* const source = partial(i);
      const float weight = ex2(__ldcg(row_max<Config>(source, row)) - top);
      const float4 v = __ldcg(reinterpret_cast<const float4*>(source + e));
      out.x = fmaf(weight, v.x, out.x), out.y = fmaf(weight, v.y, out.y);
      out.z = fmaf(weight, v.z, out.z), out.w = fmaf(weight, v.w, out.w);
    }
    finish(row, e % S::kHeadDim, out, top, smem.merged_sum[row]);
  }
}

// A row of the output, and what its unnormalised values are to be multiplied by.
template <typename Config>
struct OutputRow {
  typename Config::T* channels;  // null: no such row
  float factor;
};

// Finds a row of the output, lets its sink logit into the sum, and writes its log-sum-exp if asked to.
template <typename Config>
__device__ __forceinline__ OutputRow<Config> output_row(const DecodeArguments& args, int segment, int row, float max,
                                                        float sum, bool write_lse) {
  if (row >= args.q_len * args.group) return {nullptr, 0.f};
  const int b = segment / args.num_kv_heads, token = row / args.group;
  const int head = segment % args.num_kv_heads * args.heads_per_kv + row % args.group;
  float lse = -CUDART_INF_F, factor = sum == 0.f ? 0.f : 1.f / sum;  // NaN stays NaN
  if (sum > 0.f) {
    if (args.sinks) {
      const float sink = args.sinks[head] * 1.4426950408889634f, raised = fmaxf(max, sink);
      const float keep = ex2(max - raised);
      sum = fmaf(sum, keep, ex2(sink - raised));
      factor = keep / sum;
      max = raised;
    }
    lse = (max + lg2(sum)) * 0.6931471805599453f;
  }
  if (write_lse) args.lse[b * args.lse_strides[0] + token * args.lse_strides[1] + head] = lse;
  auto* const out = static_cast<typename Config::T*>(args.out);
  return {out + b * args.out_strides[0] + token * args.out_strides[1] + head * args.out_strides[2], factor};
}

template <typename Config>
__device__ __forceinline__ void write_output(const DecodeArguments& args, int segment, int row, int channel, float4 out,
                                             float max, float sum) {
  using T = typename Config::T;
  const OutputRow<Config> target = output_row<Config>(args, segment, row, max, sum, channel == 0);
  const T values[4] = {static_cast<T>(out.x * target.factor), static_cast<T>(out.y * target.factor),
                       static_cast<T>(out.z * target.factor), static_cast<T>(out.w * target.factor)};
#pragma unroll
  for (int i = 0; i < 4; ++i) target.channels[channel + i] = values[i];
}

// Where a segment's units lie.
struct Span {
  int first, stop;
};

__device__ __forceinline__ Span segment_span(const DecodeArguments& args, const int* cumulative, int segment) {
  const int b = segment / args.num_kv_heads, head = segment % args.num_kv_heads;
  const int units = cumulative[b + 1] - cumulative[b];
  const int first = cumulative[b] * args.num_kv_heads + head * units;
  return {first, first + units};
}

// `total` units dealt out to `parts`, the first of which get one more if they do not come out even.
struct Shares {
  int base, extra;
  __device__ __forceinline__ Shares(int total, int parts) : base(total / parts), extra(total % parts) {}
  __device__ __forceinline__ int begin(int part) const { return part * base + min(part, extra); }
  __device__ __forceinline__ int owner(int unit) const {
    const int fuller = extra * (base + 1);
    return unit < fuller ? unit / (base + 1) : extra + (unit - fuller) / base;
  }
};

// The CTAs that work, and this one's run of units. Few units take few CTAs: each is a partial to merge.
struct CtaRun {
  int ctas;
  Shares shares;
  int first, stop;
  __device__ __forceinline__ CtaRun(int total, int fewest)
      : ctas(min(static_cast<int>(gridDim.x), (total + fewest - 1) / fewest)),
        shares(total, ctas),
        first(shares.begin(blockIdx.x)),
        stop(shares.begin(blockIdx.x + 1)) {}
};

template <typename Config>
__device__ __forceinline__ void decode(const DecodeArguments& args) {
  using S = Shape<Config>;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& smem = *reinterpret_cast<SharedMemory<Config>*>(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  constexpr int kThreads = Config::kWarps * 32;

  if (lane == 0) {
    for (int i = 0; i < Config::kStages; ++i) mbarrier_init(smem_address(&smem.full[warp][i]), 1);
    fence_mbarrier_init();
    smem.partial_segments[2 * warp] = smem.partial_segments[2 * warp + 1] = -1;
  }
  if (thread == 0) smem.cumulative[0] = 0;

  // Units of one head up to each sequence. An empty sequence has one, without a page, so that its output is written.
  int carried = 0;
  for (int start = 0; start < args.batch; start += kThreads) {
    const int b = start + thread;
    int units = b < args.batch ? max(visible_pages(args, b).num_pages, 1) : 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(kAllLanes, units, d);
      if (lane >= d) units += before;
    }
    if (lane == 31) smem.scan[warp] = units;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < Config::kWarps; ++w) {
      if (w < warp) units += smem.scan[w];
      total += smem.scan[w];
    }
    if (b < args.batch) smem.cumulative[b + 1] = carried + units;
    carried += total;
    __syncthreads();
  }

  constexpr int kFewest = Config::kWarps * Config::kMinUnits;
  int first, count;  // this warp's units
  {
    const CtaRun run(carried * args.num_kv_heads, kFewest);
    if (static_cast<int>(blockIdx.x) >= run.ctas) return;
    const Shares warp_shares(run.stop - run.first, Config::kWarps);
    first = run.first + warp_shares.begin(warp);
    count = run.first + warp_shares.begin(warp + 1) - first;
  }

  // The lanes look up where units are, 32 at a time: lane i has unit `looked_up + i` of this warp.
  int looked_up = -32;
  Unit unit_of = {-1, -1};
  const uint8_t* record_of = nullptr;
  auto look_up = [&](int start) {
    looked_up = start;
    if (start + lane >= count) return;
    const int unit = first + start + lane;
    int low = 0, high = args.batch - 1;  // ends at the last sequence that begins at or before the unit
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      const bool begun = smem.cumulative[middle] * args.num_kv_heads <= unit;
      low = begun ? middle : low;
      high = begun ? high : middle - 1;
    }
    const int units = smem.cumulative[low + 1] - smem.cumulative[low];
    const int within = unit - smem.cumulative[low] * args.num_kv_heads;
    const int head = within / units;
    const Visible visible = visible_pages(args, low);
    unit_of = {low * args.num_kv_heads + head, visible.num_pages > 0 ? within % units : -1};
    if (unit_of.page >= 0) {
      const int64_t column = visible.first_page + unit_of.page;
      const int64_t page = args.block_table[low * static_cast<int64_t>(args.block_table_stride) + column];
      record_of = args.pages + (page * args.num_kv_heads + head) * Config::kRecordBytes;
    }
  };

  // Records are fetched kStages ahead, across the borders of segments.
  auto fetch = [&](int i, int stage) {
    if (i - looked_up >= 32) look_up(i);
    if (lane == i - looked_up) {
      const uint32_t barrier = smem_address(&smem.full[warp][stage]);
      smem.units[warp][stage] = unit_of;
      mbarrier_arrive_expect_tx(barrier, unit_of.page >= 0 ? Config::kRecordBytes : 0);
      if (unit_of.page >= 0)
        cp_async_bulk(smem_address(smem.records[warp][stage]), record_of, Config::kRecordBytes, barrier);
    }
  };
  for (int i = 0; i < min(Config::kStages, count); ++i) fetch(i, i);
  __syncwarp();

  int segment = -1;
  Visible visible = {};
  Query<Config> query;
  State<Config> state;
  const int rows = args.q_len * args.group;
  float* const spilled = args.warp_partials + static_cast<int64_t>(blockIdx.x) * Config::kWarps * S::kPartialFloats;
  auto finish_segment = [&](bool is_last) {
    const Span span = segment_span(args, smem.cumulative, segment);
    if (span.first >= first && span.stop <= first + count) {
      finish_state(
          state,
          [&](int row, float max, float sum) {
            return output_row<Config>(args, segment, row, max, sum, lane / 4 == 0);
          },
          [](const OutputRow<Config>& row, int channel, float out) {
            if (row.channels) row.channels[channel] = static_cast<typename Config::T>(out * row.factor);
          });
    } else {
      // The last partial may take the warp's stages; an earlier one, while they are in use, goes to global memory.
      const int slot = 2 * warp + is_last;
      float* const partial = is_last ? reinterpret_cast<float*>(smem.records[warp]) : spilled + warp * S::kPartialFloats;
      if (lane == 0) smem.partial_segments[slot] = segment;
      __syncwarp();
      finish_state(
          state,
          [&](int row, float max, float sum) -> float* {
            if (row >= rows) return nullptr;
            if (lane / 4 == 0) smem.partial_max[slot][row] = max, smem.partial_sum[slot][row] = sum;
            return partial + row * S::kHeadDim;
          },
          [](float* row, int channel, float out) {
            if (row) row[channel] = out;
          });
    }
  };
  int stage = 0, phase = 0;
  for (int i = 0;; ++i) {
    const Unit unit = i < count ? smem.units[warp][stage] : Unit{-1, -1};
    if (unit.segment != segment) {
      if (segment >= 0) finish_segment(i == count);
      segment = unit.segment;
      if (segment >= 0) {
        visible = visible_pages(args, segment / args.num_kv_heads);
        query = load_query<Config>(args, segment / args.num_kv_heads, segment % args.num_kv_heads);
        state.clear();
      }
    }
    if (i >= count) break;
    mbarrier_wait(smem_address(&smem.full[warp][stage]), phase);
    if (unit.page >= 0) {
      const int position = (visible.first_page + unit.page) * kPageSize;
      const bool masked = position + kPageSize > visible.length - args.tail + 1 ||
                          (args.window_left >= 0 && position < visible.length - 1 - args.window_left);
      attend_page(args, smem.records[warp][stage], query, state, position, visible.length, masked);
    }
    __syncwarp();
    if (i + Config::kStages < count) fetch(i + Config::kStages, stage);
    __syncwarp();
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    phase ^= stage == 0;
  }
  __syncthreads();

  // Partials of one segment are neighbours in the order of warps. At most two segments reach beyond this CTA, its first
  // and its last: their parts are left for the CTA that arrives last.
  const CtaRun run(smem.cumulative[args.batch] * args.num_kv_heads, kFewest);  // again, to keep registers for the loop
  int first_shared = -1, last_shared = -1;
#pragma unroll 1
  for (int slot = 0; slot < 2 * Config::kWarps;) {
    const int first_slot = slot, merged = smem.partial_segments[slot++];
    if (merged < 0) continue;
    while (slot < 2 * Config::kWarps && (smem.partial_segments[slot] < 0 || smem.partial_segments[slot] == merged)) ++slot;
    const Span span = segment_span(args, smem.cumulative, merged);
    const bool alone = span.first >= run.first && span.stop <= run.stop;
    // Of a segment's CTAs, the first leaves its part in its second place, the others in their first.
    const bool begins_here = span.first >= run.first;
    float* const part = args.cta_partials + (2 * static_cast<int64_t>(blockIdx.x) + begins_here) * S::kPartialFloats;
    merge_warps(smem, spilled, rows, first_slot, slot, [&](int row, int channel, float4 out, float max, float sum) {
      if (alone) {
        write_output<Config>(args, merged, row, channel, out, max, sum);
      } else {
        *reinterpret_cast<float4*>(part + row * S::kHeadDim + channel) = out;
        if (channel == 0) *row_max<Config>(part, row) = max, *(row_max<Config>(part, row) + kRows) = sum;
      }
    });
    if (!alone) (begins_here ? last_shared : first_shared) = merged;
    __syncthreads();
  }

#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int merged = i ? last_shared : first_shared;
    if (merged < 0) continue;
    const Span span = segment_span(args, smem.cumulative, merged);
    const int first_cta = run.shares.owner(span.first);
    const int parts = run.shares.owner(span.stop - 1) - first_cta + 1;
    if (thread == 0) {
      __threadfence();
      uint32_t* const arrivals = args.arrivals + merged;
      smem.is_last = atomicAdd(arrivals, 1u) == static_cast<uint32_t>(parts - 1);
      if (smem.is_last) *arrivals = 0;  // for the next launch
      __threadfence();
    }
    __syncthreads();
    if (smem.is_last)
      merge_ctas(
          smem, rows, parts,
          [&](int part) {
            return args.cta_partials + (2 * static_cast<int64_t>(first_cta + part) + (part == 0)) * S::kPartialFloats;
          },
          [&](int row, int channel, float4 out, float max, float sum) {
            write_output<Config>(args, merged, row, channel, out, max, sum);
          });
    __syncthreads();
  }
}

}  // namespace foscar
