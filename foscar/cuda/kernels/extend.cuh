// Extending: attention of new tokens to the cached ones before them and, causally, to one another.
//
// Work. A CTA does kTileRows query rows of a KV head of one sequence. It looks at all keys that they see or, where rows
// are few, at one of `splits` equal parts. 64 keys at a time are brought into shared memory in the model's precision,
// wherever they are: quantised, exact, or new. There they lie as operands of the tensor cores, a lane's words
// together. Each warp multiplies its rows by them, as in FlashAttention-2 (Dao, 2023).
#pragma once

#include "record.cuh"

namespace foscar {

struct ExtendArguments {
  const void* q;           // [total_tokens, num_q_heads, head_dim], rows contiguous and 16-byte aligned
  const void* k;           // [total_tokens, num_kv_heads, head_dim], as q
  const void* v;           // as k
  const uint8_t* pages;    // [num_pages, num_kv_heads, record_bytes]
  const int* block_table;  // [batch, block_table_stride]
  const int* seq_lens;     // [batch]: cached tokens
  const int* cu_seqlens;   // [batch + 1]
  const float* sinks;      // [num_q_heads] or null
  const void* exact;       // [max_seqs, num_kv_heads, 2, sink_tokens + ring_tokens, head_dim]
  const int* lengths;      // [max_seqs, 2]: where the ring begins, and where it ends
  const int* seq_ids;      // [batch] or null: the sequence itself
  void* out;               // as q, but for alignment; if there are splits, float [splits, *q.shape], contiguous
  float* lse;              // [splits, total_tokens, num_q_heads]
  int64_t q_strides[2];    // token, head; in elements
  int64_t k_strides[2];
  int64_t v_strides[2];
  int64_t out_strides[2];
  int batch, total_tokens, num_pages, max_seqs;
  int group;  // query heads of a KV head
  int tiles, splits;
  int block_table_stride, block_table_columns;
  int window_left;  // -1: none
  int sink_tokens, ring_tokens;
  float sm_scale, softcap;  // softcap 0: none
};

template <typename Config>
struct alignas(128) ExtendMemory {
  static constexpr int kRuns = Config::kHeadDim / 32, kPairs = Config::kHeadDim / 16;
  static constexpr int kTileRows = 16 * Config::kRowTiles * Config::kWarps;
  uint8_t record[Config::kRecordBytes];  // of the page that comes next
  uint4 k[8][kRuns][32];                 // [i][r]: of key 8 i + g, channels 32 r + 8 c to 32 r + 8 c + 7
  uint4 v[4][kPairs][32];             // [j][n]: of channels 16 n + g and 16 n + 8 + g, keys 16 j + 2 c + {0, 1, 8, 9}
  uint4 q[kTileRows / 8][kRuns][32];  // as k
  uint64_t barrier;                   // of the record
};

// One sequence's part of a call. Ends of ranges are exclusive.
struct Extension {
  int b, first_row;       // of q, k and v
  int cached, end;        // tokens: those in the cache, and all
  int pages_begin, ring;  // positions of the first token in pages, and of the first after them
  int64_t seq_id;

  __device__ __forceinline__ static int row_of(const ExtendArguments& args, int b) {
    return min(max(args.cu_seqlens[b], 0), args.total_tokens);
  }

