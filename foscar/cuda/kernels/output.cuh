// From partial results to the output.
//
// Partial results are kept as they lie in accumulators: a float4 for each lane and 16-channel tile, of rows 2c and
// 2c + 1 and channels 16 t + g and 16 t + 8 + g.
#pragma once

#include "page.cuh"

namespace foscar {

// Rows of a lane's two columns in part.
struct Statistics {
  float max[2], sum[2];  // no sum, no token
};

// Brings `sum` and `o` to a new maximum and adds another partial result.
__device__ __forceinline__ void merge(Statistics& into, float4& o, const Statistics& from, const float4& more) {
  float keep[2], take[2];
#pragma unroll
  for (int col = 0; col < 2; ++col) {
    const float top = fmaxf(into.max[col], from.max[col]);
    keep[col] = ex2(into.max[col] - top), take[col] = ex2(from.max[col] - top);
    into.sum[col] = fmaf(into.sum[col], keep[col], from.sum[col] * take[col]);
    into.max[col] = top;
  }
  o.x = fmaf(o.x, keep[0], more.x * take[0]), o.y = fmaf(o.y, keep[1], more.y * take[1]);
  o.z = fmaf(o.z, keep[0], more.z * take[0]), o.w = fmaf(o.w, keep[1], more.w * take[1]);
}

// Where a lane writes what it has of a segment, and what numerators are multiplied by.
template <typename Config>
struct Output {
  typename Config::T* row[2];  // null: no such row
  float factor[2];

  // Lets sink logits into the sums; one lane of a row's writes its log-sum-exp.
  __device__ __forceinline__ Output(const DecodeArguments& args, int segment, Statistics state, int column,
                                    bool writes_lse) {
    const int b = segment / args.num_kv_heads;
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      const int r = column + col, token = r / args.group;
      row[col] = nullptr;
      if (r >= args.q_len * args.group) continue;
      const int head = segment % args.num_kv_heads * args.heads_per_kv + r % args.group;
      float max = state.max[col], sum = state.sum[col];
      float lse = -CUDART_INF_F;
      factor[col] = sum == 0.f ? 0.f : 1.f / sum;  // NaN stays NaN
      if (sum > 0.f) {
        if (args.sinks) {
          const float sink = args.sinks[head] * kLog2e, raised = fmaxf(max, sink), keep = ex2(max - raised);
          sum = fmaf(sum, keep, ex2(sink - raised));
          factor[col] = keep / sum;
          max = raised;
        }
        lse = (max + lg2(sum)) * 0.6931471805599453f;
      }
      if (writes_lse) args.lse[b * args.lse_strides[0] + token * args.lse_strides[1] + head] = lse;
      row[col] = static_cast<typename Config::T*>(args.out) + b * args.out_strides[0] + token * args.out_strides[1] +
                 head * args.out_strides[2];
    }
  }

  __device__ __forceinline__ void write(int tile, int g, const float4& o) const {
    using T = typename Config::T;
    const int channel = 16 * tile + g;
    if (row[0]) row[0][channel] = static_cast<T>(o.x * factor[0]), row[0][channel + 8] = static_cast<T>(o.z * factor[0]);
    if (row[1]) row[1][channel] = static_cast<T>(o.y * factor[1]), row[1][channel + 8] = static_cast<T>(o.w * factor[1]);
  }
};

}  // namespace foscar
