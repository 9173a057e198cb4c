// Appending: new tokens, and those that leave the ring for them, are quantised into their pages; what stays exact is
// copied.
//
// Work. A CTA does one KV head of one page that only new tokens go to, or of all that concerns a sequence's exact
// tokens: pages that take tokens from its ring first, then the rows of new ones, which may be the same. A token is
// quantised as the reference does it, bit by bit (foscar/reference/quant.py).
#pragma once

#include "types.cuh"

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
  int64_t k_strides[2];    // token, head; in elements
  int64_t v_strides[2];
  int positions, rotary_dim, is_neox;
  int batch, num_pages, max_seqs;
  int page_ctas;  // of the grid, for each head: those of pages that only new tokens go to
  int block_table_stride, block_table_columns;
  int sink_tokens, recent_tokens, ring_tokens;
};

// What of K or of V one CTA works on at a time.
template <typename Config>
struct alignas(16) AppendMemory {
  using T = typename Config::T;
  static constexpr int kPadding = 16 / sizeof(T);  // so that rows begin in different banks
  static constexpr int kGroups = Config::kKGroups > Config::kVGroups ? Config::kKGroups : Config::kVGroups;
  static constexpr int kRows = Config::kHeadDim > kPageSize ? Config::kHeadDim : kPageSize;
  static constexpr int kParams = Config::kHeadDim > kPageSize* kGroups ? Config::kHeadDim : kPageSize * kGroups;
  T values[kPageSize][Config::kHeadDim + kPadding];
  float limits[kRows];      // of a row's magnitudes, if it is clipped
  uint32_t words[kParams];  // scales, and offsets as they are stored
  float inverses[kParams];  // of half of a scale
};

// How K or V is quantised and where it lies (foscar/layout.py).
template <typename Config, bool kIsK>
struct Operand {
  static constexpr int kBits = kIsK ? Config::kKBits : Config::kVBits;
  static constexpr int kGroups = kIsK ? Config::kKGroups : Config::kVGroups;
  static constexpr bool kChannelWise = kIsK ? Config::kKChannelWise : Config::kVChannelWise;
  static constexpr int kCodes = kIsK ? Config::kKCodes : Config::kVCodes;
  static constexpr int kParams = kIsK ? Config::kKParams : Config::kVParams;
  static constexpr int kKept = kIsK ? Config::kKKept : Config::kVKept;  // magnitudes of a row within its limit, or 0
  static constexpr int kLevels = (1 << kBits) - 1;
  static constexpr int kGroupSize = Config::kHeadDim / kGroups;

  // Tokens at odd positions of V count down, so that sums over tokens of p * scale * code stay small.
  static __device__ __forceinline__ bool counts_down(int token) { return !kIsK && !kChannelWise && token % 2 == 1; }
  static __device__ __forceinline__ int place(int token, int channel) {
    return kChannelWise ? channel : token * kGroups + channel / kGroupSize;
  }
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

// The first CTA of a sequence's pages: as many follow as the new tokens may need pages, which is at most their number,
// and at most two more than they would fill.
__device__ __forceinline__ int first_page_cta(const AppendArguments& args, int b) {
  const int row = args.cu_seqlens[b];
  return min(row, row / kPageSize + 2 * b);
}

// The last sequence whose first CTA is not after this one.
__device__ __forceinline__ int sequence_of(const AppendArguments& args, int page_cta) {
  const int lane = threadIdx.x % 32;
  int first = 0, count = args.batch;  // it is one of these
  while (count > 1) {
    const int step = (count + 31) / 32, b = first + lane * step;
    const bool begins = lane * step < count && first_page_cta(args, b) <= page_cta;
    const int which = 31 - __clz(__ballot_sync(kAllLanes, begins) | 1);
    first += which * step;
    count = min(step, count - which * step);
  }
  return first;
}

template <typename Operand>
__device__ __forceinline__ float scale_of(uint32_t word) {
  return __uint_as_float(Operand::kChannelWise ? word & 0xffff0000u : word);
}
__device__ __forceinline__ float offset_of(uint32_t word) { return __uint_as_float(word << 16); }

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

// Makes codes of one scale and offset.
template <typename Operand>
struct Coder {
  float offset, half_scale, inverse;

  __device__ __forceinline__ Coder(uint32_t word, float inverse, bool counts_down)
      : offset(counts_down ? -offset_of(word) : offset_of(word)),
        half_scale(0.5f * scale_of<Operand>(word)),
        inverse(inverse) {}