  __device__ __forceinline__ Extension(const ExtendArguments& args, int b, bool exact) : b(b), seq_id(b) {
    first_row = row_of(args, b);
    cached = max(args.seq_lens[b], 0);
    end = cached + max(row_of(args, b + 1) - first_row, 0);
    pages_begin = 0, ring = cached;
    if (!exact) return;
    if (args.seq_ids) seq_id = args.seq_ids[b];
    if (seq_id < 0 || seq_id >= args.max_seqs) return;
    pages_begin = min(args.sink_tokens, cached);
    if (args.ring_tokens > 0) ring = max(min(args.lengths[2 * seq_id], cached), pages_begin);
  }
};

// Tiles that come before a sequence's: each takes one more than its rows would fill, at most.
template <typename Config>
__device__ __forceinline__ int first_tile(const ExtendArguments& args, int b) {
  return Extension::row_of(args, b) * args.group / ExtendMemory<Config>::kTileRows + b;
}

// A scale and an offset, for codes that are floats from 128 on.
struct Line {
  float scale, offset;
  __device__ __forceinline__ Line() {}
  template <typename Operand>
  __device__ __forceinline__ static Line of(uint32_t word) {
    Line line;
    line.scale = scale_of<Operand>(word);
    line.offset = fmaf(-128.f, line.scale, offset_of(word));
    return line;
  }
  // The value of the code that is a byte of a word.
  __device__ __forceinline__ float operator()(uint32_t codes, int byte) const {
    return fmaf(scale, __uint_as_float(__byte_perm(codes, 0x43000000u, 0x7044 | byte << 8)), offset);
  }
};

// Tokens [begin, end) of a page's K.
template <typename Config>
__device__ __forceinline__ void widen_k(ExtendMemory<Config>& smem, int begin, int end) {
  using T = typename Config::T;
  using O = Operand<Config, true>;
  constexpr int kRuns = Config::kHeadDim / 32, kRunsOfWord = 4 / O::kBits;
  constexpr uint32_t kMask = O::kLevels * 0x01010101u;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint8_t* const params = smem.record + O::kParams;
#pragma unroll
  for (int first = 0; first < kRuns; first += kRunsOfWord) {
    Line lines[kRunsOfWord][8];
    if constexpr (O::kChannelWise) {
#pragma unroll
      for (int half = 0; half < kRunsOfWord; ++half) {
        if (first + half == kRuns) break;
        uint32_t words[8];
        load_words(words, params + (32 * (first + half) + 8 * c) * 4);
#pragma unroll
        for (int m = 0; m < 8; ++m) lines[half][m] = Line::of<O>(words[m]);
      }
    }
#pragma unroll
    for (int i = warp; i < 8; i += Config::kWarps) {
      const int token = 8 * i + g;
      if (token < begin || token >= end) continue;
      const auto* const row = reinterpret_cast<const uint32_t*>(smem.record + O::kCodes) + token * (kRuns * O::kBits);
      Line own[kRunsOfWord];
      if constexpr (!O::kChannelWise) {
#pragma unroll
        for (int half = 0; half < kRunsOfWord; ++half)
          own[half] = Line::of<O>(*reinterpret_cast<const uint32_t*>(
              params + (min(first + half, kRuns - 1) * 32 / O::kGroupSize * kPageSize + g * 8 + i) * 4));
      }
      // Of 4 bits, channel m is nibble m. Of 2 bits, it is field m % 4 of byte 2 (m / 4), of the first run, or of the
      // byte after it, of the second; an odd number's last run shares a word with another lane's.
      const bool is_last = first + 1 == kRuns;
      uint32_t word;
      if constexpr (O::kBits == 4)
        word = row[c * kRuns + first];
      else
        word = is_last ? row[4 * (kRuns / 2) + c / 2] >> (c % 2 * 8) : row[c * (kRuns / 2) + first / 2];
#pragma unroll
      for (int half = 0; half < (is_last ? 1 : kRunsOfWord); ++half) {
        auto value = [&](int m) {
          const int shift = O::kBits == 4 ? m % 2 * 4 : m % 4 * 2, byte = O::kBits == 4 ? m / 2 : m / 4 * 2 + half;
          return (O::kChannelWise ? lines[half][m] : own[half])(word >> shift & kMask, byte);
        };
        smem.k[i][first + half][lane] = {pack<T>(value(0), value(1)), pack<T>(value(2), value(3)),
                                         pack<T>(value(4), value(5)), pack<T>(value(6), value(7))};
      }
    }
  }
}

// Tokens [begin, end) of a page's V; zeros for others.
template <typename Config>
__device__ __forceinline__ void widen_v(ExtendMemory<Config>& smem, int begin, int end) {
  using T = typename Config::T;
  using O = Operand<Config, false>;
  constexpr int kFields = 8 / O::kBits, kWords = Config::kHeadDim / (8 * kFields);  // a lane's, of 16 tokens
  constexpr int kAtOnce = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1;
  constexpr uint32_t kMask = O::kLevels * 0x01010101u;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint8_t* const params = smem.record + O::kParams;
#pragma unroll 1
  for (int j = warp; j < 4; j += Config::kWarps) {
    // A word's bytes are tokens 0, 8, 1 and 9, from 16 j + 2 c on; its fields channels 8 apart.
    bool present[4];
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const int token = 16 * j + 2 * c + byte / 2 + byte % 2 * 8;
      present[byte] = begin <= token && token < end;
    }
    Line lines[4];
#pragma unroll
    for (int start = 0; start < kWords; start += kAtOnce) {
      uint32_t words[kAtOnce];
      const int number = j * kWords + start;
      load_words(words, smem.record + O::kCodes + number / 4 * 512 + lane * 16 + number % 4 * 4);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int octet = (start + i) * kFields;  // the first of the word's
        if (!O::kChannelWise && octet * 8 % O::kGroupSize == 0) {
          const uint8_t* const own = params + (octet * 8 / O::kGroupSize * kPageSize + 2 * c * 8 + 2 * j) * 4;
#pragma unroll
          for (int second = 0; second < 2; ++second) {
            uint32_t pair[2];
            load_words(pair, own + second * 32);
            lines[2 * second] = Line::of<O>(pair[0]), lines[2 * second + 1] = Line::of<O>(pair[1]);
          }
        }
#pragma unroll
        for (int f = 0; f < kFields; f += 2) {
          uint32_t operand[4];
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            if constexpr (O::kChannelWise) {
              const int place = g * (Config::kHeadDim / 8) + octet + f + odd;
              lines[0] = Line::of<O>(*reinterpret_cast<const uint32_t*>(params + place * 4));
              lines[1] = lines[2] = lines[3] = lines[0];
            }
            const uint32_t codes = words[i] >> ((f + odd) * O::kBits) & kMask;
            auto value = [&](int byte) { return present[byte] ? lines[byte](codes, byte) : 0.f; };
            operand[2 * odd] = pack<T>(value(0), value(2)), operand[2 * odd + 1] = pack<T>(value(1), value(3));
          }
          smem.v[j][(octet + f) / 2][lane] = {operand[0], operand[1], operand[2], operand[3]};
        }
      }
    }
  }
}

