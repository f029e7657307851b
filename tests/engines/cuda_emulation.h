// Runs a block of CUDA threads on threads of the CPU, so that kernels can be tested without a GPU. Blocks run one after another.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
#define __align__(n)

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct ushort4 { unsigned short x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) { return {x, y, z, w}; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int min(int x, int y) { return x < y ? x : y; }

struct Index { int x; };
thread_local Index threadIdx, blockIdx;
thread_local std::barrier<>* of_block;
struct Warp {
    std::barrier<> together{32};
    float a[32][4], b[32][2], value[32];
};
thread_local Warp* of_warp;
static std::vector<char> emulated_shared;

inline void __syncthreads() { of_block->arrive_and_wait(); }
inline void __syncwarp() { of_warp->together.arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float x, int mask) {
    int lane = threadIdx.x % 32;
    of_warp->value[lane] = x;
    __syncwarp();
    float y = of_warp->value[lane ^ mask];
    __syncwarp();
    return y;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    of_warp->value[threadIdx.x % 32] = x;
    __syncwarp();
    unsigned hits = 0;
    for (int n = 0; n < 32; ++n) hits |= (of_warp->value[n] != 0) << n;
    __syncwarp();
    return hits;
}

// What the kernels write as assembly.
inline void copy(float* to, const float* from, bool here, bool wide) {
    for (int n = 0; n < (wide ? 4 : 1); ++n) to[n] = here ? from[n] : 0.0f;
}
inline void commit() {}
inline void arrived() {}
inline unsigned short narrowed(float x) {
    unsigned bits = __float_as_uint(x);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void mma(float* c, const unsigned* a, const unsigned* b) {
    int lane = threadIdx.x % 32;
    for (int n = 0; n < 4; ++n) of_warp->a[lane][n] = __uint_as_float(a[n] & 0xffffe000u);
    for (int n = 0; n < 2; ++n) of_warp->b[lane][n] = __uint_as_float(b[n] & 0xffffe000u);
    __syncwarp();
    for (int n = 0; n < 4; ++n) {
        int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
        for (int k = 0; k < 8; ++k) c[n] += of_warp->a[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2] * of_warp->b[column * 4 + k % 4][k / 4];
    }
    __syncwarp();
}

template <class Kernel>
void run(int blocks, int threads, int shared, Kernel kernel) {
    emulated_shared.assign(shared + 16, (char)0xff);  // not a number, so that reading what nobody wrote shows
    for (int block = 0; block < blocks; ++block) {
        std::barrier<> together(threads);
        std::vector<std::unique_ptr<Warp>> warps;
        for (int n = 0; n < threads / 32; ++n) warps.push_back(std::make_unique<Warp>());
        std::vector<std::thread> running;
        for (int n = 0; n < threads; ++n)
            running.emplace_back([&, n] {
                threadIdx.x = n, blockIdx.x = block, of_block = &together, of_warp = warps[n / 32].get();
                kernel();
                together.arrive_and_drop();
            });
        for (auto& each : running) each.join();
    }
}
