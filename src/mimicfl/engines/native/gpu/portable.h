// A program for one thread block, written as phases of independent items. On a GPU the block's threads share the items of a phase; on a
// CPU one thread computes them in order, so that the program can be tested without a GPU.
#ifdef __CUDACC_RTC__  // the runtime compiler has no standard headers
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif
#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define EACH(item, count) for (int item = threadIdx.x; item < (count); item += THREADS)
#define SYNC __syncthreads()
#define UNROLL _Pragma("unroll")
#define LOOP _Pragma("unroll 1")
#else
#include <cmath>
#include <cstring>
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define EACH(item, count) for (int item = 0; item < (count); item++)
#define SYNC
#define UNROLL
#define LOOP
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uchar4 { unsigned char x, y, z, w; };
#endif

// Memory that is used once per step should not drive the rest out of the cache.
#ifdef __CUDACC__
DEVICE float load_once(const float* p) { return __ldcs(p); }
DEVICE void store_once(float* p, float x) { __stcs(p, x); }
template <class T>
DEVICE T load_once(const T* p) {
  T x;
  if constexpr (sizeof(T) == 16) *(float4*)&x = __ldcs((const float4*)p);
  else if constexpr (sizeof(T) == 4) *(unsigned*)&x = __ldcs((const unsigned*)p);
  else x = *p;
  return x;
}
#else
template <class T>
DEVICE T load_once(const T* p) { return *p; }
DEVICE void store_once(float* p, float x) { *p = x; }
#endif

// Loads N floats from an address that is aligned to a multiple of N floats, as far as N is 2 or 4.
template <int N>
DEVICE void load(const float* p, float (&x)[N]) {
  if constexpr (N % 4 == 0) {
    UNROLL for (int i = 0; i < N; i += 4) {
      const float4 q = *(const float4*)(p + i);
      x[i] = q.x, x[i + 1] = q.y, x[i + 2] = q.z, x[i + 3] = q.w;
    }
  } else if constexpr (N % 2 == 0) {
    UNROLL for (int i = 0; i < N; i += 2) {
      const float2 q = *(const float2*)(p + i);
      x[i] = q.x, x[i + 1] = q.y;
    }
  } else {
    UNROLL for (int i = 0; i < N; i++) x[i] = p[i];
  }
}

// Sums each of N values over the LANES items of consecutive lanes, which all call it; store(j, sum) is called once per value.
#ifdef __CUDACC__
template <int OFFSET, int N, class Store>
DEVICE void fold(const float (&a)[N], int lane, unsigned mask, int begin, int end, Store store) {
  if constexpr (OFFSET == 0) {
    UNROLL for (int j = 0; j < N; j++)
      if (begin + j < end) store(begin + j, a[j]);
  } else {  // the two halves of the lanes exchange halves of the values: about N exchanges in total, not N per step
    constexpr int HALF = (N + 1) / 2;
    const bool upper = lane & OFFSET;
    float b[HALF];
    UNROLL for (int j = 0; j < HALF; j++) {
      const float other = HALF + j < N ? a[HALF + j < N ? HALF + j : 0] : 0.f;
      b[j] = (upper ? other : a[j]) + __shfl_xor_sync(mask, upper ? a[j] : other, OFFSET);
    }
    const int middle = begin + HALF < end ? begin + HALF : end;
    fold<OFFSET / 2>(b, lane, mask, upper ? middle : begin, upper ? end : middle, store);
  }
}
template <int N, class Store>
DEVICE void lane_sums(const float (&a)[N], int lane, Store store) {
  const unsigned mask = LANES == 32 ? 0xffffffffu : ((1u << (LANES % 32)) - 1) << (threadIdx.x & (32 - LANES));
  fold<LANES / 2>(a, lane, mask, 0, N, store);
}
#else
template <int N, class Store>
DEVICE void lane_sums(const float (&a)[N], int lane, Store store) {
  static thread_local float sum[N];
  for (int j = 0; j < N; j++) sum[j] = lane ? sum[j] + a[j] : a[j];
  for (int j = 0; j < N && lane == LANES - 1; j++) store(j, sum[j]);
}
#endif

// Groups of channels are padded to a size that vector loads can read.
DEVICE constexpr int pad(int n) { return n == 3 ? 4 : n == 5 ? 6 : n == 7 ? 8 : n; }