// The keys and values of one column that are not [begin, end) of its page: exact ones, new ones, and zeros.
template <typename Config>
__device__ __forceinline__ void copy_tokens(const ExtendArguments& args, ExtendMemory<Config>& smem,
                                            const Extension& extension, int head, int column, int begin, int end) {
  using T = typename Config::T;
  constexpr int kVectors = Config::kHeadDim / 8, kThreads = 32 * Config::kWarps;
  auto is_paged = [&](int token) { return begin <= token && token < end; };
  auto load = [&](int operand, int token, int vector) -> uint4 {
    const int position = column * kPageSize + token;
    if (position >= extension.end || (position >= extension.pages_begin && position < extension.ring))
      return {0, 0, 0, 0};
    const T* row;
    if (position >= extension.cached)
      row = static_cast<const T*>(operand ? args.v : args.k) +
            new_offset(args, extension.first_row + position - extension.cached, head, operand);
    else
      row = static_cast<const T*>(args.exact) + exact_offset<Config>(args, extension.seq_id, head, operand, position);
    return reinterpret_cast<const uint4*>(row)[vector];
  };
  for (int i = threadIdx.x; i < kPageSize * kVectors; i += kThreads) {
    const int token = i / kVectors, vector = i % kVectors;
    if (!is_paged(token)) smem.k[token / 8][vector / 4][token % 8 * 4 + vector % 4] = load(0, token, vector);
  }
  // Two tokens of V share words, so that 8 pairs and 4 vectors, a warp's, fall into different banks.
  for (int i = threadIdx.x; i < kPageSize / 2 * kVectors; i += kThreads) {
    const int pair = i / (8 * kVectors) * 8 + i % 8, vector = i / 8 % kVectors, token = 2 * pair;
    const bool first = !is_paged(token), second = !is_paged(token + 1);
    if (!first && !second) continue;
    const uint4 low = first ? load(1, token, vector) : uint4{0, 0, 0, 0};
    const uint4 high = second ? load(1, token + 1, vector) : uint4{0, 0, 0, 0};
    const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      uint4& place = smem.v[pair / 8][vector / 2][g * 4 + pair % 4];
      uint32_t& word = reinterpret_cast<uint32_t*>(&place)[vector % 2 * 2 + pair % 8 / 4];
      const uint32_t both = __byte_perm(lows[g / 2], highs[g / 2], g % 2 ? 0x7632 : 0x5410);
      if (first && second)
        word = both;
      else
        reinterpret_cast<uint16_t*>(&word)[second] = static_cast<uint16_t>(second ? both >> 16 : both);
    }
  }
}

