// Appending: new tokens, and those that leave the ring for them, are quantised into their pages; what stays exact is
// copied.
//
// Work. A team, of a warp or of a whole CTA, does one KV head of a block of tokens that are all new, or of all that
// concerns a sequence's exact tokens: blocks that take tokens from its ring first, then the rows of new ones, which may
// be the same. A warp takes 16 tokens at a time, a CTA a page. A token is quantised as the reference does it, bit by
// bit (foscar/reference/quant.py); rotated, up to what the order of a sum makes of a rounding.
#pragma once

#include "record.cuh"
#include "rotate.cuh"

namespace foscar {

constexpr float kLeastScale = 0x1p-60f;

struct AppendArguments {
  const void* k;           // [total_tokens, num_kv_heads, head_dim], rows contiguous and 16-byte aligned
  const void* v;           // as k
  uint8_t* pages;          // [num_pages, num_kv_heads, record_bytes]
  const int* block_table;  // [batch, block_table_stride]
  const int* seq_lens;     // [batch]: before the append
  const int* cu_seqlens;   // [batch + 1]
  void* exact;             // [max_seqs, num_kv_heads, 2, sink_tokens + ring_tokens, head_dim]
  int* lengths;            // [max_seqs, 2]: where the ring begins, and where it ends
  const int* seq_ids;      // [batch] or null: the sequence itself
  unsigned* arrivals;      // [batch]: heads that have read their lengths; all ones between launches
  const float* cos_sin;    // [positions, rotary_dim] or null: cosines, then sines; what new keys are turned by
  const void* k_rotation;  // [head_dim, head_dim]: what new keys are rotated by then, if Config says so
  const void* v_rotation;  // as k_rotation
  int64_t k_strides[2];    // token, head; in elements
  int64_t v_strides[2];
  int positions, rotary_dim, is_neox;
  int batch, num_pages, max_seqs;
  int blocks;    // for each head: units of work that are blocks of new tokens
  int by_warps;  // whether teams are warps
  int block_table_stride, block_table_columns;
  int sink_tokens, recent_tokens, ring_tokens;
};

template <int kThreads>
struct Team {
  static constexpr int kSize = kThreads;
  static __device__ __forceinline__ int rank() { return threadIdx.x % kThreads; }
  static __device__ __forceinline__ void sync() {
    if constexpr (kThreads == 32)
      __syncwarp();
    else
      __syncthreads();
  }
};

// K and V of a page's worth of tokens, all a CTA's or a share of them for each of its warps.
template <typename Config>
struct alignas(16) AppendMemory {
  using T = typename Config::T;
  static constexpr int kPadding = 16 / sizeof(T);  // so that rows begin in different banks
  static constexpr int kGroups = Config::kKGroups > Config::kVGroups ? Config::kKGroups : Config::kVGroups;
  static constexpr int kRows = Config::kHeadDim > kPageSize ? Config::kHeadDim : kPageSize;
  static constexpr int kParams = Config::kHeadDim > kPageSize* kGroups ? Config::kHeadDim : kPageSize * kGroups;
  struct Param {
    uint32_t word;  // scale, and offset as it is stored
    float inverse;  // of half of the scale
  };
  T values[2][kPageSize][Config::kHeadDim + kPadding];
  Param params[2][kParams];
  float limits[2][kRows];  // of a row's magnitudes, if it is clipped
};

// One sequence's part of an append. Ends of ranges are exclusive.
struct Growth {
  int b, first_row;   // of k and v
  int before, after;  // tokens
  int border;         // where the ring begins afterwards

