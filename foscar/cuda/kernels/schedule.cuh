// How work is dealt out: units, segments, and who has which.
#pragma once

#include "types.cuh"

namespace foscar {

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

// What lies in a stage.
struct Unit {
  int segment;  // sequence * num_kv_heads + head
  int page;     // among the sequence's visible pages; -1: none, the sequence is empty
};

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

}  // namespace foscar