// Scores in powers of two for one of a product: positive, so that maxima may be taken of products. Where sm_scale is
// negative, the query is.
__device__ __forceinline__ float score_unit(const ExtendArguments& args) {
  return fmaxf(fabsf(args.sm_scale), 1e-30f) * kLog2e;
}

// What a warp accumulates of its rows: 16 m + g and 16 m + 8 + g. Maxima are in powers of two.
template <typename Config>
struct Rows {
  static constexpr int kOctets = Config::kHeadDim / 8, kTiles = Config::kRowTiles;
  float o[kTiles][kOctets][4];
  float max[kTiles][2], sum[kTiles][2];  // the sum is of this lane's keys only
  int position[kTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0.f;
      max[m][0] = max[m][1] = kNoMax;
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  // Attends to 64 keys.
  __device__ __forceinline__ void attend(const ExtendArguments& args, const ExtendMemory<Config>& smem, int first_key,
                                         bool masked) {
    using T = typename Config::T;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane % 4;
    float s[kTiles][8][4] = {};
#pragma unroll
    for (int run = 0; run < Config::kHeadDim / 32; ++run) {
      uint4 a[kTiles][2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) a[m][half] = smem.q[(warp * kTiles + m) * 2 + half][run][lane];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint4 b = smem.k[i][run][lane];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_m16n8k16<Config::kBf16>(s[m][i], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, b.x, b.y);
          mma_m16n8k16<Config::kBf16>(s[m][i], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, b.z, b.w);
        }
      }
    }
    // Conditions that a warp shares stand around whole loops: what is not asked for takes no instructions.
    float unit = score_unit(args);
    if (args.softcap > 0.f) {
#pragma unroll
      for (int n = 0; n < kTiles * 32; ++n) {
        float& score = s[n / 32][n / 4 % 8][n % 4];
        score = soft_cap(args.softcap, score * unit);
      }
      unit = 1.f;
    }
    if (masked) {  // whatever the score of a key that is not seen, it is replaced here
#pragma unroll
      for (int n = 0; n < kTiles * 32; ++n) {
        const int e = n % 4, key = first_key + 8 * (n / 4 % 8) + 2 * c + e % 2, last = position[n / 32][e / 2];
        if (key > last || (args.window_left >= 0 && key < last - args.window_left))
          s[n / 32][n / 4 % 8][e] = -CUDART_INF_F;
      }
    }
    uint32_t p[kTiles][8][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      float top[2] = {s[m][0][0], s[m][0][2]}, raised[2];
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[m][i][e]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
          top[half] = fmaxf(top[half], __shfl_xor_sync(kAllLanes, top[half], lanes));
        raised[half] = fmaxf(max[m][half], top[half] * unit);
      }
      // After a few pages, hardly any maximum rises.
      if (__any_sync(kAllLanes, raised[0] > max[m][0] || raised[1] > max[m][1])) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float keep = ex2(max[m][half] - raised[half]);
          max[m][half] = raised[half];
          sum[m][half] *= keep;
#pragma unroll
          for (int n = 0; n < kOctets; ++n) o[m][n][2 * half] *= keep, o[m][n][2 * half + 1] *= keep;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float low = ex2(fmaf(s[m][i][2 * half], unit, -raised[half]));
          const float high = ex2(fmaf(s[m][i][2 * half + 1], unit, -raised[half]));
          sum[m][half] += low + high;
          p[m][i][half] = pack<T>(low, high);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int n = 0; n < kOctets / 2; ++n) {
        const uint4 b = smem.v[j][n][lane];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const uint32_t (&first)[2] = p[m][2 * j], (&second)[2] = p[m][2 * j + 1];
          mma_m16n8k16<Config::kBf16>(o[m][2 * n], first[0], first[1], second[0], second[1], b.x, b.y);
          mma_m16n8k16<Config::kBf16>(o[m][2 * n + 1], first[0], first[1], second[0], second[1], b.z, b.w);
        }
      }
  }
};