  __device__ __forceinline__ static Growth of(const AppendArguments& args, int b) {
    Growth growth;
    growth.b = b;
    growth.first_row = args.cu_seqlens[b];
    growth.before = args.seq_lens[b];
    growth.after = growth.before + args.cu_seqlens[b + 1] - growth.first_row;
    return growth;
  }
  // Never back to before where it was. Which new tokens leave does not depend on that.
  template <typename Config>
  __device__ __forceinline__ void move_border(const AppendArguments& args, int was) {
    border = max(after - args.recent_tokens, was);
    if (Config::kKChannelWise || Config::kVChannelWise) border = border / kPageSize * kPageSize;
  }
};

// How many units of work that are blocks of new tokens come before a sequence's: as many as its new tokens may need,
// which is at most their number, and at most two more than they would fill.
template <int kTokens>
__device__ __forceinline__ int first_block(const AppendArguments& args, int b) {
  const int row = args.cu_seqlens[b];
  return min(row, row / kTokens + 2 * b);
}

// x / y, rounded to nearest: the product with y's inverse, made up for by what it leaves (Markstein, 1990). The result
// must not be subnormal, or does not matter.
__device__ __forceinline__ float divide(float x, float y, float inverse) {
  const float quotient = x * inverse;
  return fmaf(fmaf(-quotient, y, x), inverse, quotient);
}

__device__ __forceinline__ float invert(float x) {
  const float inverse = rcp(x);
  return fmaf(fmaf(-x, inverse, 1.f), inverse, inverse);
}

// Scale and offset of values in [low, high]; the offset with the sign that it is stored with.
template <typename Operand>
__device__ __forceinline__ uint32_t make_word(float low, float high, bool counts_down) {
  constexpr float kLevels = Operand::kLevels;
  uint32_t offset = __float_as_uint(low + 0.f) & 0xffff0000u;  // no negative zero
  if (__uint_as_float(offset) > low) offset += 0x10000u;
  const float ideal = divide(0.5f * high - 0.5f * __uint_as_float(offset), kLevels, 1.f / kLevels) * 2.f;
  const uint32_t scale = __float_as_uint(fmaxf(ideal, 2.f * kLeastScale));
  const uint32_t half = offset >> 16 ^ (counts_down ? 0x8000u : 0u);
  return ((scale - (Operand::kChannelWise ? 0 : half) + 0x8000u) & 0xffff0000u) | half;
}

// Makes codes of one scale and offset. A code comes as the float kRound + code, whose low bits it is: whoever adds up
// shifted codes takes off what kRound adds up to.
constexpr uint32_t kRound = 0x4b400000u;  // 3 * 2^22: a small number that is added to it is rounded to an integer
struct Coder {
  float half_offset, half_scale, inverse;

  template <typename Operand, typename Param>
  __device__ __forceinline__ static Coder of(const Param& param, bool counts_down) {
    const float half_offset = 0.5f * offset_of(param.word);
    return {counts_down ? -half_offset : half_offset, 0.5f * scale_of<Operand>(param.word), param.inverse};
  }
  __device__ __forceinline__ uint32_t operator()(float x) const {
    return __float_as_uint(divide(fmaf(0.5f, x, -half_offset), half_scale, inverse) + __uint_as_float(kRound));
  }
};

// The largest of the `kept` smallest magnitudes of a row, kRowLanes lanes of which hold kCount values each.
constexpr int kRowLanes = 8;
template <typename T, int kCount>
__device__ __forceinline__ float limit_of(int kept, const float (&magnitudes)[kCount]) {
  constexpr int kZeros = sizeof(T) == 4 ? 0 : 13;  // low bits that values of 16-bit types do not have
  uint32_t limit = 0;
#pragma unroll 1
  for (int bit = 30; bit >= kZeros; --bit) {
    const uint32_t higher = limit | 1u << bit;
    int below = 0;
#pragma unroll
    for (float magnitude : magnitudes) below += magnitude < __uint_as_float(higher);
#pragma unroll
    for (int lanes = 1; lanes < kRowLanes; lanes *= 2) below += __shfl_xor_sync(kAllLanes, below, lanes);
    if (below < kept) limit = higher;
  }
  return __uint_as_float(limit);
}

template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

template <typename T>
struct PairOf {};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};
template <>
struct PairOf<__half> {
  using Type = __half2;
};

// A column of the block table, and a sequence's rows of exact tokens.
template <typename Config>
struct Places {
  using T = typename Config::T;
  const AppendArguments& args;
  const Growth& growth;
  int head, seq_id;

