// A streaming read that does next to nothing with what it reads: the ceiling that benchmarks compare with.
#pragma once

#include "ptx.cuh"

namespace foscar {

// Adds all 32-bit words of `tiles` tiles, modulo 2^32, to *total. A tile is what the threads of a CTA have in flight
// together: kLoads times 16 bytes each.
template <int kThreads, int kLoads>
__device__ __forceinline__ void read(const uint4* data, int tiles, uint32_t* total) {
  uint32_t sum = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint4* first = data + static_cast<int64_t>(tile) * (kThreads * kLoads) + threadIdx.x;
    uint4 words[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = __ldcs(first + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += words[i].x + words[i].y + words[i].z + words[i].w;
  }
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (threadIdx.x % 32 == 0) atomicAdd(total, sum);
}

}  // namespace foscar
