// Layers with the samples of a batch in the lanes of a vector: activation [channel][y][x] is a vector of LANES samples.
// Every loop then runs over whole vectors, whatever the layer's shape, and one broadcast weight is used for LANES samples.
// Weights keep PyTorch's order (conv OIHW, linear OI). Shapes are template arguments, hence constants for the compiler.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <vector>

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#elif defined(__ARM_NEON) || defined(__SSE2__)
#define LANES 4
#else
#define LANES 1
#endif
#endif

#if LANES == 1
typedef float v;
typedef int32_t vi;
#else
typedef float v __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
#endif

// Number of accumulators that fit into the register file next to the loaded values: 32 registers on AVX-512 and NEON, 16 elsewhere.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int ROOM = 24;
#else
constexpr int ROOM = 12;
#endif

#define UNROLL _Pragma("GCC unroll 32")

static inline v splat(float s) { return v{} + s; }
static inline v load(const float* p) { v a; memcpy(&a, p, sizeof(v)); return a; }
static inline void store(float* p, v a) { memcpy(p, &a, sizeof(v)); }
static inline float sum_lanes(v a) {
  float x[LANES];
  memcpy(x, &a, sizeof(v));
  UNROLL for (int half = LANES / 2; half >= 1; half /= 2) { UNROLL for (int i = 0; i < half; i++) x[i] += x[i + half]; }
  return x[0];
}

// Transposes LANES vectors: lane j of vector i becomes lane i of vector j. Butterfly network: each stage swaps blocks of D lanes.
#if LANES > 1 && !defined(__clang__)
template <int D>
static inline void turn_stage(v* r) {
  vi low, high;
  UNROLL for (int l = 0; l < LANES; l++) { low[l] = l & D ? LANES + l - D : l; high[l] = l & D ? LANES + l : l + D; }
  UNROLL for (int i = 0; i < LANES; i++) {
    if (i & D) continue;
    const v a = r[i], b = r[i + D];
    r[i] = __builtin_shuffle(a, b, low);
    r[i + D] = __builtin_shuffle(a, b, high);
  }
}
static inline void turn(v* r) {
  if constexpr (LANES > 8) turn_stage<8>(r);
  if constexpr (LANES > 4) turn_stage<4>(r);
  if constexpr (LANES > 2) turn_stage<2>(r);
  turn_stage<1>(r);
}
#else
static inline void turn(v* r) {
  float a[LANES][LANES], b[LANES][LANES];
  memcpy(a, r, sizeof(a));
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) b[j][i] = a[i][j];
  memcpy(r, b, sizeof(b));
}
#endif

// Allocates zeroed memory for `release`; returns null on failure. calloc: pages that are never used cost nothing.
static void* room(size_t bytes) {
  void* whole = calloc(1, bytes + 128);
  if (!whole) return nullptr;
  void** p = (void**)(((uintptr_t)whole + 127) / 64 * 64);
  p[-1] = whole;
  return p;
}
static void release(void* p) {
  if (p) free(((void**)p)[-1]);
}

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int64_t least64(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }
// Block size for n items, at most `limit`: a divisor of n if a fairly large one exists.
constexpr int block(int n, int limit) {
  if (n <= limit) return n;
  for (int b = limit; 2 * b > limit; b--) if (n % b == 0) return b;
  return limit;
}
constexpr size_t largest(std::initializer_list<size_t> sizes) {
  size_t m = 0;
  for (size_t s : sizes) m = s > m ? s : m;
  return m;
}
// Vectors that n numbers take.
constexpr int vectors(int n) { return (n + LANES - 1) / LANES; }