  __device__ __forceinline__ uint8_t* record(int column) const {
    if (column >= args.block_table_columns) return nullptr;
    const int page = args.block_table[growth.b * static_cast<int64_t>(args.block_table_stride) + column];
    if (page < 0 || page >= args.num_pages) return nullptr;
    return args.pages + (static_cast<int64_t>(page) * Config::kKVHeads + head) * Config::kRecordBytes;
  }
  __device__ __forceinline__ T* exact(int operand, int position) const {
    return static_cast<T*>(args.exact) + exact_offset<Config>(args, seq_id, head, operand, position);
  }
  __device__ __forceinline__ const T* source(int operand, int position) const {
    if (Config::kExact && position < growth.before) return exact(operand, position);
    return static_cast<const T*>(operand ? args.v : args.k) +
           new_offset(args, growth.first_row + position - growth.before, head, operand);
  }
};

// Turns new keys by the angles of their positions; products are not fused, as in the reference. Rows are those of
// `tokens` tokens, at position_of(row).
template <typename Config, typename Team, typename T, int kPitch, typename Position>
__device__ __forceinline__ void turn(const AppendArguments& args, const Growth& growth, T (*rows)[kPitch], int tokens,
                                     Position position_of) {
  constexpr int kVector = Vector<T>::kSize;
  const int half = args.rotary_dim / 2, pairs = (args.is_neox ? half : args.rotary_dim) / kVector;  // of a row
  for (int i = Team::rank(); i < tokens * pairs; i += Team::kSize) {
    const int row = i / pairs, channel = i % pairs * kVector, position = position_of(row);
    if (position < growth.before || position >= args.positions) continue;
    const float* const cos = args.cos_sin + static_cast<int64_t>(position) * args.rotary_dim;
    auto& first = *reinterpret_cast<Vector<T>*>(&rows[row][channel]);
    auto turned = [&](T own, T other, int angle, float sign) {
      const float product = __fmul_rn(static_cast<float>(other), cos[half + angle]);
      return static_cast<T>(__fadd_rn(__fmul_rn(static_cast<float>(own), cos[angle]), sign * product));
    };
    auto turn_pair = [&](T& x, T& y, int angle) {
      const T own = x, other = y;
      x = turned(own, other, angle, -1.f), y = turned(other, own, angle, 1.f);
    };
    if (args.is_neox) {
      auto& second = *reinterpret_cast<Vector<T>*>(&rows[row][channel + half]);
#pragma unroll
      for (int k = 0; k < kVector; ++k) turn_pair(first.at[k], second.at[k], channel + k);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; k += 2) turn_pair(first.at[k], first.at[k + 1], (channel + k) / 2);
    }
  }
}

// What a team has in shared memory, and how it works on it.
template <typename Config, typename Team>
struct Workbench {
  using T = typename Config::T;
  using Memory = AppendMemory<Config>;
  static constexpr int kTokens = kPageSize * Team::kSize / Config::kThreads;  // at a time
  static constexpr int kVector = Vector<T>::kSize, kVectors = Config::kHeadDim / kVector;
  const AppendArguments& args;
  Memory& smem;
  const Places<Config>& places;
  int row0;  // the first of the team's

  __device__ __forceinline__ Workbench(const AppendArguments& args, Memory& smem, const Places<Config>& places)
      : args(args), smem(smem), places(places), row0(threadIdx.x / Team::kSize * kTokens) {}

  template <bool kIsK>
  __device__ __forceinline__ auto& param(int place) const {
    return smem
        .params[!kIsK][(Operand<Config, kIsK>::kChannelWise ? 0 : row0 * Operand<Config, kIsK>::kGroups) + place];
  }