  __device__ __forceinline__ uint32_t operator()(float x) const {
    constexpr float kRound = 12582912.f;  // 3 * 2^22: a small number that is added is an integer in the low bits
    const float quotient = divide(0.5f * x - 0.5f * offset, half_scale, inverse);
    const float code = fminf(fmaxf(quotient, 0.f), static_cast<float>(Operand::kLevels));
    return __float_as_uint(code + kRound) - __float_as_uint(kRound);
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
  T at[16 / sizeof(T)];
};

// Channels of a new token's K or V. Angles are those of its position; products are not fused, as in the reference.
template <typename Config, bool kIsK, typename T = typename Config::T>
__device__ __forceinline__ Vector<T> load_new(const AppendArguments& args, const Growth& growth, int head, int position,
                                              int channel) {
  constexpr int kVector = 16 / sizeof(T);
  const int64_t* const strides = kIsK ? args.k_strides : args.v_strides;
  const T* const row = static_cast<const T*>(kIsK ? args.k : args.v) + head * strides[1] +
                       (growth.first_row + position - growth.before) * strides[0];
  auto load = [&](int first) { return *reinterpret_cast<const Vector<T>*>(row + first); };
  Vector<T> x = load(channel);
  if (!kIsK || !args.cos_sin || channel >= args.rotary_dim || position >= args.positions) return x;
  const int half = args.rotary_dim / 2;
  const float* const cos = args.cos_sin + static_cast<int64_t>(position) * args.rotary_dim;
  auto turn = [&](float own, float other, int angle, float sign) {
    return static_cast<T>(__fadd_rn(__fmul_rn(own, cos[angle]), sign * __fmul_rn(other, cos[half + angle])));
  };
  if (args.is_neox) {
    const bool is_first = channel < half;
    const Vector<T> other = load(is_first ? channel + half : channel - half);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      x.at[i] = turn(x.at[i], other.at[i], (is_first ? channel : channel - half) + i, is_first ? -1.f : 1.f);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      const float first = x.at[i], second = x.at[i + 1];
      x.at[i] = turn(first, second, (channel + i) / 2, -1.f);
      x.at[i + 1] = turn(second, first, (channel + i) / 2, 1.f);
    }
  }
  return x;
}

// K or V of a page's tokens [begin, end), from the ring and from new ones, quantised into a record.
template <typename Config, bool kIsK>
__device__ __forceinline__ void quantize(const AppendArguments& args, AppendMemory<Config>& smem, const Growth& growth,
                                         int head, int first, int begin, int end, const void* ring, uint8_t* record) {
  using T = typename Config::T;
  using O = Operand<Config, kIsK>;
  constexpr int kHeadDim = Config::kHeadDim, kThreads = Config::kThreads;
  constexpr int kVector = 16 / sizeof(T), kVectors = kHeadDim / kVector;
  const int thread = threadIdx.x, tokens = end - begin;
  auto value = [&](int token, int channel) { return static_cast<float>(smem.values[token][channel]); };

  for (int i = thread; i < tokens * kVectors; i += kThreads) {
    const int token = begin + i / kVectors, channel = i % kVectors * kVector, position = first + token;
    auto& place = *reinterpret_cast<Vector<T>*>(&smem.values[token][channel]);
    if (position < growth.before) {
      const T* const row = static_cast<const T*>(ring) + position % args.ring_tokens * kHeadDim;
      place = *reinterpret_cast<const Vector<T>*>(row + channel);
    } else {
      place = load_new<Config, kIsK>(args, growth, head, position, channel);
    }
  }
  __syncthreads();

  // A row is what is clipped together: a token's channels, or a channel's tokens. Others stand in for missing tokens.
  if constexpr (O::kKept > 0) {
    constexpr int kValues = (O::kChannelWise ? kPageSize : kHeadDim) / kRowLanes;
    const int rows = O::kChannelWise ? kHeadDim : tokens;
    for (int base = 0; base < rows; base += kThreads / kRowLanes) {
      const int row = min(base + thread / kRowLanes, rows - 1);
      float magnitudes[kValues];
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        const int i = thread % kRowLanes + kRowLanes * j;
        magnitudes[j] = fabsf(O::kChannelWise ? value(i < begin ? begin + i % tokens : i, row) : value(begin + row, i));
      }
      const float limit = limit_of<T>(O::kKept, magnitudes);
      if (thread % kRowLanes == 0 && base + thread / kRowLanes < rows)
        smem.limits[O::kChannelWise ? row : begin + row] = limit;
    }
    __syncthreads();
  }
  auto clip = [&](float x, int token, int channel) {
    if (O::kKept > 0) {
      const float limit = smem.limits[O::kChannelWise ? channel : token];
      x = fminf(fmaxf(x, -limit), limit);
    }
    return O::counts_down(token) ? -x : x;
  };
  auto clipped = [&](int token, int channel) { return clip(value(token, channel), token, channel); };

