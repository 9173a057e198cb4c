// Where K and V lie in a page's record, for kernels that write or read all of it (foscar/layout.py).
#pragma once

#include "types.cuh"

namespace foscar {

// How K or V is quantised, and where it lies.
template <typename Config, bool kIsK>
struct Operand {
  static constexpr int kBits = kIsK ? Config::kKBits : Config::kVBits;
  static constexpr int kGroups = kIsK ? Config::kKGroups : Config::kVGroups;
  static constexpr bool kChannelWise = kIsK ? Config::kKChannelWise : Config::kVChannelWise;
  static constexpr int kCodes = kIsK ? Config::kKCodes : Config::kVCodes;
  static constexpr int kParams = kIsK ? Config::kKParams : Config::kVParams;
  static constexpr int kLevels = (1 << kBits) - 1;
  static constexpr int kGroupSize = Config::kHeadDim / kGroups;

  // Tokens at odd positions of V count down, so that sums over tokens of p * scale * code stay small.
  static __device__ __forceinline__ bool counts_down(int token) { return !kIsK && !kChannelWise && token % 2 == 1; }
  static __device__ __forceinline__ int place(int token, int channel) {
    return kChannelWise ? channel : token * kGroups + channel / kGroupSize;
  }
};

template <typename Operand>
__device__ __forceinline__ float scale_of(uint32_t word) {
  return __uint_as_float(Operand::kChannelWise ? word & 0xffff0000u : word);
}
__device__ __forceinline__ float offset_of(uint32_t word) { return __uint_as_float(word << 16); }

// Where K (0) or V (1) of a token that stays exact is.
template <typename Config, typename Arguments>
__device__ __forceinline__ int64_t exact_offset(const Arguments& args, int64_t seq_id, int head, int operand,
                                                int position) {
  const int row = position < args.sink_tokens ? position : args.sink_tokens + position % args.ring_tokens;
  const int64_t which = (seq_id * Config::kKVHeads + head) * 2 + operand;
  return (which * (args.sink_tokens + args.ring_tokens) + row) * Config::kHeadDim;
}

// Where K or V of a new token is.
template <typename Arguments>
__device__ __forceinline__ int64_t new_offset(const Arguments& args, int64_t row, int head, int operand) {
  const int64_t* const strides = operand ? args.v_strides : args.k_strides;
  return head * strides[1] + row * strides[0];
}

}  // namespace foscar
