// The kernels' PTX layer for a CPU: every CUDA thread is a fiber. What a warp does together is a rendezvous of its 32
// fibers; what is asynchronous happens as late as it may, when it is waited for, and is poison until then.
#pragma once

#include <ucontext.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, gridDim;

namespace emulator {

constexpr int kWarp = 32, kStackBytes = 128 << 10, kMaxWords = 6;

struct Words {
  unsigned word[kMaxWords];
};

// A meeting of fibers. Two sets of words alternate: nobody is more than one meeting ahead.
struct Meeting {
  int members = 0, arrived = 0, number = 0;
  const char* purpose = nullptr;
  Words words[2][kWarp];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false, waited = false;  // waited: for earlier launches; nothing but lengths is touched before
  const char* waits_for = "";
  std::vector<std::function<void()>> copies;  // cp.async
};

struct Barrier {
  int count = 0, pending = 0, bytes = 0, phase = 0;
  std::vector<std::function<int()>> copies;  // bulk copies; each returns how many bytes it was
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting cta;
inline std::map<uint32_t, Barrier> barriers;
inline bool progress;

[[noreturn]] inline void fail(const char* reason, const char* detail) {
  std::fprintf(stderr, "CTA %u, thread %u: %s: %s\n", blockIdx.x, threadIdx.x, reason, detail);
  std::abort();
}

inline void check_waited(const char* instruction) {
  if (!fibers[threadIdx.x].waited) fail("earlier launches may still write", instruction);
}

inline void wait_until(const char* reason, const std::function<bool()>& ready) {
  while (!ready()) {
    Fiber& self = fibers[threadIdx.x];
    self.waits_for = reason;
    swapcontext(&self.context, &scheduler);
  }
  progress = true;
}

inline const Words* meet(Meeting& meeting, const char* purpose, int place, const Words& words) {
  const int number = meeting.number;
  if (meeting.arrived == 0) meeting.purpose = purpose;
  if (std::strcmp(meeting.purpose, purpose)) fail("threads diverge", purpose);
  if (place < kWarp) meeting.words[number % 2][place] = words;
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    ++meeting.number;
    progress = true;
  } else {
    wait_until(purpose, [&] { return meeting.number != number; });
  }
  return meeting.words[number % 2];
}

inline const Words* meet_warp(const char* purpose, const Words& words = {}) {
  return meet(warps[threadIdx.x / kWarp], purpose, threadIdx.x % kWarp, words);
}

// Runs a kernel, CTA by CTA.
inline void launch(int grid, int threads, uint8_t* shared, size_t shared_bytes, const std::function<void()>& kernel) {
  static const std::function<void()>* body;
  body = &kernel;
  gridDim.x = grid;
  for (int block = 0; block < grid; ++block) {
    blockIdx.x = block;
    std::memset(shared, 0xff, shared_bytes);
    barriers.clear();
    warps.assign(threads / kWarp, {});
    for (Meeting& warp : warps) warp.members = kWarp;
    cta = {};
    cta.members = threads;
    fibers.clear();
    fibers.resize(threads);
    for (Fiber& fiber : fibers) {
      fiber.stack.reset(new char[kStackBytes]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler;
      makecontext(
          &fiber.context,
          +[] {
            (*body)();
            fibers[threadIdx.x].done = true;
            progress = true;
          },
          0);
    }
    for (int left = threads; left > 0;) {
      progress = false;
      left = 0;
      for (threadIdx.x = 0; threadIdx.x < fibers.size(); ++threadIdx.x) {
        if (fibers[threadIdx.x].done) continue;
        swapcontext(&scheduler, &fibers[threadIdx.x].context);
        left += !fibers[threadIdx.x].done;
      }
      if (left > 0 && !progress) {
        threadIdx.x =
            std::find_if(fibers.begin(), fibers.end(), [](const Fiber& f) { return !f.done; }) - fibers.begin();
        fail("deadlock, waiting for", fibers[threadIdx.x].waits_for);
      }
    }
  }
}

}  // namespace emulator

inline void __syncwarp() { emulator::meet_warp("syncwarp"); }
inline void __syncthreads() { emulator::meet(emulator::cta, "syncthreads", emulator::kWarp, {}); }
template <typename T>
T __shfl_sync(unsigned, T x, int source) {
  return bit_cast<T>(emulator::meet_warp("shfl", {{bit_cast<unsigned>(x)}})[source & 31].word[0]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes) {
  return __shfl_sync(mask, x, threadIdx.x % 32 ^ lanes);
}
inline bool __shfl_sync(unsigned mask, bool x, int source) { return __shfl_sync(mask, static_cast<int>(x), source); }
template <typename T>
T __shfl_up_sync(unsigned mask, T x, int lanes) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(mask, x, lane < lanes ? lane : lane - lanes);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const auto* words = emulator::meet_warp("ballot", {{x}});
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= words[i].word[0] << i;
  return result;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }

namespace foscar {

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

alignas(128) inline uint8_t memory[227 << 10];  // shared memory

inline uint32_t smem_address(const void* pointer) {
  const auto offset = static_cast<const uint8_t*>(pointer) - memory;
  if (offset < 0 || offset >= static_cast<int64_t>(sizeof memory))
    emulator::fail("outside of shared memory", "address");
  return static_cast<uint32_t>(offset);
}

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  emulator::barriers[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals)};
}
inline void fence_mbarrier_init() {}
inline void compiler_fence() {}
inline void griddepcontrol_wait() { emulator::fibers[threadIdx.x].waited = true; }
inline void griddepcontrol_launch_dependents() {}

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  auto& state = emulator::barriers.at(barrier);
  if (state.pending == 0) emulator::fail("one arrival too many", "mbarrier");
  --state.pending;
  state.bytes += bytes;
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_until("mbarrier", [&] {
    auto& state = emulator::barriers.at(barrier);
    if ((state.phase & 1) != static_cast<int>(parity)) return true;
    for (const auto& copy : state.copies) state.bytes -= copy();
    state.copies.clear();
    if (state.pending > 0 || state.bytes != 0) return false;
    state.pending = state.count;
    ++state.phase;
    return true;
  });
}
constexpr uint64_t kEvictFirst = 1, kEvictNormal = 2;
inline void cp_async_bulk(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t) {
  emulator::check_waited("bulk copy");
  if (destination % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16)
    emulator::fail("not aligned", "bulk copy");
  std::memset(memory + destination, 0xff, bytes);
  emulator::barriers.at(barrier).copies.push_back([=] {
    std::memcpy(memory + destination, source, bytes);
    return static_cast<int>(bytes);
  });
}
inline void copy_later(const char* name, uint32_t destination, const void* source, int bytes) {
  emulator::check_waited(name);
  if (destination % bytes || reinterpret_cast<uintptr_t>(source) % bytes) emulator::fail("not aligned", name);
  std::memset(memory + destination, 0xff, bytes);
  emulator::fibers[threadIdx.x].copies.push_back([=] { std::memcpy(memory + destination, source, bytes); });
}
inline void cp_async_4(uint32_t destination, const void* source) { copy_later("cp.async", destination, source, 4); }
inline void cp_async_16(uint32_t destination, const void* source) { copy_later("cp.async", destination, source, 16); }
inline void cp_async_wait_all() {
  for (const auto& copy : emulator::fibers[threadIdx.x].copies) copy();
  emulator::fibers[threadIdx.x].copies.clear();
}
// CTAs run one after the other: what is not there yet never will be.
inline float4 ld_relaxed(const float4* source) {
  for (const float word : {source->x, source->y, source->z, source->w})
    if (bit_cast<unsigned>(word) == ~0u) emulator::fail("awaits what no CTA has left", "ld.relaxed");
  return *source;
}
// What earlier launches may still change is something else in most CTAs.
inline int ld_relaxed(const int* source) {
  const int other[] = {*source, *source + 77, -12345, INT_MAX};
  return emulator::fibers[threadIdx.x].waited ? *source : other[blockIdx.x % 4];
}
inline void st_relaxed(float4* destination, const float4& value) {
  emulator::check_waited("st.relaxed");
  *destination = value;
}

