// From partial results to the output.
//
// Partial results are kept as they lie in accumulators: a float4 for each lane and 16-channel tile, of rows 2c and
// 2c + 1 and channels 16 t + g and 16 t + 8 + g.
#pragma once

#include "page.cuh"

namespace foscar {

// Maxima and sums of a lane's two columns; a sum of 0: no token was seen.
struct Statistics {
  float max[2], sum[2];
};

// A lane's part of a partial result.
struct Part {
  float4 o, statistics;
};

// Merges `count` partial results. Eight are on their way at a time.
template <typename Load>
__device__ __forceinline__ Statistics merge_parts(int count, float4& o, Load load) {
  constexpr int kBatch = 8;
  Statistics state = {{kNoMax, kNoMax}, {0.f, 0.f}};
  o = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    Part parts[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) parts[i] = load(min(first + i, count - 1));
#pragma unroll
    for (int i = 1; i < kBatch; ++i)
      if (first + i >= count) parts[i].statistics = {kNoMax, kNoMax, 0.f, 0.f};
    float top[2] = {state.max[0], state.max[1]};
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      top[0] = fmaxf(top[0], parts[i].statistics.x), top[1] = fmaxf(top[1], parts[i].statistics.y);
    const float keep[2] = {ex2(state.max[0] - top[0]), ex2(state.max[1] - top[1])};
    o.x *= keep[0], o.y *= keep[1], o.z *= keep[0], o.w *= keep[1];
#pragma unroll
    for (int col = 0; col < 2; ++col) state.max[col] = top[col], state.sum[col] *= keep[col];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float4 more = parts[i].o, its = parts[i].statistics;
      const float take[2] = {ex2(its.x - top[0]), ex2(its.y - top[1])};
      state.sum[0] = fmaf(its.z, take[0], state.sum[0]), state.sum[1] = fmaf(its.w, take[1], state.sum[1]);
      o.x = fmaf(more.x, take[0], o.x), o.y = fmaf(more.y, take[1], o.y);
      o.z = fmaf(more.z, take[0], o.z), o.w = fmaf(more.w, take[1], o.w);
    }
  }
  return state;
}

// Where a lane writes what it has of a segment, and what numerators are multiplied by.
template <typename Config>
struct Output {
  typename Config::T* row[2];  // null: no such row
  float factor[2];

  // Lets sink logits into the sums; one lane of a row's writes its log-sum-exp.
  __device__ __forceinline__ Output(const DecodeArguments& args, int segment, Statistics state, int column,
                                    bool writes_lse) {
    const int b = segment / Config::kKVHeads;
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      row[col] = nullptr;
      if (column + col >= args.q_len * args.group) continue;
      const Row which(args, column + col);
      const int head = segment % Config::kKVHeads * args.heads_per_kv + which.head;
      float max = state.max[col], sum = state.sum[col];
      float lse = -CUDART_INF_F;
      factor[col] = sum == 0.f ? 0.f : __fdividef(1.f, sum);  // NaN stays NaN
      if (sum != 0.f) {
        if (args.sinks) {
          const float sink = args.sinks[head] * kLog2e, raised = fmaxf(max, sink), keep = ex2(max - raised);
          sum = fmaf(sum, keep, ex2(sink - raised));
          factor[col] = __fdividef(keep, sum);
          max = raised;
        }
        lse = (max + lg2(sum)) * kLn2;
      }
      if (writes_lse) args.lse[b * args.lse_strides[0] + which.token * args.lse_strides[1] + head] = lse;
      row[col] = static_cast<typename Config::T*>(args.out) + b * args.out_strides[0] +
                 which.token * args.out_strides[1] + head * args.out_strides[2];
    }
  }

  __device__ __forceinline__ void write(int tile, int g, const float4& o) const {
    using T = typename Config::T;
    const int channel = 16 * tile + g;
    if (row[0])
      row[0][channel] = static_cast<T>(o.x * factor[0]), row[0][channel + 8] = static_cast<T>(o.z * factor[0]);
    if (row[1])
      row[1][channel] = static_cast<T>(o.y * factor[1]), row[1][channel + 8] = static_cast<T>(o.w * factor[1]);
  }
};

}  // namespace foscar
