// Decode attention over packed pages for up to 8 query rows of a KV head.
//
// Work. Every warp is a worker of its own: it takes an equal run of units (schedule.cuh), keeps its own ring of stages
// filled by bulk copies, and meets no barrier until it is done. A run may begin or end inside a segment: what a warp
// has of such a one is a partial result. Those of a CTA are merged through shared memory. What reaches beyond the CTA
// goes through global memory, in a tree, to the last CTA of its segment. A CTA awaits only some before it: GPUs start
// CTAs in order, though CUDA does not promise it.
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

// The CTAs that a segment's units fall to.
struct Ctas {
  uint16_t first, last;
};

template <typename Config>
struct alignas(128) SharedMemory {
  static constexpr int kSlots = 2 * Config::kWarps;  // a warp's first and last partial result
  static_assert(kSlots <= 32 && Config::kUnits <= 32, "a lane for each");
  static_assert(Config::kStages < Config::kUnits / 2, "a page's number is there before its record is asked for");
  uint8_t stages[Config::kWarps][Config::kStages][Config::kRecordBytes];  // and a warp's last partial result
  uint64_t full[Config::kWarps][Config::kStages];
  Unit units[Config::kWarps][Config::kUnits];  // looked up half of them at a time
  float max[kSlots][kRows], sum[kSlots][kRows];
  Cursor<Config> cursors[Config::kWarps];
  int first[Config::kWarps], end[Config::kWarps];  // units: a warp's first, and the first after its last segment
  unsigned quota[Config::kWarps];                  // units of a CTA, for each to read
  int segments[kSlots];                            // -1: none
  Ctas ctas[kSlots];
  static_assert(sizeof(stages[0]) >= Shape<Config>::kPartVectors * sizeof(float4), "a partial result fits");
};

// Where a warp leaves a partial result while its stages are in use.
template <typename Config>
__device__ __forceinline__ float4* spilled_part(const DecodeArguments& args, int warp) {
  return args.warp_parts + (static_cast<int64_t>(blockIdx.x) * Config::kWarps + warp) * Shape<Config>::kPartVectors;
}

// CTAs whose parts one of them merges: an SM takes in a part in some 350 cycles.
constexpr int kFan = 20;

// What the warps of a CTA left in its slots, merged and handed on. A warp takes 64 values of a segment at a time, two a
// lane.
template <typename Config>
__device__ __forceinline__ void merge_partial_results(const DecodeArguments& args, SharedMemory<Config>& smem) {
  using S = Shape<Config>;
  constexpr int kColumns = S::kPartLanes / 8;       // pairs of rows
  constexpr int kItems = 2 * S::kPartVectors / 32;  // of a segment
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int mine = lane < SharedMemory<Config>::kSlots ? smem.segments[lane] : -1;
  // The slots of a segment are neighbours, but for empty ones.
  const unsigned taken = __ballot_sync(kAllLanes, mine >= 0), before = taken & ((1u << lane) - 1);
  const int previous = __shfl_sync(kAllLanes, mine, before ? 31 - __clz(before) : lane);
  const unsigned leaders = __ballot_sync(kAllLanes, mine >= 0 && (before == 0 || previous != mine));
  // The last segment comes first: another CTA may wait for it, while the first may have to wait for another CTA.
#pragma unroll 1
  for (int item = __popc(leaders) * kItems - 1 - warp; item >= 0; item -= Config::kWarps) {
    unsigned rest = leaders;
#pragma unroll 1
    for (int i = item / kItems; i > 0; --i) rest &= rest - 1;
    const int leader = __ffs(rest) - 1;
    rest &= rest - 1;
    const unsigned slots = rest ? taken & ((1u << (__ffs(rest) - 1)) - 1) : taken;
    const unsigned pair = item % kItems * 32 + lane;  // of channels g and g + 8 of a row: a half of a vector
    const unsigned vector = pair / 2, col = pair % 2, c = vector % kColumns, g = vector / kColumns % 8;
    const unsigned row = 2 * c + col;

    // All warps but a segment's last have it in their second slot.
    const int first_warp = leader / 2, last_slot = 31 - __clz(slots), num_warps = (last_slot + 1) / 2 - first_warp;
    auto part_in = [&](const void* vectors, int slot) -> Part {
      const float* const o = static_cast<const float*>(vectors) + 4 * vector + col;
      return {{o[0], o[2]}, smem.max[slot][row], smem.sum[slot][row]};
    };
    Part merged = {{0.f, 0.f}, kNoMax, 0.f};
    merge_parts(merged, num_warps, [&](Part(&parts)[kPartsAtOnce], int first) {
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const int its_warp = first_warp + min(first + i, num_warps - 1);
        parts[i] = part_in(smem.stages[its_warp], 2 * its_warp + 1);
      }
    });
    if (last_slot % 2 == 0) merge_part(merged, part_in(spilled_part<Config>(args, last_slot / 2), last_slot));

    // Of a segment's CTAs, the first leaves its part in its second place, the others in their first.
    const Ctas ctas = smem.ctas[leader];
    auto part_of = [&](int cta) {
      const int64_t which = 2 * static_cast<int64_t>(cta) + (cta == ctas.first);
      return args.cta_parts + which * (2 * S::kPartVectors) + pair;
    };
    // In a tree: of what is left, every kFan-th CTA, counted from the last, merges those before it.
    const int cta = blockIdx.x, behind = ctas.last - cta;
    bool handed_on = false;
#pragma unroll 1
    for (int stride = 1; stride <= ctas.last - ctas.first; stride *= kFan) {
      handed_on = behind % (stride * kFan) != 0;
      if (handed_on) {
        store_part(part_of(cta), merged);
        break;
      }
      const int count = min((cta - ctas.first) / stride, kFan - 1);
      merge_parts(merged, count, [&](Part(&parts)[kPartsAtOnce], int first) {
        auto its_part = [&](int i) { return part_of(cta - stride * min(first + i + 1, count)); };
        bool absent;
        do {
          absent = false;
#pragma unroll
          for (int i = 0; i < kPartsAtOnce; ++i) {
            parts[i] = load_part(its_part(i));
            absent |= is_absent(parts[i]);
          }
        } while (__any_sync(kAllLanes, absent));
        const float ones = __uint_as_float(kAbsent);  // for the next launch
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) store_part(its_part(i), {{ones, ones}, ones, ones});
      });
    }
    if (handed_on) continue;
    const Output<Config> output(args, smem.segments[leader], row, merged.max, merged.sum, pair < 2 * kColumns);
    output.write(vector / S::kPartLanes, g, merged.o[0], merged.o[1]);
  }
}