  auto put_word = [&](int place, int index, float low, float high, bool counts_down) {
    const uint32_t word = make_word<O>(low, high, counts_down);
    smem.words[place] = word;
    smem.inverses[place] = invert(0.5f * scale_of<O>(word));
    reinterpret_cast<uint32_t*>(record + O::kParams)[index] = word | (counts_down ? 0x80000000u : 0u);
  };
  if constexpr (O::kChannelWise) {
    for (int channel = thread; channel < kHeadDim; channel += kThreads) {
      float low = clipped(begin, channel), high = low;
      for (int token = begin + 1; token < end; ++token) {
        const float x = clipped(token, channel);
        low = fminf(low, x), high = fmaxf(high, x);
      }
      put_word(channel, kIsK ? channel : channel % 8 * (kHeadDim / 8) + channel / 8, low, high, false);
    }
  } else {
    constexpr int kLanes = O::kGroupSize / kVector % 8 == 0 ? 8 : 4;  // of a group
    const int total = tokens * O::kGroups * kLanes;
    for (int base = 0; base < total; base += kThreads) {
      const int i = min(base + thread, total - kLanes + thread % kLanes);  // past the end, the last group's again
      const int place = begin * O::kGroups + i / kLanes, token = place / O::kGroups, group = place % O::kGroups;
      float low = CUDART_INF_F, high = -CUDART_INF_F;
#pragma unroll
      for (int j = 0; j < O::kGroupSize; j += kLanes * kVector) {
        const int channel = group * O::kGroupSize + j + i % kLanes * kVector;
        const Vector<T> vector = *reinterpret_cast<const Vector<T>*>(&smem.values[token][channel]);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float x = clip(static_cast<float>(vector.at[k]), token, channel + k);
          low = fminf(low, x), high = fmaxf(high, x);
        }
      }
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        low = fminf(low, __shfl_xor_sync(kAllLanes, low, lanes));
        high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, lanes));
      }
      if (i % kLanes == 0 && base + thread < total)
        put_word(place, group * kPageSize + token % 8 * 8 + token / 8, low, high, O::counts_down(token));
    }
  }
  __syncthreads();

  auto coder = [&](int token, int channel) {
    const int place = O::place(token, channel);
    return Coder<O>(smem.words[place], smem.inverses[place], O::counts_down(token));
  };
  uint8_t* const codes = record + O::kCodes;
  if constexpr (kIsK) {
    // A word is one run of 8 channels in 4 bits; in 2 bits it is two, its even bytes and its odd ones.
    constexpr int kRuns = kHeadDim / 32, kWords = kHeadDim * O::kBits / 32, kPaired = kRuns / 2;
    for (int i = thread; i < tokens * kWords; i += kThreads) {
      const int token = begin + i / kWords, w = i % kWords;
      uint32_t word = 0;
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
        const Coder<O> common = coder(token, channel);
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          const int bit = O::kBits == 4 ? 4 * m : 8 * half + 16 * (m / 4) + 2 * (m % 4);
          const Vector<T>& vector =
              *reinterpret_cast<const Vector<T>*>(&smem.values[token][channel + m / kVector * kVector]);
          const float x = clip(static_cast<float>(vector.at[m % kVector]), token, channel + m);
          word += (O::kChannelWise ? coder(token, channel + m) : common)(x) << bit;
        }
      }
      reinterpret_cast<uint32_t*>(codes)[token * kWords + w] = word;
    }
  } else {
    // A word is channels 8 apart of four tokens of a block of 16.
    constexpr int kFields = 8 / O::kBits, kWords = kHeadDim / (8 * kFields);
    const int first_block = begin / 16, blocks = (end + 15) / 16 - first_block;
    for (int i = thread; i < blocks * kWords * 32; i += kThreads) {
      const int lane = i % 32, g = lane / 4, c = lane % 4, n = first_block * kWords + i / 32, w = n % kWords;
      auto token_of = [&](int byte) { return n / kWords * 16 + 2 * c + byte / 2 + byte % 2 * 8; };
      auto is_present = [&](int byte) { return begin <= token_of(byte) && token_of(byte) < end; };
      uint32_t word = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        if (!is_present(byte)) continue;
        const int token = token_of(byte), channel = 8 * kFields * w + g;
        const Coder<O> common = coder(token, channel);
#pragma unroll
        for (int f = 0; f < kFields; ++f)
          word += (O::kChannelWise ? coder(token, channel + 8 * f) : common)(clipped(token, channel + 8 * f))
                  << (8 * byte + O::kBits * f);
      }
      uint8_t* const target = codes + n / 4 * 512 + lane * 16 + n % 4 * 4;
      if (is_present(0) && is_present(1) && is_present(2) && is_present(3)) {
        *reinterpret_cast<uint32_t*>(target) = word;
      } else {
#pragma unroll
        for (int byte = 0; byte < 4; ++byte)
          if (is_present(byte)) target[byte] = static_cast<uint8_t>(word >> 8 * byte);
      }
    }
  }
  __syncthreads();
}