  // Fetches tokens, at position_of(row).
  template <typename Position>
  __device__ __forceinline__ void load(int tokens, Position position_of) {
    for (int i = Team::rank(); i < 2 * tokens * kVectors; i += Team::kSize) {
      const int vector = i % kVectors, operand = i / kVectors % 2, row = i / (2 * kVectors);
      cp_async_16(smem_address(&smem.values[operand][row0 + row][vector * kVector]),
                  places.source(operand, position_of(row)) + vector * kVector);
    }
    cp_async_wait_all();
    Team::sync();
    if (args.cos_sin) {
      turn<Config, Team>(args, places.growth, &smem.values[0][row0], tokens, position_of);
      Team::sync();
    }
    if constexpr (Config::kKRotation || Config::kVRotation) {
      static_assert(kTokens == Team::kSize / 2, "16 for each warp");
      const int first = Team::rank() / 32 * 16;
      auto is_new = [&](int row) { return first + row < tokens && position_of(first + row) >= places.growth.before; };
      if constexpr (Config::kKRotation)
        rotate<Config, Config::kKRotation>(&smem.values[0][row0 + first], static_cast<const T*>(args.k_rotation),
                                           is_new);
      if constexpr (Config::kVRotation)
        rotate<Config, Config::kVRotation>(&smem.values[1][row0 + first], static_cast<const T*>(args.v_rotation),
                                           is_new);
      Team::sync();
    }
  }