template <typename Config>
__device__ __forceinline__ void extend(const ExtendArguments& args) {
  extern __shared__ __align__(128) uint8_t memory[];
  using Memory = ExtendMemory<Config>;
  using T = typename Config::T;
  auto& smem = *reinterpret_cast<Memory*>(memory);
  static_assert(sizeof(smem) == Config::kSharedBytes, "what the host asks for");
  constexpr int kVectors = Config::kHeadDim / 8, kTileRows = Memory::kTileRows, kTiles = Config::kRowTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  griddepcontrol_wait();

  // Rows at the end see most keys: they come first.
  const int head = blockIdx.x % Config::kKVHeads, rest = blockIdx.x / Config::kKVHeads;
  const int split = rest % args.splits, tile = args.tiles - 1 - rest / args.splits;
  const int b = last_begun(args.batch, tile, [&](int b) { return first_tile<Config>(args, b); });
  const Extension extension(args, b, Config::kExact);
  const int first_row = (tile - first_tile<Config>(args, b)) * kTileRows;
  const int rows = (extension.end - extension.cached) * args.group;
  if (first_row < 0 || first_row >= rows) return;
  auto position_of = [&](int row) { return extension.cached + min(row, rows - 1) / args.group; };
  const int first_position = position_of(first_row), last_position = position_of(first_row + kTileRows - 1);

  const int begin = args.window_left < 0 ? 0 : max(first_position - args.window_left, 0) / kPageSize;
  const int columns = last_position / kPageSize + 1 - begin, share = (columns + args.splits - 1) / args.splits;
  const int stop = begin + min((split + 1) * share, columns);
  int column = begin + split * share;

  // A column's page, or -1.
  auto page_of = [&](int column) {
    const int first = column * kPageSize;
    if (column >= stop || column >= args.block_table_columns) return -1;
    if (first >= extension.ring || first + kPageSize <= extension.pages_begin) return -1;
    const int page = args.block_table[b * static_cast<int64_t>(args.block_table_stride) + column];
    return page < args.num_pages ? page : -1;
  };
  const uint32_t barrier = smem_address(&smem.barrier);
  auto fetch = [&](int page) {
    if (page < 0 || threadIdx.x != 0) return;
    mbarrier_arrive_expect_tx(barrier, Config::kRecordBytes);
    cp_async_bulk(smem_address(smem.record),
                  args.pages + (static_cast<int64_t>(page) * Config::kKVHeads + head) * Config::kRecordBytes,
                  Config::kRecordBytes, barrier, kEvictNormal);
  };
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  int page = page_of(column), phase = 0;
  fetch(page);

  auto q_row = [&](int row) {
    return static_cast<const T*>(args.q) + (extension.first_row + row / args.group) * args.q_strides[0] +
           (head * args.group + row % args.group) * args.q_strides[1];
  };
  const uint32_t sign = args.sm_scale < 0.f ? 0x80008000u : 0u;
  for (int i = threadIdx.x; i < kTileRows * kVectors; i += 32 * Config::kWarps) {
    const int row = i / kVectors, vector = i % kVectors;
    uint4& place = smem.q[row / 8][vector / 4][row % 8 * 4 + vector % 4];
    place = first_row + row < rows ? reinterpret_cast<const uint4*>(q_row(first_row + row))[vector] : uint4{0, 0, 0, 0};
    place.x ^= sign, place.y ^= sign, place.z ^= sign, place.w ^= sign;
  }
  const int own_row = first_row + warp * 16 * kTiles;  // the first of the warp's
  Rows<Config> state;
  state.clear();
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) state.position[m][half] = position_of(own_row + 16 * m + 8 * half + g);
  __syncthreads();

