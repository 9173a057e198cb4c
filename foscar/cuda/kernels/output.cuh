// From partial results to the output.
//
// A warp's partial result is kept as it lies in accumulators: a float4 for each lane and 16-channel tile, of rows 2c
// and 2c + 1 and channels 16 t + g and 16 t + 8 + g. When results are merged, a lane takes the two channels of a row.
#pragma once

#include "page.cuh"

namespace foscar {

// Two channels of a partial result, and their row's statistics. A sum of 0: no token was seen.
struct Part {
  float o[2], max, sum;
};

__device__ __forceinline__ Part load_part(const float4* source) {
  const float4 words = ld_relaxed(source);
  return {{words.x, words.y}, words.z, words.w};
}
__device__ __forceinline__ void store_part(float4* destination, const Part& part) {
  st_relaxed(destination, {part.o[0], part.o[1], part.max, part.sum});
}

// What is not there yet is all ones, a NaN that no instruction makes. Any of the four words may come last.
__device__ __forceinline__ bool is_absent(const Part& part) {
  return __float_as_uint(part.o[0]) == kAbsent || __float_as_uint(part.o[1]) == kAbsent ||
         __float_as_uint(part.max) == kAbsent || __float_as_uint(part.sum) == kAbsent;
}

__device__ __forceinline__ void merge_part(Part& merged, const Part& part) {
  const float top = fmaxf(merged.max, part.max), keep = ex2(merged.max - top), take = ex2(part.max - top);
  merged.max = top;
  merged.sum = fmaf(part.sum, take, merged.sum * keep);
#pragma unroll
  for (int i = 0; i < 2; ++i) merged.o[i] = fmaf(part.o[i], take, merged.o[i] * keep);
}

// Merges `count` more partial results into one, kPartsAtOnce at a time: `load` loads those that follow a number, the
// last one again where there is none.
constexpr int kPartsAtOnce = 8;
template <typename Load>
__device__ __forceinline__ void merge_parts(Part& merged, int count, Load load) {
#pragma unroll 1
  for (int first = 0; first < count; first += kPartsAtOnce) {
    Part parts[kPartsAtOnce];
    load(parts, first);
#pragma unroll
    for (int i = 1; i < kPartsAtOnce; ++i)
      if (first + i >= count) parts[i].max = kNoMax, parts[i].sum = 0.f;
    float top = merged.max;
#pragma unroll
    for (const Part& part : parts) top = fmaxf(top, part.max);
    const float keep = ex2(merged.max - top);
    merged.max = top;
    merged.sum *= keep, merged.o[0] *= keep, merged.o[1] *= keep;
#pragma unroll
    for (const Part& part : parts) {
      const float take = ex2(part.max - top);
      merged.sum = fmaf(part.sum, take, merged.sum);
      merged.o[0] = fmaf(part.o[0], take, merged.o[0]), merged.o[1] = fmaf(part.o[1], take, merged.o[1]);
    }
  }
}

// Where a row of a segment's output goes, and what numerators are multiplied by.
template <typename Config>
struct Output {
  typename Config::T* row;  // null: no such row
  float factor;

  // Lets a sink logit into the sum; whoever is asked to writes the log-sum-exp.
  __device__ __forceinline__ Output(const DecodeArguments& args, int segment, int index, float max, float sum,
                                    bool writes_lse)
      : row(nullptr) {
    if (index >= args.q_len * args.group) return;
    const int b = segment / Config::kKVHeads;
    const Row which(args, index);
    const int head = segment % Config::kKVHeads * args.heads_per_kv + which.head;
    float lse = -CUDART_INF_F;
    factor = sum == 0.f ? 0.f : __fdividef(1.f, sum);  // NaN stays NaN
    if (sum != 0.f) {
      if (args.sinks) {
        const float sink = args.sinks[head] * kLog2e, raised = fmaxf(max, sink), keep = ex2(max - raised);
        sum = fmaf(sum, keep, ex2(sink - raised));
        factor = __fdividef(keep, sum);
        max = raised;
      }
      lse = (max + lg2(sum)) * kLn2;
    }
    if (writes_lse) args.lse[b * args.lse_strides[0] + which.token * args.lse_strides[1] + head] = lse;
    row = static_cast<typename Config::T*>(args.out) + b * args.out_strides[0] + which.token * args.out_strides[1] +
          head * args.out_strides[2];
  }

  // Channels g and g + 8 of a tile.
  __device__ __forceinline__ void write(int tile, int g, float low, float high) const {
    using T = typename Config::T;
    if (!row) return;
    row[16 * tile + g] = static_cast<T>(low * factor), row[16 * tile + g + 8] = static_cast<T>(high * factor);
  }
};

}  // namespace foscar
