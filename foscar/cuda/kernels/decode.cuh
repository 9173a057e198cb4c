// Decode attention over packed pages for up to 8 query rows of a KV head.
//
// Work. Every warp is a worker of its own: it takes an equal run of units (schedule.cuh), keeps its own ring of stages
// filled by bulk copies, and meets no barrier until it is done. A run may begin or end inside a segment: what a warp
// has of such a one is a partial result. Those of a CTA are merged through shared memory, tile by tile; what reaches
// beyond the CTA goes through global memory to the warp that arrives last at a tile's counter.
//
// Products. Codes enter the tensor cores as they lie: K of one group as unsigned bytes, all others as subnormals of
// fp16, or of bf16 for channel-wise K (query.cuh, page.cuh). Both products are transposed, S^T = K q^T and O^T = V^T
// P^T, so that the packed operand is always A. Scale and offset are folded into scores and probabilities
// (docs/numerics.md).
//
// Halves. With at most 4 rows, columns 4 to 7 of an accumulator would be idle. In the first product they repeat the
// rows, or hold the low digits of integers, and each half of the columns does the softmax of half of a page's tokens.
#pragma once

#include "exact.cuh"
#include "output.cuh"

namespace foscar {

template <typename Config>
struct alignas(128) SharedMemory {
  static constexpr int kSlots = 2 * Config::kWarps;  // a warp's first and last partial result
  static constexpr int kUnits = 32;                  // looked up by a warp, half of them at a time
  static_assert(kSlots <= 32 && Config::kStages <= kUnits / 2, "a lane for each");
  uint8_t stages[Config::kWarps][Config::kStages][Config::kRecordBytes];  // and a warp's last partial result
  uint64_t full[Config::kWarps][Config::kStages];
  Unit units[Config::kWarps][kUnits];
  Cursor<Config> cursors[Config::kWarps];
  int first[Config::kWarps], begin[Config::kWarps];  // units: first of a warp's, and of the segment that it is at
  int segments[kSlots], segment_begin[kSlots];       // the segment, -1 for none, and its first unit
  float max[kSlots][kRows], sum[kSlots][kRows];
  unsigned quota;  // units of a CTA
  static_assert(sizeof(stages[0]) >= Shape<Config>::kPartVectors * sizeof(float4), "a partial result fits");
};

// Where a warp leaves a partial result while its stages are in use.
template <typename Config>
__device__ __forceinline__ float4* spilled_part(const DecodeArguments& args, int warp) {
  return args.warp_parts + (static_cast<int64_t>(blockIdx.x) * Config::kWarps + warp) * Shape<Config>::kPartVectors;
}

// What the warps of a CTA left in its slots, merged and handed on. A warp takes a segment's tiles, 32 lanes of them at
// a time.
template <typename Config>
__device__ __forceinline__ void merge_partial_results(const DecodeArguments& args, SharedMemory<Config>& smem) {
  using S = Shape<Config>;
  constexpr int kLanes = S::kPartLanes, kItemTiles = 32 / kLanes, kItems = S::kTiles / kItemTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int mine = lane < SharedMemory<Config>::kSlots ? smem.segments[lane] : -1;
  // The slots of a segment are neighbours, but for empty ones.
  const unsigned taken = __ballot_sync(kAllLanes, mine >= 0), before = taken & ((1u << lane) - 1);
  const int previous = __shfl_sync(kAllLanes, mine, before ? 31 - __clz(before) : lane);
  const unsigned leaders = __ballot_sync(kAllLanes, mine >= 0 && (before == 0 || previous != mine));
  const int part_lane = lane % kLanes, column = kLanes == 16 ? lane % 2 * 2 : lane % 4 * 2;
  const int g = part_lane / (kLanes / 8);
#pragma unroll 1
  for (int item = warp; item < __popc(leaders) * kItems; item += Config::kWarps) {
    unsigned rest = leaders;
    for (int i = item / kItems; i > 0; --i) rest &= rest - 1;
    const int leader = __ffs(rest) - 1;
    rest &= rest - 1;
    const unsigned slots = rest ? taken & ((1u << (__ffs(rest) - 1)) - 1) : taken;
    const int segment = smem.segments[leader];
    const int tile = item % kItems * kItemTiles + lane / kLanes;
    const int place = tile * kLanes + part_lane;

    // All warps but a segment's last have it in their second slot.
    const int last_slot = 31 - __clz(slots);
    float4 o;
    Statistics state = merge_parts(last_slot / 2 - leader / 2 + 1, o, [&](int i) -> Part {
      const int slot = min((leader / 2 + i) * 2 + 1, last_slot);
      const float2 max = *reinterpret_cast<const float2*>(smem.max[slot] + column);
      const float2 sum = *reinterpret_cast<const float2*>(smem.sum[slot] + column);
      const float4* const part =
          slot % 2 ? reinterpret_cast<const float4*>(smem.stages[slot / 2]) : spilled_part<Config>(args, slot / 2);
      return {part[place], {max.x, max.y, sum.x, sum.y}};
    });

    const int b = segment / Config::kKVHeads;
    const int begin = smem.segment_begin[leader], last = begin + visible_keys<Config>(args, b).units() - 1;
    const int first_cta = small_quotient(begin, smem.quota), parts = small_quotient(last, smem.quota) - first_cta + 1;
    if (parts > 1) {
      // Of a segment's CTAs, the first leaves its part in its second place, the others in their first.
      auto part = [&](int i) {
        const int64_t cta = 2 * static_cast<int64_t>(first_cta + i) + (i == 0);
        return args.cta_parts + (cta * S::kTiles + tile) * 2 * kLanes + part_lane;
      };
      float4* const own = part(blockIdx.x - first_cta);
      own[0] = o;
      own[kLanes] = {state.max[0], state.max[1], state.sum[0], state.sum[1]};
      __syncwarp();
      bool is_last = false;
      if (lane == 0) {
        uint32_t* const arrivals = args.arrivals + first_cta * S::kTiles + item % kItems;
        is_last = atomic_add_acq_rel(arrivals, 1) == static_cast<uint32_t>(parts - 1);
        if (is_last) *arrivals = 0;  // for the next launch
      }
      if (!__shfl_sync(kAllLanes, is_last, 0)) continue;
      __syncwarp();
      state = merge_parts(parts, o, [&](int i) -> Part { return {__ldcg(part(i)), __ldcg(part(i) + kLanes)}; });
    }
    Output<Config>(args, segment, state, column, tile == 0 && g == 0).write(tile, g, o);
  }
}

template <typename Config>
__device__ __forceinline__ void decode(const DecodeArguments& args) {
  using S = Shape<Config>;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& smem = *reinterpret_cast<SharedMemory<Config>*>(memory);
  constexpr int kUnits = SharedMemory<Config>::kUnits;
  static_assert(sizeof(smem) == Config::kSharedBytes, "what the host asks for");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (lane == 0) {
    for (int i = 0; i < Config::kStages; ++i) mbarrier_init(smem_address(&smem.full[warp][i]), 1);
    fence_mbarrier_init();
    smem.segments[2 * warp] = smem.segments[2 * warp + 1] = -1;
  }

  // A launch may begin when the CTAs of the one before make room; nothing is read or written until that one is done.
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  const int total = count_units<Config>(args);
  const unsigned quota = cta_quota<Config>(args, total);
  if (threadIdx.x == 0) smem.quota = quota;
  const int cta_first = blockIdx.x * quota;
  if (cta_first >= total) return;
  const Share share = warp_share<Config>(cta_first, min(static_cast<int>(quota), total - cta_first), warp);
  const unsigned count = share.count;

  // Units are looked up by a lane each, long before they are needed: what is loaded queues behind the records in
  // flight.
  if (lane == 0) smem.cursors[warp] = {0, 0}, smem.first[warp] = share.first;
  __syncwarp();
  auto look_up = [&](unsigned start, int units) {
    const bool asks = lane < units && start + lane < count;
    Cursor<Config> cursor = smem.cursors[warp];
    Unit unit = cursor.find(args, smem.first[warp] + start + lane, asks);
    if (lane == 0) smem.cursors[warp] = cursor;
    if (asks) {
      const int b = unit.segment / Config::kKVHeads;
      const Visible visible = visible_keys<Config>(args, b);
      Unit& place = smem.units[warp][(start + lane) % kUnits];
      if (unit.index < visible.num_pages) {
        const int column = visible.first_page + unit.index;
        cp_async_4(smem_address(&place.page),
                   args.block_table + b * static_cast<int64_t>(args.block_table_stride) + column);
        unit.position = column * kPageSize;
        if (unit.position < max(visible.begin, visible.common_begin(args)) ||
            unit.position + kPageSize > min(visible.end, visible.common_end(args)))
          unit.position += Unit::kMasked;
      } else if (visible.length > 0) {
        unit.position = Unit::kExact;
      }
      place.segment = unit.segment, place.index = unit.index, place.position = unit.position;
    }
  };

  // Records are fetched kStages ahead, across the borders of segments.
  auto fetch = [&](unsigned i, unsigned stage) {
    if (i % (kUnits / 2) == 0) {
      cp_async_wait_all();
      __syncwarp();
    }
    if (i % (kUnits / 2) == Config::kStages && i > kUnits / 2)  // the half of the table before this one has been used
      look_up(i - Config::kStages + kUnits / 2, kUnits / 2);
    const Unit unit = smem.units[warp][i % kUnits];
    const uint32_t barrier = smem_address(&smem.full[warp][stage]);
    if (Config::kExact && unit.position == Unit::kExact) {
      fetch_exact<Config>(args, unit, smem.stages[warp][stage], barrier);
    } else if (lane == 0) {
      const bool is_page = unit.position >= 0;
      mbarrier_arrive_expect_tx(barrier, is_page ? Config::kRecordBytes : 0);
      if (is_page) {
        const uint32_t head = static_cast<uint32_t>(unit.segment) % Config::kKVHeads;
        const uint64_t record = static_cast<uint32_t>(unit.page) * Config::kKVHeads + head;
        cp_async_bulk(smem_address(smem.stages[warp][stage]), args.pages + record * Config::kRecordBytes,
                      Config::kRecordBytes, barrier);
      }
    }
  };
  look_up(0, kUnits);
  __syncwarp();

  State<Config> state;
  auto finish_segment = [&](int segment, int begin, bool is_last) {
    state.settle();
    const int column = 2 * (lane % 4), g = lane / 4;
    const bool has_rows = column < S::kRowMask;
    const int first = smem.first[warp], stop = first + static_cast<int>(count);
    if (begin >= first && begin + visible_keys<Config>(args, segment / Config::kKVHeads).units() <= stop) {
      if (!has_rows) return;
      const Output<Config> output(args, segment, {{state.max[0], state.max[1]}, {state.sum[0], state.sum[1]}}, column,
                                  g == 0);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
        output.write(t, g, {state.o[t][0], state.o[t][1], state.o[t][2], state.o[t][3]});
      return;
    }
    // The last partial result may take the warp's stages; an earlier one, while they are in use, goes to global memory.
    const int slot = 2 * warp + is_last;
    float4* const part = is_last ? reinterpret_cast<float4*>(smem.stages[warp]) : spilled_part<Config>(args, warp);
    __syncwarp();
    if (lane == 0) smem.segments[slot] = segment, smem.segment_begin[slot] = begin;
    if (!has_rows) return;
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
      part[t * S::kPartLanes + g * (S::kPartLanes / 8) + column / 2] = {state.o[t][0], state.o[t][1], state.o[t][2],
                                                                        state.o[t][3]};
    if (g == 0) {
      *reinterpret_cast<float2*>(smem.max[slot] + column) = {state.max[0], state.max[1]};
      *reinterpret_cast<float2*>(smem.sum[slot] + column) = {state.sum[0], state.sum[1]};
    }
  };
  for (unsigned i = 0; i < count;) {
    __syncwarp();  // all have done with the last segment
    if (lane == 0) smem.begin[warp] = smem.first[warp] + i - smem.units[warp][i % kUnits].index;
    const QueryRuns<Config> runs(args, smem.units[warp][i % kUnits].segment);
    if (i == 0)
      for (unsigned j = 0; j < min(count, Config::kStages); ++j) fetch(j, j);
    const Query<Config> query(args, runs);
    state.clear();
    do {
      const unsigned round = i / Config::kStages, stage = i - round * Config::kStages;
      const Unit unit = smem.units[warp][i % kUnits];
      mbarrier_wait(smem_address(&smem.full[warp][stage]), round & 1);
      if (unit.position >= 0) {
        attend_page(args, smem.stages[warp][stage], query, state, unit);
      } else if (Config::kExact && unit.position == Unit::kExact) {
        attend_exact(args, smem.stages[warp][stage], state, unit);
      }
      __syncwarp();
      if (i + Config::kStages < count) fetch(i + Config::kStages, stage);
      ++i;
    } while (i < count && smem.units[warp][i % kUnits].index > 0);
    finish_segment(smem.units[warp][(i - 1) % kUnits].segment, smem.begin[warp], i == count);
  }
  __syncthreads();
  merge_partial_results(args, smem);
}

}  // namespace foscar