// A column of the block table, and a sequence's rows of exact tokens.
template <typename Config>
struct Places {
  const AppendArguments& args;
  const Growth& growth;
  int head, seq_id;

  __device__ __forceinline__ uint8_t* record(int column) const {
    if (column >= args.block_table_columns) return nullptr;
    const int page = args.block_table[growth.b * static_cast<int64_t>(args.block_table_stride) + column];
    if (page < 0 || page >= args.num_pages) return nullptr;
    return args.pages + (static_cast<int64_t>(page) * Config::kKVHeads + head) * Config::kRecordBytes;
  }
  __device__ __forceinline__ typename Config::T* exact(int operand, int row) const {
    const int rows = args.sink_tokens + args.ring_tokens;
    const int64_t which = (static_cast<int64_t>(seq_id) * Config::kKVHeads + head) * 2 + operand;
    return static_cast<typename Config::T*>(args.exact) + (which * rows + row) * Config::kHeadDim;
  }
};

// The tokens of one page that leave, from `begin` on.
template <typename Config>
__device__ __forceinline__ void quantize_page(const AppendArguments& args, AppendMemory<Config>& smem,
                                              const Places<Config>& places, int column, int begin) {
  uint8_t* const record = places.record(column);
  if (!record) return;
  const int first = column * kPageSize, from = max(begin - first, 0);
  const int to = min(places.growth.border - first, kPageSize);
  const void *k_ring = nullptr, *v_ring = nullptr;
  if (Config::kExact) k_ring = places.exact(0, args.sink_tokens), v_ring = places.exact(1, args.sink_tokens);
  quantize<Config, true>(args, smem, places.growth, places.head, first, from, to, k_ring, record);
  quantize<Config, false>(args, smem, places.growth, places.head, first, from, to, v_ring, record);
}

template <typename Config>
__device__ __forceinline__ void append(const AppendArguments& args) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& smem = *reinterpret_cast<AppendMemory<Config>*>(memory);
  static_assert(sizeof(smem) == Config::kSharedBytes, "what the host asks for");
  using T = typename Config::T;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int head = blockIdx.x % Config::kKVHeads, cta = blockIdx.x / Config::kKVHeads;

  // Pages that the ring may have tokens of are left to the sequence's own CTA.
  const bool is_own = Config::kExact && cta >= args.page_ctas;
  const int b = is_own ? cta - args.page_ctas : sequence_of(args, cta);
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
  const int own_stop = (growth.before + kPageSize - 1) / kPageSize;  // of the columns of the sequence's own CTA
  int column = begin / kPageSize, stop = own_stop;
  if (!is_own) {
    const int which = cta - first_page_cta(args, b);
    if (which < 0) return;  // cu_seqlens does not begin with 0
    column = (Config::kExact ? max(column, own_stop) : column) + which;
    stop = column + 1;
  }
  const Places<Config> places = {args, growth, head, seq_id};
  if (begin < growth.border)
#pragma unroll 1
    for (; column < stop && column * kPageSize < growth.border; ++column)
      quantize_page<Config>(args, smem, places, column, begin);

  if (Config::kExact && is_own) {
    // New tokens that stay: sinks, and those after the border.
    constexpr int kVectors = Config::kHeadDim * sizeof(T) / 16;
    const int sinks_end = max(min(args.sink_tokens, growth.after), growth.before);  // of new sinks
    const int kept = max(max(growth.border, sinks_end), growth.before);             // first of the ring's new ones
    const int sinks = sinks_end - growth.before, stay = sinks + growth.after - kept;
    for (int i = threadIdx.x; i < 2 * stay * kVectors; i += Config::kThreads) {
      const int vector = i % kVectors, operand = i / kVectors % 2, which = i / (2 * kVectors);
      const int position = which < sinks ? growth.before + which : kept + which - sinks;
      const int row = position < args.sink_tokens ? position : args.sink_tokens + position % args.ring_tokens;
      const int channel = vector * (16 / sizeof(T));
      *reinterpret_cast<Vector<T>*>(places.exact(operand, row) + channel) =
          operand ? load_new<Config, false>(args, growth, head, position, channel)
                  : load_new<Config, true>(args, growth, head, position, channel);
    }
    // The last head to have read the lengths writes them; all threads of this one have, behind the barrier.
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(args.arrivals + b, 1u) + 2 == Config::kKVHeads) {
      args.lengths[2 * seq_id] = growth.border, args.lengths[2 * seq_id + 1] = growth.after;
      args.arrivals[b] = ~0u;
    }
  }
}

}  // namespace foscar