  // Limits of rows: a row is what is clipped together, a token's channels or a channel's tokens. Others stand in for
  // missing tokens. Rows of shared memory are tokens from `begin` on, of a page.
  template <bool kIsK>
  __device__ __forceinline__ void find_limits(int begin, int tokens) {
    using O = Operand<Config, kIsK>;
    constexpr int kKept = kIsK ? Config::kKKept : Config::kVKept;
    constexpr int kValues = (O::kChannelWise ? kPageSize : Config::kHeadDim) / kRowLanes;
    const int rows = O::kChannelWise ? Config::kHeadDim : tokens, rank = Team::rank();
    for (int base = 0; base < rows; base += Team::kSize / kRowLanes) {
      const int row = min(base + rank / kRowLanes, rows - 1);
      float magnitudes[kValues];
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        const int i = rank % kRowLanes + kRowLanes * j;
        const T x = O::kChannelWise ? smem.values[!kIsK][(i < begin ? i : i - begin) % tokens][row]
                                    : smem.values[!kIsK][row0 + row][i];
        magnitudes[j] = fabsf(static_cast<float>(x));
      }
      const float limit = limit_of<T>(kKept, magnitudes);
      if (rank % kRowLanes == 0 && base + rank / kRowLanes < rows) smem.limits[!kIsK][row0 + row] = limit;
    }
  }

  // A value as it is quantised. Rows count from the team's first.
  template <bool kIsK>
  __device__ __forceinline__ float prepare(T value, int row, int channel, bool counts_down) const {
    float x = static_cast<float>(value);
    if constexpr ((kIsK ? Config::kKKept : Config::kVKept) > 0) {
      const float limit = smem.limits[!kIsK][Operand<Config, kIsK>::kChannelWise ? channel : row0 + row];
      x = fminf(fmaxf(x, -limit), limit);
    }
    return counts_down ? -x : x;
  }

  // Scales and offsets, into shared memory and the record.
  template <bool kIsK>
  __device__ __forceinline__ void find_params(int begin, int tokens, uint8_t* record) {
    using O = Operand<Config, kIsK>;
    const int rank = Team::rank();
    auto put = [&](int place, int index, float low, float high, bool counts_down) {
      const uint32_t word = make_word<O>(low, high, counts_down);
      param<kIsK>(place) = {word, invert(0.5f * scale_of<O>(word))};
      reinterpret_cast<uint32_t*>(record + O::kParams)[index] = word | (counts_down ? 0x80000000u : 0u);
    };
    if constexpr (O::kChannelWise) {
      for (int channel = rank; channel < Config::kHeadDim; channel += Team::kSize) {
        float low = CUDART_INF_F, high = -CUDART_INF_F;
#pragma unroll 8
        for (int row = 0; row < tokens; ++row) {
          const float x = prepare<kIsK>(smem.values[!kIsK][row][channel], row, channel, false);
          low = fminf(low, x), high = fmaxf(high, x);
        }
        put(channel, kIsK ? channel : channel % 8 * (Config::kHeadDim / 8) + channel / 8, low, high, false);
      }
    } else {
      constexpr bool kPairs = sizeof(T) == 2 && (kIsK ? Config::kKKept : Config::kVKept) == 0;
      constexpr int kLanes = O::kGroupSize / kVector % 8 == 0 ? 8 : 4;  // of a group
      const int total = tokens * O::kGroups * kLanes;
      for (int base = 0; base < total; base += Team::kSize) {
        const int i = min(base + rank, total - kLanes + rank % kLanes);  // past the end, the last group's again
        const int place = i / kLanes, row = place / O::kGroups, group = place % O::kGroups, token = begin + row;
        const bool counts_down = O::counts_down(token);
        float low = CUDART_INF_F, high = -CUDART_INF_F;
        auto vector_at = [&](int j) -> const Vector<T>& {
          const int channel = group * O::kGroupSize + (j * kLanes + i % kLanes) * kVector;
          return *reinterpret_cast<const Vector<T>*>(&smem.values[!kIsK][row0 + row][channel]);
        };
        constexpr int kCount = O::kGroupSize / (kLanes * kVector);
        if constexpr (kPairs) {
          using Pair = typename PairOf<T>::Type;
          Pair lows, highs;
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            const Vector<T> vector = vector_at(j);
            const auto* const pairs = reinterpret_cast<const Pair*>(&vector);
#pragma unroll
            for (int k = 0; k < kVector / 2; ++k) {
              const bool is_first = j == 0 && k == 0;
              lows = is_first ? pairs[0] : __hmin2(lows, pairs[k]),
              highs = is_first ? pairs[0] : __hmax2(highs, pairs[k]);
            }
          }
          low = fminf(static_cast<float>(lows.x), static_cast<float>(lows.y));
          high = fmaxf(static_cast<float>(highs.x), static_cast<float>(highs.y));
          if (counts_down) {
            const float least = -high;
            high = -low, low = least;
          }
        } else {
#pragma unroll
          for (int j = 0; j < kCount; ++j)
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
              const float x = prepare<kIsK>(vector_at(j).at[k], row, 0, counts_down);
              low = fminf(low, x), high = fmaxf(high, x);
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < kLanes; lanes *= 2) {
          low = fminf(low, __shfl_xor_sync(kAllLanes, low, lanes));
          high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, lanes));
        }
        if (i % kLanes == 0 && base + rank < total)
          put(place, group * kPageSize + token % 8 * 8 + token / 8, low, high, counts_down);
      }
    }
  }

  template <bool kIsK>
  __device__ __forceinline__ Coder coder(int row, int channel, bool counts_down) const {
    using O = Operand<Config, kIsK>;
    return Coder::of<O>(param<kIsK>(O::place(row, channel)), counts_down);
  }

  __device__ __forceinline__ void put_k_codes(int begin, int tokens, uint8_t* record) {
    using O = Operand<Config, true>;
    // A word is one run of 8 channels in 4 bits; in 2 bits it is two, its even bytes and its odd ones.
    constexpr int kRuns = Config::kHeadDim / 32, kWords = Config::kHeadDim * O::kBits / 32, kPaired = kRuns / 2;
    constexpr uint32_t kOnes = O::kBits == 4 ? 0x11111111u : 0x55555555u;  // the least bit of each code
    for (int i = Team::rank(); i < tokens * kWords; i += Team::kSize) {
      const int row = i / kWords, w = i % kWords;
      uint32_t word = 0u - kRound * kOnes;
#pragma unroll
      for (int half = 0; half < (O::kBits == 2 ? 2 : 1); ++half) {
        int c, run;
        if (O::kBits == 4) {
          c = w / kRuns, run = w % kRuns;
        } else if (w < 4 * kPaired) {
          c = w / kPaired, run = 2 * (w % kPaired) + half;
        } else {  // two lanes' last runs of an odd number
          c = 2 * (w - 4 * kPaired) + half, run = kRuns - 1;
        }
        const int channel = 32 * run + 8 * c;
        const Coder common = coder<true>(row, channel, false);
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          const int bit = O::kBits == 4 ? 4 * m : 8 * half + 16 * (m / 4) + 2 * (m % 4);
          const Vector<T>& vector =
              *reinterpret_cast<const Vector<T>*>(&smem.values[0][row0 + row][channel + m / kVector * kVector]);
          const float x = prepare<true>(vector.at[m % kVector], row, channel + m, false);
          word += (O::kChannelWise ? coder<true>(row, channel + m, false) : common)(x) << bit;
        }
      }
      reinterpret_cast<uint32_t*>(record + O::kCodes)[(begin + row) * kWords + w] = word;
    }
  }

  __device__ __forceinline__ void put_v_codes(int begin, int tokens, uint8_t* record) {
    using O = Operand<Config, false>;
    // A word is channels 8 apart of four tokens of a block of 16.
    constexpr int kFields = 8 / O::kBits, kWords = Config::kHeadDim / (8 * kFields);
    constexpr uint32_t kOnes = O::kBits == 4 ? 0x11u : 0x55u;
    const int first_block = begin / 16, blocks = (begin + tokens + 15) / 16 - first_block;
    for (int i = Team::rank(); i < blocks * kWords * 32; i += Team::kSize) {
      const int lane = i % 32, g = lane / 4, c = lane % 4, n = first_block * kWords + i / 32, w = n % kWords;
      auto row_of = [&](int byte) { return n / kWords * 16 + 2 * c + byte / 2 + byte % 2 * 8 - begin; };
      auto is_present = [&](int byte) { return 0 <= row_of(byte) && row_of(byte) < tokens; };
      uint32_t word = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        if (!is_present(byte)) continue;
        const int row = row_of(byte), channel = 8 * kFields * w + g;
        const bool counts_down = O::counts_down(begin + row);
        const Coder common = coder<false>(row, channel, counts_down);
        uint32_t codes = 0u - kRound * kOnes;
#pragma unroll
        for (int f = 0; f < kFields; ++f) {
          const float x =
              prepare<false>(smem.values[1][row0 + row][channel + 8 * f], row, channel + 8 * f, counts_down);
          codes += (O::kChannelWise ? coder<false>(row, channel + 8 * f, counts_down) : common)(x) << (O::kBits * f);
        }
        word |= (codes & 0xffu) << (8 * byte);  // whatever is not finite stays its token's
      }
      uint8_t* const target = record + O::kCodes + n / 4 * 512 + lane * 16 + n % 4 * 4;
      if (is_present(0) && is_present(1) && is_present(2) && is_present(3)) {
        *reinterpret_cast<uint32_t*>(target) = word;
      } else {
#pragma unroll
        for (int byte = 0; byte < 4; ++byte)
          if (is_present(byte)) target[byte] = static_cast<uint8_t>(word >> 8 * byte);
      }
    }
  }

  // Quantises the tokens at positions [begin, end), which are of one page.
  __device__ __forceinline__ void quantize(int begin, int end) {
    uint8_t* const record = places.record(begin / kPageSize);
    if (!record) return;
    const int first = begin % kPageSize, tokens = end - begin;
    load(tokens, [&](int row) { return begin + row; });
    if constexpr (Config::kKKept > 0) find_limits<true>(first, tokens);
    if constexpr (Config::kVKept > 0) find_limits<false>(first, tokens);
    if constexpr (Config::kKKept > 0 || Config::kVKept > 0) Team::sync();
    find_params<true>(first, tokens, record);
    find_params<false>(first, tokens, record);
    Team::sync();
    put_k_codes(first, tokens, record);
    put_v_codes(first, tokens, record);
    Team::sync();
  }

  // Copies new tokens, at position_of(row), to their exact rows.
  template <typename Position>
  __device__ __forceinline__ void keep(int tokens, Position position_of) {
    load(tokens, position_of);
    for (int i = Team::rank(); i < 2 * tokens * kVectors; i += Team::kSize) {
      const int vector = i % kVectors, operand = i / kVectors % 2, row = i / (2 * kVectors);
      reinterpret_cast<Vector<T>*>(places.exact(operand, position_of(row)))[vector] =
          *reinterpret_cast<const Vector<T>*>(&smem.values[operand][row0 + row][vector * kVector]);
    }
    Team::sync();
  }
};

