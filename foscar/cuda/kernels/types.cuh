// What all parts of the decode kernel share: its arguments, and the shape of a variant.
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
constexpr float kLog2E = 1.4426950408889634f;
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

template <typename Config>
struct Shape {
  static constexpr int kHeadDim = Config::kHeadDim;
  // Scores are made of slices of channels, one after the other, if the operands of all take too many registers.
  static constexpr int kSlices = kHeadDim == 256 && (Config::kKChannelWise || Config::kKGroups == 8) ? 2 : 1;
  static constexpr int kRuns = kHeadDim / 32 / kSlices;  // of 8 channels that one lane of four takes of a K row's slice
  static constexpr int kGroups = Config::kKChannelWise ? 1 : Config::kKGroups / kSlices;  // in a slice
  static constexpr int kGroupRuns = kRuns / kGroups;
  static constexpr int kRowBytes = kHeadDim * Config::kKBits / 8;
  static constexpr int kRowWords = (kRuns * Config::kKBits + 3) / 4;  // a lane's words of a slice of a K row
  static constexpr int kVWords = kHeadDim * Config::kVBits / 64;  // a lane's words for 16 tokens
  static constexpr int kTiles = kHeadDim / 16;     // 16-channel tiles of O^T
  static constexpr int kOffsets = Config::kVChannelWise ? 0 : Config::kVGroups;  // of a row, of the output
  static constexpr int kPartialFloats = kRows * (kHeadDim + 2);
  static constexpr int kRowMask = Config::kHalves ? kRows / 2 - 1 : kRows - 1;  // column to row
  static constexpr int kBlocks = Config::kHalves ? 2 : 4;  // of 16 tokens of a page: those whose softmax a lane does
};

}  // namespace foscar
