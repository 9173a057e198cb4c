// Decode attention over packed pages for up to 8 query rows of a KV head.
//
// Work. A unit is one page of one (sequence, KV head); units are numbered sequence by sequence, head by head. Every
// warp of the grid takes an equal run of them, whatever the lengths are. A run may begin or end inside a (sequence,
// head): what a warp has of such a one is a partial result, merged within the CTA through shared memory, and across
// CTAs by the one that arrives last.
//
// Products. Codes enter the tensor cores as they lie: a 2-bit or 4-bit field of a 16-bit half is the fp16 subnormal
// code * 2^-24, or the bf16 subnormal code * 2^-133, times the field's weight. Both products are transposed, S^T = K q^T
// and O^T = V^T P^T, so that the packed operand is always A. Scales and offsets of tokens are folded into scores and
// probabilities, those of K's channels into the query, those of V's channels into each page's output (docs/numerics.md).
//
// Halves. With at most 4 rows, columns 4 to 7 of an accumulator would be idle. They repeat the rows instead, and each
// half of the columns does the softmax of half of a page's tokens. Their results are merged at the end.
#pragma once

#include "page.cuh"
#include "schedule.cuh"

namespace foscar {

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
        query.load(args, segment / args.num_kv_heads, segment % args.num_kv_heads);
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
