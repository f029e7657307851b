// The update of all lanes by SGD, in one pass over memory: h = gradient + shift + mu (w - w_t); g += h; w = w_t - eta g. Since w follows
// from g and w_t, it is never read, and w_t is stored once for all lanes that start from it. Constants are defined before this code: COUNT
// pieces of gradients; whether GRADIENT is bfloat16; whether there is a SHIFT and a proximal term (PROX); whether the model reads HALF, a
// bfloat16 copy, instead of w. Finished lanes do not change.

constexpr int THREADS = 256, TURNS = 4, CHUNK = 4 * THREADS * TURNS;

struct Piece {
    const void* h;  // [lanes, size] with adjacent entries
    long long row;
    int begin, size, first, wide;  // first chunk; wide: whether four entries can be read at once
};
struct Pieces { Piece each[COUNT]; };
struct Vectors {
    float *w, *g;
    unsigned short* half;
    const float *shift, *start;
    const long long *origin, *k, *steps;  // origin: the row of w_t
    const float *eta, *mu;
    long long row;
    int lanes;
};

__device__ inline float widened(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
__device__ inline unsigned short narrowed(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

template <int N> struct Group { float x[N]; };

template <int N>
__device__ inline Group<N> read(const float* from) {
    Group<N> to;
    if constexpr (N == 4) { float4 v = *(const float4*)from; to.x[0] = v.x, to.x[1] = v.y, to.x[2] = v.z, to.x[3] = v.w; }
    else to.x[0] = *from;
    return to;
}
template <int N>
__device__ inline Group<N> read(const unsigned short* from) {
    Group<N> to;
    if constexpr (N == 4) {
        ushort4 v = *(const ushort4*)from;
        to.x[0] = widened(v.x), to.x[1] = widened(v.y), to.x[2] = widened(v.z), to.x[3] = widened(v.w);
    } else to.x[0] = widened(*from);
    return to;
}
template <int N>
__device__ inline void write(float* to, const Group<N>& from) {
    if constexpr (N == 4) *(float4*)to = make_float4(from.x[0], from.x[1], from.x[2], from.x[3]);
    else *to = from.x[0];
}
template <int N>
__device__ inline void write(unsigned short* to, const Group<N>& from) {
    if constexpr (N == 4) *(ushort4*)to = make_ushort4(narrowed(from.x[0]), narrowed(from.x[1]), narrowed(from.x[2]), narrowed(from.x[3]));
    else *to = narrowed(from.x[0]);
}

#if GRADIENT
typedef unsigned short Entry;
#else
typedef float Entry;
#endif

template <int N>  // N entries at once
__device__ inline void advance(const Vectors& v, const Piece& piece, int lane, int begin) {
    const float eta = v.eta[lane], pull = PROX ? v.mu[lane] * eta : 0.0f;
    const Entry* h = (const Entry*)piece.h + lane * piece.row;
    const long long at = lane * v.row + piece.begin, from = v.origin[lane] * v.row + piece.begin;
    constexpr int ROUNDS = 4 / N * TURNS;
    Group<N> step[ROUNDS], sum[ROUNDS], start[ROUNDS], shift[ROUNDS];
#pragma unroll
    for (int n = 0; n < ROUNDS; ++n) {
        int i = begin + N * (n * THREADS + (int)threadIdx.x);
        if (i >= piece.size) continue;
        step[n] = read<N>(h + i);
        sum[n] = read<N>(v.g + at + i);
        start[n] = read<N>(v.start + from + i);
        if (SHIFT) shift[n] = read<N>(v.shift + at + i);
    }
#pragma unroll
    for (int n = 0; n < ROUNDS; ++n) {
        int i = begin + N * (n * THREADS + (int)threadIdx.x);
        if (i >= piece.size) continue;
        Group<N> w;
#pragma unroll
        for (int e = 0; e < N; ++e) {
            float x = step[n].x[e];
            if (SHIFT) x += shift[n].x[e];
            if (PROX) x -= pull * sum[n].x[e];  // w - w_t = -eta g
            sum[n].x[e] += x;
            w.x[e] = start[n].x[e] - eta * sum[n].x[e];
        }
        write<N>(v.g + at + i, sum[n]);
        if (HALF) write<N>(v.half + at + i, w);
        else write<N>(v.w + at + i, w);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) move(const __grid_constant__ Pieces pieces, const __grid_constant__ Vectors v) {
    const int chunk = blockIdx.x / v.lanes, lane = blockIdx.x % v.lanes;  // lanes side by side, so that w_t is read from memory once
    if (v.k[lane] >= v.steps[lane]) return;
    int low = 0, high = COUNT;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (pieces.each[middle].first <= chunk) low = middle;
        else high = middle;
    }
    const Piece& piece = pieces.each[low];
    if (piece.wide) advance<4>(v, piece, lane, (chunk - piece.first) * CHUNK);
    else advance<1>(v, piece, lane, (chunk - piece.first) * CHUNK);
}