template <typename Config>
__device__ __forceinline__ void decode(const DecodeArguments& args) {
  using S = Shape<Config>;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& smem = *reinterpret_cast<SharedMemory<Config>*>(memory);
  constexpr int kUnits = Config::kUnits;
  static_assert(sizeof(smem) == Config::kSharedBytes, "what the host asks for");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // A launch may begin when the CTAs of the one before make room, but what it reads may change until that one is done.
  // Meanwhile work is dealt out by lengths as they are, and once more if they turn out to have changed.
  griddepcontrol_launch_dependents();
  bool is_early = !Config::kExact && args.batch <= 32;
  if (!is_early) griddepcontrol_wait();
  int length = 0;
  if (lane < args.batch) length = is_early ? ld_relaxed(args.seq_lens + lane) : args.seq_lens[lane];

  if (lane == 0) {
    for (int i = 0; i < Config::kStages; ++i) mbarrier_init(smem_address(&smem.full[warp][i]), 1);
    fence_mbarrier_init();
    smem.segments[2 * warp] = smem.segments[2 * warp + 1] = -1;
  }

  // Units are looked up by a lane each, long before they are needed: what is loaded queues behind the records in
  // flight. Returns where the number of a lane's page is, null if there is none.
  unsigned count = 0;
  auto look_up = [&](Cursor<Config> cursor, const Units& units, unsigned start, int number) -> const int* {
    const bool asks = lane < number && start + lane < count;
    auto [unit, end, length] = cursor.find(args, units, smem.first[warp] + start + lane, asks);
    if (lane == 0) smem.cursors[warp] = cursor;
    if (!asks) return nullptr;
    if (start + lane == count - 1) smem.end[warp] = end;
    const int b = unit.segment / Config::kKVHeads;
    const Visible visible = visible_keys<Config>(args, b, length);
    const int* source = nullptr;
    if (unit.index < visible.num_pages) {
      const int column = visible.first_page + unit.index, position = column * kPageSize;
      if (column < args.block_table_columns)
        source = args.block_table + b * static_cast<int64_t>(args.block_table_stride) + column;
      unit.what |= position;
      if (position < max(visible.begin, visible.common_begin(args)) ||
          position + kPageSize > min(visible.end, visible.common_end(args)))
        unit.what |= Unit::kMasked;
    } else {
      unit.what |= visible.length > 0 ? Unit::kExact : Unit::kNothing;
    }
    Unit& place = smem.units[warp][(start + lane) % kUnits];
    place.segment = unit.segment, place.index = unit.index, place.what = unit.what;
    return source;
  };
  auto copy_page_number = [&](const int* source, unsigned start) {
    if (source) cp_async_4(smem_address(&smem.units[warp][(start + lane) % kUnits].page), source);
  };

  if (is_early) length = min(max(length, 0), kLongestEarly);
  while (true) {
    const Units units = Cursor<Config>{0, 0}.count(args, length);
    const int total = count_units<Config>(args, units);
    const unsigned quota = cta_quota<Config>(args, total);
    const int cta_first = blockIdx.x * quota;
    const Share share = warp_share<Config>(cta_first, max(min(static_cast<int>(quota), total - cta_first), 0), warp);
    count = share.count;
    __syncwarp();
    if (lane == 0) smem.first[warp] = share.first, smem.quota[warp] = quota;
    __syncwarp();
    const int* const source = look_up({0, 0}, units, 0, kUnits);
    if (is_early) griddepcontrol_wait();
    int now = length;
    if (is_early && lane < args.batch) now = args.seq_lens[lane];
    copy_page_number(source, 0);
    __syncwarp();
    if (!__any_sync(kAllLanes, now != length)) {
      if (cta_first >= total) return;
      break;
    }
    cp_async_wait_all();
    is_early = false, length = now;
  }

  // Records are fetched kStages ahead, across the borders of segments.
  auto fetch = [&](const Unit& unit, unsigned stage) {
    const uint32_t barrier = smem_address(&smem.full[warp][stage]);
    if (Config::kExact && unit.what & Unit::kExact) {
      fetch_exact<Config>(args, unit, smem.stages[warp][stage], barrier);
    } else if (lane == 0) {
      const bool is_page = unit.is_page();
      mbarrier_arrive_expect_tx(barrier, is_page ? Config::kRecordBytes : 0);
      if (is_page) {
        const uint32_t head = static_cast<uint32_t>(unit.segment) % Config::kKVHeads;
        const uint64_t record = static_cast<uint32_t>(unit.page) * Config::kKVHeads + head;
        cp_async_bulk(smem_address(smem.stages[warp][stage]), args.pages + record * Config::kRecordBytes,
                      Config::kRecordBytes, barrier, kEvictFirst);
      }
    }
  };

  State<Config> state;
  auto finish_segment = [&](const Unit& last, int after, bool is_last) {
    state.settle();
    const int column = 2 * (lane % 4), g = lane / 4;
    const bool has_rows = column < S::kRowMask;
    const int first = smem.first[warp], stop = first + static_cast<int>(count);
    const int segment = last.segment, begin = after - 1 - last.index;
    const int end = last.what & Unit::kLast ? after : smem.end[warp];
    if (begin >= first && end <= stop) {
      if (!has_rows) return;
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        const Output<Config> output(args, segment, column + col, state.max[col], state.sum[col], g == 0);
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) output.write(t, g, state.o[t][col], state.o[t][col + 2]);
      }
      return;
    }
    // The last partial result may take the warp's stages; an earlier one, while they are in use, goes to global memory.
    const int slot = 2 * warp + is_last;
    float4* const part = is_last ? reinterpret_cast<float4*>(smem.stages[warp]) : spilled_part<Config>(args, warp);
    __syncwarp();
    if (lane == 0) {
      smem.segments[slot] = segment;
      const unsigned quota = smem.quota[warp];
      smem.ctas[slot] = {static_cast<uint16_t>(small_quotient(begin, quota)),
                         static_cast<uint16_t>(small_quotient(end - 1, quota))};
    }
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
  unsigned stage = 0, parity = 0;
  for (unsigned i = 0; i < count;) {
    __syncwarp();  // all have done with the last segment
    const QueryRuns<Config> runs(args, smem.units[warp][i % kUnits].segment);
    if (i == 0) {
      cp_async_wait_all();
      __syncwarp();
      fetch(smem.units[warp][0], 0);
    }
    const Query<Config> query(args, runs);
    if (i == 0)  // not before all warps have asked for their first
      for (unsigned j = 1; j < min(count, Config::kStages); ++j) fetch(smem.units[warp][j], j);
    state.clear();
    bool ends_segment;
    do {
      constexpr unsigned kHalf = kUnits / 2;
      const unsigned next = i + Config::kStages;
      if (const unsigned place = i % kHalf; place == 0 || place == kHalf - Config::kStages) {
        if (place != 0) {  // what is next is the first of a half of the table
          cp_async_wait_all();
          __syncwarp();
        } else if (i > 0) {  // the half of the table before this one has been used
          const Cursor<Config> cursor = smem.cursors[warp];
          copy_page_number(look_up(cursor, cursor.load(args), i + kHalf, kHalf), i + kHalf);
        }
      }
      const Unit& unit = smem.units[warp][i % kUnits];
      const bool is_page = unit.is_page();
      const Unit ahead = smem.units[warp][next % kUnits];
      mbarrier_wait(smem_address(&smem.full[warp][stage]), parity);
      if (is_page) {
        attend_page(args, smem.stages[warp][stage], query, state, unit);
      } else if (Config::kExact && unit.what & Unit::kExact) {
        attend_exact(args, smem.stages[warp][stage], state, unit);
      }
      __syncwarp();
      if (next < count) fetch(ahead, stage);
      if (++stage == Config::kStages) stage = 0, parity ^= 1;
      ends_segment = unit.what & Unit::kLast;
      ++i;
    } while (i < count && !ends_segment);
    finish_segment(smem.units[warp][(i - 1) % kUnits], smem.first[warp] + i, i == count);
  }
  __syncthreads();
  merge_partial_results(args, smem);
}

}  // namespace foscar