// Half of a word as a float.
template <bool kBf16>
float element(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(word >> 16 * half);
  if (kBf16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  return bit_cast<_Float16>(bits);
}

// D += A B for A of 16 rows, words 0 to 3 of a lane, and B of 8 columns, words 4 and 5; k is cut into words of
// kPerWord.
template <typename T, int kWords, int kPerWord, typename Get>
void multiply(const char* name, T (&d)[4], const emulator::Words& own, Get get) {
  const auto* words = emulator::meet_warp(name, own);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int part = 0; part < kWords; ++part)
      for (int c = 0; c < 4; ++c)
        for (int k = 0; k < kPerWord; ++k)
          sum += get(words[row % 8 * 4 + c].word[row / 8 + 2 * part], words[column * 4 + c].word[4 + part], k);
    d[i] = static_cast<T>(sum);
  }
}
template <bool kBf16 = false>
void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply<float, 2, 2>("mma.m16n8k16", d, {{a0, a1, a2, a3, b0, b1}}, [](uint32_t a, uint32_t b, int k) {
    return static_cast<double>(element<kBf16>(a, k)) * element<kBf16>(b, k);
  });
}
template <bool kBf16 = false>
void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  multiply<float, 1, 2>("mma.m16n8k8", d, {{a0, a1, 0, 0, b0, 0}}, [](uint32_t a, uint32_t b, int k) {
    return static_cast<double>(element<kBf16>(a, k)) * element<kBf16>(b, k);
  });
}
inline void mma_m16n8k32(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply<int, 2, 4>("mma.m16n8k32", d, {{a0, a1, a2, a3, b0, b1}}, [](uint32_t a, uint32_t b, int k) {
    return static_cast<double>(static_cast<uint8_t>(a >> 8 * k)) * static_cast<int8_t>(b >> 8 * k);
  });
}
inline uint32_t halves_of_words(const emulator::Words* words, int first, int second, int half) {
  return (words[first].word[0] >> 16 * half & 0xffff) | (words[second].word[0] >> 16 * half & 0xffff) << 16;
}
inline uint32_t movmatrix_trans(uint32_t x) {
  const auto* words = emulator::meet_warp("movmatrix", {{x}});
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  return halves_of_words(words, 8 * c + g / 2, 8 * c + 4 + g / 2, g % 2);
}
inline void load_matrices(uint32_t (&d)[4], uint32_t address, bool transposed) {
  const auto* words = emulator::meet_warp("ldmatrix", {{address}});
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  auto value = [&](int matrix, int row, int column) {
    uint16_t bits;
    std::memcpy(&bits, memory + words[8 * matrix + row].word[0] + 2 * column, 2);
    return static_cast<uint32_t>(bits);
  };
  for (int i = 0; i < 4; ++i)
    d[i] = transposed ? value(i, 2 * c, g) | value(i, 2 * c + 1, g) << 16
                      : value(i, g, 2 * c) | value(i, g, 2 * c + 1) << 16;
}
inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) { load_matrices(d, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) { load_matrices(d, address, true); }

inline float ex2(float x) { return x < -126.f ? 0.f : exp2f(x); }
inline float lg2(float x) { return log2f(x); }
inline float rcp(float x) { return __fdividef(1.f, x); }

}  // namespace foscar
