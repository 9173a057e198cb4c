// What the kernels share, and the decode kernel's arguments and shape of a variant.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "ptx.cuh"

namespace foscar {

constexpr int kPageSize = 64;
constexpr int kRows = 8;          // columns of an accumulator: the query rows of one KV head
constexpr float kNoMax = -1e30f;  // below every score
// p * v_scale is a fp16 operand. Its largest value is 2^kRaised when the maximum is raised, and 2^kMostRaised, which is
// kMostScaled, at most.
constexpr float kRaised = 8.f, kMostRaised = 14.f, kMostScaled = 16384.f;
constexpr float kLeastQuery = 1e-30f;  // of a row's largest magnitude, so that its inverse is finite
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kCodeUnit = 16777216.f;  // 2^24, the inverse of the smallest fp16 subnormal
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr uint32_t kAbsent = 0xffffffffu;  // a word that another CTA has not written yet

struct DecodeArguments {
  const void* q;           // [batch, q_len, num_q_heads, head_dim], rows contiguous and 16-byte aligned
  const uint8_t* pages;    // [num_pages, num_kv_heads, record_bytes]
  const int* block_table;  // [batch, block_table_stride]
  const int* seq_lens;     // [batch]
  const float* sinks;      // [num_q_heads] or null
  void* out;               // as q
  float* lse;              // [batch, q_len, num_q_heads]
  const void* exact;       // [max_seqs, num_kv_heads, 2, sink_tokens + ring_tokens, head_dim]
  const int* lengths;      // [max_seqs, 2]: where the ring begins, and where it ends
  const int* seq_ids;      // [batch] or null: the sequence itself
  float4* cta_parts;       // [grid, 2, 2 * kPartVectors], kAbsent between launches
  float4* warp_parts;      // [grid, warps, kPartVectors]
  int64_t q_strides[3];    // batch, token, head; in elements
  int64_t out_strides[3];
  int64_t lse_strides[2];  // batch, token
  int batch;
  int q_len, tail;          // query tokens, and the tokens from the first of them to the end of the sequence
  int group, heads_per_kv;  // query heads of a KV head: those attended here, and all in q
  int group_inverse;        // 2^16 / group, rounded up
  int block_table_stride, block_table_columns;
  int window_left;  // -1: none
  int sink_tokens, ring_tokens;
  float sm_scale, softcap;  // softcap 0: none
};

// A row of a KV head's query: which token's, and which head of the group's.
struct Row {
  int token, head;
  __device__ __forceinline__ Row(const DecodeArguments& args, int row)
      : token(row * args.group_inverse >> 16), head(row - token * args.group) {}
};

template <typename Config>
struct Shape {
  static constexpr int kHeadDim = Config::kHeadDim;
  // Keys of one scale and offset a token are multiplied by integers, others by 16-bit floats.
  static constexpr bool kIntegers = !Config::kKChannelWise && Config::kKGroups == 1;
  // Scores are made of slices of channels, one after the other, if the operands of all take too many registers.
  static constexpr int kSlices = kHeadDim == 256 && (Config::kKChannelWise || Config::kKGroups == 8) ? 2 : 1;
  static constexpr int kRuns = kHeadDim / 32 / kSlices;  // of 8 channels that one lane of four takes of a K row's slice
  static constexpr int kGroups = Config::kKChannelWise ? 1 : Config::kKGroups / kSlices;  // in a slice
  static constexpr int kGroupRuns = kRuns / kGroups;
  static constexpr int kRowBytes = kHeadDim * Config::kKBits / 8;
  static constexpr int kRowWords = (kRuns * Config::kKBits + 3) / 4;             // a lane's words of a slice of a K row
  static constexpr int kVWords = kHeadDim * Config::kVBits / 64;                 // a lane's words for 16 tokens
  static constexpr int kTiles = kHeadDim / 16;                                   // 16-channel tiles of O^T
  static constexpr int kOffsets = Config::kVChannelWise ? 0 : Config::kVGroups;  // of a row, of the output
  static constexpr int kPartLanes = Config::kHalves ? 16 : 32;  // that hold an accumulator's columns of meaning
  static constexpr int kPartVectors = kTiles * kPartLanes;      // float4 of a warp's partial result
  static constexpr int kRowMask = Config::kHalves ? kRows / 2 - 1 : kRows - 1;  // column to row
  // A page is done in passes, of all 64 tokens with kHalves, else of 32. A lane has the scores of kTokens of them.
  static constexpr int kPasses = Config::kHalves ? 1 : 2;
  static constexpr int kTokens = 4;  // of a lane, in a pass
};

// Two values of a 16-bit type in a register.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const T pair[2] = {static_cast<T>(low), static_cast<T>(high)};
  return *reinterpret_cast<const uint32_t*>(pair);
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  const T* const pair = reinterpret_cast<const T*>(&bits);
  return {static_cast<float>(pair[0]), static_cast<float>(pair[1])};
}

// Reads N words that are aligned to 16 bytes, to 8 or to 4, if N is a multiple of 4, of 2 or of none.
template <int N>
__device__ __forceinline__ void load_words(uint32_t (&words)[N], const uint8_t* source) {
#pragma unroll
  for (int i = 0; i < N; i += N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1) {
    if constexpr (N % 4 == 0) {
      *reinterpret_cast<uint4*>(words + i) = *reinterpret_cast<const uint4*>(source + 4 * i);
    } else if constexpr (N % 2 == 0) {
      *reinterpret_cast<uint2*>(words + i) = *reinterpret_cast<const uint2*>(source + 4 * i);
    } else {
      words[i] = *reinterpret_cast<const uint32_t*>(source + 4 * i);
    }
  }
}

// A score, in powers of two, between -softcap and softcap.
__device__ __forceinline__ float soft_cap(float softcap, float score) {
  const float cap = softcap * kLog2e, y = __fdividef(score, cap), square = y * y;
  // tanh(y) = 1 - 2 / (1 + e^2y): exact at both ends, where e^2y is 0 or infinite. Where y is small, as far as the
  // fifth power: a difference from 1 would lose it.
  const float tanh = 1.f - __fdividef(2.f, 1.f + ex2(2.f * kLog2e * y));
  return fabsf(y) < 0.05f ? score * fmaf(square, fmaf(square, 2.f / 15.f, -1.f / 3.f), 1.f) : cap * tanh;
}

// The last of `count` sequences whose first unit of work is not after this one. Theirs never come before those of the
// ones before.
template <typename FirstUnit>
__device__ __forceinline__ int last_begun(int count, int unit, FirstUnit first_unit) {
  const int lane = threadIdx.x % 32;
  int first = 0;  // it is one of `count` from here on
  while (count > 1) {
    const int step = (count + 31) / 32;
    const bool begins = lane * step < count && first_unit(first + lane * step) <= unit;
    const int which = 31 - __clz(__ballot_sync(kAllLanes, begins) | 1);
    first += which * step;
    count = min(step, count - which * step);
  }
  return first;
}

}  // namespace foscar
