// Blocks of exact tokens: sinks and recent tokens, in the model's precision.
//
// A stage holds the block's rows of K, then those of V, each row followed by 16 bytes that keep matrix loads free of
// bank conflicts. p enters the second product as the sum of two operands, so that it loses nothing to bfloat16.
#pragma once

#include "page.cuh"

namespace foscar {

template <typename Config>
struct ExactStage {
  static constexpr int kRowBytes = Config::kHeadDim * 2;
  static constexpr int kPitch = kRowBytes + 16;
  static constexpr int kTransferred = 2 * kExactBlock * kRowBytes;
  static_assert(2 * kExactBlock * kPitch <= Config::kRecordBytes, "a block fits a stage");
};

// Fetches a block into a stage; 16 lanes copy a row each. Rows past the block's end repeat its last: p is 0 there, and
// what it is multiplied by must be finite.
template <typename Config>
__device__ __forceinline__ void fetch_exact(const DecodeArguments& args, const Unit& unit, uint8_t* stage,
                                            uint32_t barrier) {
  using E = ExactStage<Config>;
  const int lane = threadIdx.x % 32, b = unit.segment / Config::kKVHeads, head = unit.segment % Config::kKVHeads;
  const Visible visible = visible_keys<Config>(args, b);
  const ExactBlock block = exact_block(visible, unit.index - visible.num_pages);
  if (lane == 0) mbarrier_arrive_expect_tx(barrier, E::kTransferred);
  __syncwarp();
  if (lane >= 2 * kExactBlock) return;
  const int position = block.position + min(lane % kExactBlock, block.count - 1);
  const int row = position < args.sink_tokens ? position : args.sink_tokens + position % args.ring_tokens;
  const int64_t seq_id = args.seq_ids ? args.seq_ids[b] : b;
  const int64_t rows = (seq_id * Config::kKVHeads + head) * 2 + lane / kExactBlock;
  const auto* const source =
      static_cast<const uint8_t*>(args.exact) + (rows * (args.sink_tokens + args.ring_tokens) + row) * E::kRowBytes;
  cp_async_bulk(smem_address(stage + lane * E::kPitch), source, E::kRowBytes, barrier, kEvictFirst);
}

template <typename Config>
__device__ __forceinline__ void attend_exact(const DecodeArguments& args, const uint8_t* stage, State<Config>& state,
                                             const Unit& unit) {
  using S = Shape<Config>;
  using E = ExactStage<Config>;
  using T = typename Config::T;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int b = unit.segment / Config::kKVHeads, head = unit.segment % Config::kKVHeads;
  const Visible visible = visible_keys<Config>(args, b);
  const ExactBlock block = exact_block(visible, unit.index - visible.num_pages);
  state.to_values();

  // S^T = K q^T: row g is token g; rows 8 to 15 are zero.
  const int row = g & S::kRowMask;
  const bool valid = row < args.q_len * args.group;
  const Row which(args, row);
  const T* const q = static_cast<const T*>(args.q) + b * args.q_strides[0] + which.token * args.q_strides[1] +
                     (head * args.heads_per_kv + which.head) * args.q_strides[2] + 2 * c;
  const uint32_t matrix = smem_address(stage + lane % 8 * E::kPitch + lane / 8 * 16);
  float products[2][4] = {};
#pragma unroll 1
  for (int i = 0; i < S::kHeadDim / 32; ++i) {
    uint32_t k[4], operand[4];
    ldmatrix_x4(k, matrix + i * 64);
#pragma unroll
    for (int j = 0; j < 4; ++j) operand[j] = valid ? *reinterpret_cast<const uint32_t*>(q + 32 * i + 8 * j) : 0u;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      mma_m16n8k16<Config::kBf16>(products[j], k[2 * j], 0, k[2 * j + 1], 0, operand[2 * j], operand[2 * j + 1]);
  }
  float s[2];
#pragma unroll
  for (int col = 0; col < 2; ++col) {
    s[col] = (products[0][col] + products[1][col]) * (args.sm_scale * kLog2e);
    if (args.softcap > 0.f) s[col] = soft_cap(args.softcap, s[col]);
    s[col] -= state.max[col];
    if (is_hidden<Config>(args, visible, 2 * c + col, block.position + g, block.position, block.position + block.count))
      s[col] = -CUDART_INF_F;
  }
  if (state.any_fresh || __any_sync(kAllLanes, s[0] > kMostRaised || s[1] > kMostRaised)) {
    const float2 rise = state.raise({s[0], s[1]});
    s[0] -= rise.x, s[1] -= rise.y;
  }
  float p[2];
#pragma unroll
  for (int col = 0; col < 2; ++col) {
    p[col] = ex2(s[col]);
    if (!Config::kHalves || c < 2) state.sum[col] += p[col];  // lanes c and c ^ 2 have the same row
  }
  const uint32_t high = pack<T>(p[0], p[1]);
  const float2 rest = unpack<T>(high);
  const uint32_t operands[2] = {movmatrix_trans(high), movmatrix_trans(pack<T>(p[0] - rest.x, p[1] - rest.y))};

  // O^T += V^T P^T: rows are channels 16 t + g and 16 t + 8 + g.
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 32; ++i) {
    uint32_t v[4];
    ldmatrix_x4_trans(v, matrix + kExactBlock * E::kPitch + i * 64);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int part = 0; part < 2; ++part)
        mma_m16n8k8<Config::kBf16>(state.o[2 * i + j], v[2 * j], v[2 * j + 1], operands[part]);
  }
}

}  // namespace foscar