#pragma unroll 1
  for (; column < stop; ++column) {
    const int next = page_of(column + 1), first_key = column * kPageSize;
    int paged_begin = 0, paged_end = 0;
    if (page >= 0) {
      paged_begin = max(extension.pages_begin - first_key, 0), paged_end = min(extension.ring - first_key, kPageSize);
      mbarrier_wait(barrier, phase);
      phase ^= 1;
      widen_k(smem, paged_begin, paged_end);
      widen_v(smem, paged_begin, paged_end);
    }
    if (paged_end - paged_begin < kPageSize) {
      if (page >= 0) __syncthreads();  // they may share a word
      copy_tokens(args, smem, extension, head, column, paged_begin, paged_end);
    }
    __syncthreads();
    page = next;
    fetch(page);
    const bool masked = first_key + kPageSize - 1 > first_position ||
                        (args.window_left >= 0 && first_key < last_position - args.window_left);
    if (own_row < rows) state.attend(args, smem, first_key, masked);
    __syncthreads();
  }

  const int64_t of_split = static_cast<int64_t>(split) * args.total_tokens;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half], max = state.max[m][half];
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
      const int row = own_row + 16 * m + 8 * half + g;
      if (row >= rows) continue;
      const int64_t token = extension.first_row + row / args.group;
      const int q_head = head * args.group + row % args.group;
      float factor = sum == 0.f ? 0.f : __fdividef(1.f, sum);
      if (args.sinks && split == 0) {
        const float sink = args.sinks[q_head] * kLog2e, raised = fmaxf(max, sink), keep = ex2(max - raised);
        sum = fmaf(sum, keep, ex2(sink - raised));
        factor = __fdividef(keep, sum);
        max = raised;
      }
      if (c == 0)
        args.lse[(of_split + token) * (Config::kKVHeads * args.group) + q_head] =
            sum == 0.f ? -CUDART_INF_F : (max + lg2(sum)) * kLn2;
      const int64_t place = token * args.out_strides[0] + q_head * args.out_strides[1] + 2 * c;
      if (args.splits == 1) {
        T* const out = static_cast<T*>(args.out) + place;
#pragma unroll
        for (int n = 0; n < Rows<Config>::kOctets; ++n)
          *reinterpret_cast<uint32_t*>(out + 8 * n) =
              pack<T>(state.o[m][n][2 * half] * factor, state.o[m][n][2 * half + 1] * factor);
      } else {
        float* const out = static_cast<float*>(args.out) + of_split * args.out_strides[0] + place;
#pragma unroll
        for (int n = 0; n < Rows<Config>::kOctets; ++n)
          *reinterpret_cast<float2*>(out + 8 * n) = {state.o[m][n][2 * half] * factor,
                                                     state.o[m][n][2 * half + 1] * factor};
      }
    }
}

}  // namespace foscar