template <typename Config, typename Team>
__device__ __forceinline__ void append(const AppendArguments& args, AppendMemory<Config>& smem) {
  constexpr int kTokens = Workbench<Config, Team>::kTokens, kTeams = Config::kThreads / Team::kSize;
  const int owners = Config::kExact ? args.batch : 0;  // units of sequences' exact tokens, before those of new blocks
  const int work = blockIdx.x * kTeams + threadIdx.x / Team::kSize, head = work % Config::kKVHeads;
  const int unit = work / Config::kKVHeads;
  if (unit >= owners + args.blocks) return;

  // Blocks that the ring may have tokens of are left to the sequence's own team.
  const bool is_own = unit < owners;
  const int b =
      is_own ? unit : last_begun(args.batch, unit - owners, [&](int b) { return first_block<kTokens>(args, b); });
  Growth growth = Growth::of(args, b);
  if (growth.after <= growth.before || growth.before < 0) return;  // perhaps padding: the sequence is left as it is
  int seq_id = 0, begin = growth.before;
  if (is_own) {
    seq_id = args.seq_ids ? args.seq_ids[b] : b;
    if (seq_id < 0 || seq_id >= args.max_seqs) return;
    begin = min(args.lengths[2 * seq_id], begin);
  }
  growth.move_border<Config>(args, begin);
  begin = max(begin, args.sink_tokens);
  int stop = (growth.before + kTokens - 1) / kTokens * kTokens;  // positions from here on are in blocks of new tokens
  if (!is_own) {
    const int which = unit - owners - first_block<kTokens>(args, b);
    if (which < 0) return;  // cu_seqlens does not begin with 0
    const int block = (Config::kExact ? max(begin / kTokens, stop / kTokens) : begin / kTokens) + which;
    begin = max(begin, block * kTokens), stop = (block + 1) * kTokens;
  }
  stop = min(stop, growth.border);
  const Places<Config> places = {args, growth, head, seq_id};
  Workbench<Config, Team> workbench(args, smem, places);
#pragma unroll 1
  while (begin < stop) {
    const int end = min((begin / kTokens + 1) * kTokens, stop);
    workbench.quantize(begin, end);
    begin = end;
  }

  if (Config::kExact && is_own) {
    // New tokens that stay: sinks, and those after the border.
    const int sinks_end = max(min(args.sink_tokens, growth.after), growth.before);  // of new sinks
    const int kept = max(max(growth.border, sinks_end), growth.before);             // first of the ring's new ones
    const int sinks = sinks_end - growth.before, stay = sinks + growth.after - kept;
#pragma unroll 1
    for (int first = 0; first < stay; first += kTokens)
      workbench.keep(min(stay - first, kTokens), [&](int row) {
        const int which = first + row;
        return which < sinks ? growth.before + which : kept + which - sinks;
      });
    // The last head to have read the lengths writes them; all threads of this one have, behind the barrier.
    Team::sync();
    if (Team::rank() == 0 && atomicAdd(args.arrivals + b, 1u) + 2 == Config::kKVHeads) {
      args.lengths[2 * seq_id] = growth.border, args.lengths[2 * seq_id + 1] = growth.after;
      args.arrivals[b] = ~0u;
    }
  }
}

template <typename Config>
__device__ __forceinline__ void append(const AppendArguments& args) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& smem = *reinterpret_cast<AppendMemory<Config>*>(memory);
  static_assert(sizeof(smem) == Config::kSharedBytes, "what the host asks for");
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  // Channel-wise, blocks are pages.
  if constexpr (!Config::kKChannelWise && !Config::kVChannelWise) {
    if (args.by_warps) {
      append<Config, Team<32>>(args, smem);
      return;
    }
  }
  append<Config, Team<Config::kThreads>>(args, smem);
}

}  // namespace foscar
