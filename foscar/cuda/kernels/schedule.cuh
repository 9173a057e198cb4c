// How work is dealt out.
//
// A segment is one (sequence, KV head). Its units are the pages with keys that its queries see, then blocks of exact
// tokens: sinks, then the ring's. Units are numbered segment by segment. CTAs take runs of equal length, and so do the
// warps of a CTA, whatever the lengths of sequences are.
#pragma once

#include "types.cuh"

namespace foscar {

constexpr int kExactBlock = 8;          // tokens
constexpr int kLongestEarly = 1 << 22;  // tokens of a sequence, so that sums stay in range whatever is read too early
constexpr unsigned kLeastQuota = 8;     // of a CTA: fewer pages are more parts to merge

template <typename T>
__device__ __forceinline__ T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// a / b for quotients below 2^20: a third of the instructions of an integer division.
__device__ __forceinline__ int small_quotient(unsigned a, unsigned b) {
  const unsigned quotient = __fdividef(a + 0.5f, b);
  return quotient + ((quotient + 1) * b <= a) - (quotient * b > a);
}

// The keys of a sequence that its queries can see, and where they are. Ends of ranges are exclusive.
struct Visible {
  int length;
  int begin, end;              // positions of those in pages
  int first_page, num_pages;   // columns of the block table
  int sinks_begin, sinks_end;  // positions, which are rows too
  int ring_begin;              // position; the ring goes on to `length`

  // Keys that all queries see, if they are there.
  __device__ __forceinline__ int common_begin(const DecodeArguments& args) const {
    return args.window_left < 0 ? 0 : length - 1 - args.window_left;
  }
  __device__ __forceinline__ int common_end(const DecodeArguments& args) const { return length - args.tail + 1; }

  __device__ __forceinline__ int sink_blocks() const { return ceil_div(sinks_end - sinks_begin, kExactBlock); }
  __device__ __forceinline__ int ring_blocks() const { return ceil_div(length - ring_begin, kExactBlock); }
  // An empty sequence has a unit, too, so that its output is written.
  __device__ __forceinline__ int units() const { return max(num_pages + sink_blocks() + ring_blocks(), 1); }
};

template <typename Config>
__device__ __forceinline__ Visible visible_keys(const DecodeArguments& args, int b, int length) {
  Visible visible;
  visible.length = length;
  int sinks = 0;
  visible.end = visible.length;
  if (Config::kExact && visible.length > 0) {
    const int seq_id = args.seq_ids ? args.seq_ids[b] : b;
    visible.length = min(visible.length, args.lengths[2 * seq_id + 1]);  // no more than there are
    sinks = min(args.sink_tokens, visible.length);
    visible.end = max(min(args.lengths[2 * seq_id], visible.length), sinks);
  }
  const int first = args.window_left < 0 ? 0 : max(visible.length - args.tail - args.window_left, 0);
  visible.begin = max(sinks, first);
  visible.first_page = visible.begin / kPageSize;
  visible.num_pages = max(ceil_div(visible.end, kPageSize) - visible.first_page, 0);
  if (visible.begin >= visible.end) visible.num_pages = 0;
  visible.sinks_begin = min(first, sinks);
  visible.sinks_end = sinks;
  visible.ring_begin = Config::kExact ? max(visible.end, first) : visible.length;
  return visible;
}

template <typename Config>
__device__ __forceinline__ Visible visible_keys(const DecodeArguments& args, int b) {
  return visible_keys<Config>(args, b, args.seq_lens[b]);
}

// Some consecutive tokens of the exact tiers.
struct ExactBlock {
  int position, count;
};

__device__ __forceinline__ ExactBlock exact_block(const Visible& visible, int block) {
  const int sink_blocks = visible.sink_blocks();
  const bool is_sink = block < sink_blocks;
  const int position =
      is_sink ? visible.sinks_begin + block * kExactBlock : visible.ring_begin + (block - sink_blocks) * kExactBlock;
  return {position, min((is_sink ? visible.sinks_end : visible.length) - position, kExactBlock)};
}

// What lies in a stage.
struct Unit {
  int segment;  // sequence * kKVHeads + head
  int index;    // among the segment's units
  int page;     // its number
  int what;     // of a page, the position of its first token; and some of the following

  static constexpr int kMasked = 1;   // not all of its tokens are seen by all rows
  static constexpr int kExact = 2;    // exact tokens, no page
  static constexpr int kNothing = 4;  // an empty sequence has it
  static constexpr int kLast = 8;     // of the segment

