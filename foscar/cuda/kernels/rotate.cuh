// Rotating rows of shared memory in place: the Hadamard transform, or a matrix, of foscar/rotation.py.
#pragma once

#include "types.cuh"

namespace foscar {

constexpr int kHadamard = 1, kMatrix = 2;  // of Config::kKRotation and kVRotation; 0 for none

// The sign, in the Walsh-Hadamard matrix, of one entry.
__device__ __forceinline__ float hadamard_sign(int row, int column) { return __popc(row & column) % 2 ? -1.f : 1.f; }

// 16 rows, by a warp; those that is_wanted(row) refuses stay as they are.
template <typename Config, int kRotation, typename T, int kPitch, typename Wanted>
__device__ __forceinline__ void rotate(T (*rows)[kPitch], const T* matrix, Wanted is_wanted) {
  constexpr int kHeadDim = Config::kHeadDim, kBlock = kHeadDim & -kHeadDim;  // of a Hadamard matrix
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const float factor = kRotation == kHadamard ? rsqrtf(kBlock) : 1.f;
  if constexpr (sizeof(T) == 2) {
    constexpr int kTiles = kHeadDim / 16;
    uint32_t a[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      ldmatrix_x4(a[tile], smem_address(&rows[lane % 16][16 * tile + lane / 16 * 8]));
    __syncwarp();
    const bool is_upper = is_wanted(g), is_lower = is_wanted(g + 8);
    auto store = [&](int channel, const float (&sums)[4]) {
      auto pair = [&](float x, float y) { return pack<T>(factor * x, factor * y); };
      if (is_upper) *reinterpret_cast<uint32_t*>(&rows[g][channel + 2 * c]) = pair(sums[0], sums[1]);
      if (is_lower) *reinterpret_cast<uint32_t*>(&rows[g + 8][channel + 2 * c]) = pair(sums[2], sums[3]);
    };
    if constexpr (kRotation == kHadamard) {
      // 16 neighbouring channels by the matrix of order 16, then the tiles of a block by butterflies.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto signs = [&](int row) {
          return pack<T>(hadamard_sign(row, 8 * half + g), hadamard_sign(row + 1, 8 * half + g));
        };
        const uint32_t b0 = signs(2 * c), b1 = signs(2 * c + 8);
        float sums[kTiles][4] = {};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          mma_m16n8k16<Config::kBf16>(sums[tile], a[tile][0], a[tile][1], a[tile][2], a[tile][3], b0, b1);
#pragma unroll
        for (int step = 1; step < kBlock / 16; step *= 2)
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile)
            if (!(tile & step))
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float x = sums[tile][i], y = sums[tile + step][i];
                sums[tile][i] = x + y, sums[tile + step][i] = x - y;
              }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) store(16 * tile + 8 * half, sums[tile]);
      }
    } else {
#pragma unroll 1
      for (int channel = 0; channel < kHeadDim; channel += 8) {
        const T* const row = matrix + (channel + g) * kHeadDim + 2 * c;
        float sums[4] = {};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          mma_m16n8k16<Config::kBf16>(sums, a[tile][0], a[tile][1], a[tile][2], a[tile][3],
                                      *reinterpret_cast<const uint32_t*>(row + 16 * tile),
                                      *reinterpret_cast<const uint32_t*>(row + 16 * tile + 8));
        store(channel, sums);
      }
    }
  } else {
    // Tensor cores would round float32.
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      if (!is_wanted(row)) continue;
      float sums[kHeadDim / 32] = {};
#pragma unroll 1
      for (int channel = 0; channel < kHeadDim; ++channel)
#pragma unroll
        for (int i = 0; i < kHeadDim / 32; ++i) {
          const int own = 32 * i + lane;
          const float sign = channel / kBlock == own / kBlock ? hadamard_sign(channel % kBlock, own % kBlock) : 0.f;
          sums[i] = fmaf(kRotation == kHadamard ? sign : matrix[own * kHeadDim + channel], rows[row][channel], sums[i]);
        }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; ++i) rows[row][32 * i + lane] = factor * sums[i];
    }
  }
}

}  // namespace foscar