  __device__ __forceinline__ bool is_page() const { return !(what & (kExact | kNothing)); }
  __device__ __forceinline__ int position() const { return what & ~(kPageSize - 1); }
};

// The length of this lane's sequence, the units of one of its heads, and their sum over this and all lanes before.
struct Units {
  int length, own, sum;
  __device__ __forceinline__ int total(const DecodeArguments& args) const {
    return __shfl_sync(kAllLanes, sum, min(args.batch, 32) - 1);
  }
};

// Some unit, the first one after its segment, and the length of its sequence.
struct Found {
  Unit unit;
  int end, length;
};

// A warp's view of the sequences, 32 at a time, a lane each.
template <typename Config>
struct Cursor {
  int first, before;  // sequence of lane 0, and the units of one head of those before it

  __device__ __forceinline__ Units load(const DecodeArguments& args) const {
    const int b = first + threadIdx.x % 32;
    return count(args, b < args.batch ? args.seq_lens[b] : 0);
  }

  // Goes on from a lane's length.
  __device__ __forceinline__ Units count(const DecodeArguments& args, int length) const {
    const int lane = threadIdx.x % 32;
    const int own = first + lane < args.batch ? visible_keys<Config>(args, first + lane, length).units() : 0;
    int sum = own;
#pragma unroll 1
    for (int d = 1; d < min(args.batch, 32); d *= 2) {  // as many lanes as are looked at
      const int more = __shfl_up_sync(kAllLanes, sum, d);
      if (lane >= d) sum += more;
    }
    return {length, own, sum};
  }

  // Finds the unit that each lane asks for, beginning with what was loaded last; `wanted` must not be before any that
  // was asked for earlier.
  __device__ __forceinline__ Found find(const DecodeArguments& args, Units units, int wanted, bool asks) {
    Found found = {};
    while (true) {
      const int after = before + units.total(args);
      int i = 0;  // lanes whose sequences end at or before the wanted unit
#pragma unroll 1
      for (int step = 16; step > 0; step /= 2) {
        if (step >= args.batch) continue;
        if ((before + __shfl_sync(kAllLanes, units.sum, i + step - 1)) * Config::kKVHeads <= wanted) i += step;
      }
      const int own = __shfl_sync(kAllLanes, units.own, i), length = __shfl_sync(kAllLanes, units.length, i);
      const int its_before = before + __shfl_sync(kAllLanes, units.sum, i) - own;
      if (asks && wanted < after * Config::kKVHeads) {
        const int within = wanted - its_before * Config::kKVHeads, head = small_quotient(within, own);
        found.unit.segment = (first + i) * Config::kKVHeads + head;
        found.unit.index = within - head * own;
        if (found.unit.index == own - 1) found.unit.what |= Unit::kLast;
        found.end = its_before * Config::kKVHeads + (head + 1) * own;
        found.length = length;
        asks = false;
      }
      if (!__any_sync(kAllLanes, asks)) return found;
      first += 32;
      before = after;
      units = load(args);
    }
  }
};

// Units of all heads of all sequences; those of the first 32 are known.
template <typename Config>
__device__ __forceinline__ int count_units(const DecodeArguments& args, Units units) {
  int total = units.total(args);
  if (args.batch > 32) {
    int more = 0;
#pragma unroll 1
    for (int b = 32 + threadIdx.x % 32; b < args.batch; b += 32) more += visible_keys<Config>(args, b).units();
#pragma unroll
    for (int d = 1; d < 32; d *= 2) more += __shfl_xor_sync(kAllLanes, more, d);
    total += more;
  }
  return total * Config::kKVHeads;
}

// Units of a CTA's run. The busiest warp's share is what counts. Any quota that does not raise it will do: one that is
// a multiple or a fraction of a segment, if all are alike, leaves fewer segments to be shared between CTAs.
template <typename Config>
__device__ __forceinline__ unsigned cta_quota(const DecodeArguments& args, unsigned total) {
  const unsigned share = ceil_div(total, gridDim.x), least = max(share, kLeastQuota);
  const unsigned most = ceil_div(share, static_cast<unsigned>(Config::kWarps)) * Config::kWarps;
  const unsigned segment = small_quotient(total, args.batch * Config::kKVHeads);
  unsigned aligned;
  if (segment >= least) {
    const unsigned parts = small_quotient(segment, least);
    aligned = small_quotient(segment + parts - 1, parts);
  } else {
    aligned = small_quotient(least + segment - 1, segment) * segment;
  }
  return aligned <= most ? aligned : least;
}

// A run that is dealt out to warps: the first ones get one more if it does not come out even.
struct Share {
  int first, count;
};

template <typename Config>
__device__ __forceinline__ Share warp_share(int first, unsigned count, int warp) {
  const int base = count / Config::kWarps, extra = count % Config::kWarps;
  return {first + warp * base + min(warp, extra), base + (warp < extra)};
}

}  // namespace foscar
