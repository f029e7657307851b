// out[m, i, j] = sum over k of a[m, i, k] b[m, k, j] in float32, on tensor cores: every operand is the sum of two TF32 numbers, and three
// of their four products are added. Constants are defined before this code: the sizes M, N, K; the strides A_M, A_I, A_K, B_M, B_K, B_J in
// elements, where one of the two inner strides of an operand is 1; A_WIDE and B_WIDE, whether 16 bytes can be copied at once; the tile
// BM x BN; and the warps of a block, WM x WN of them over the tile and WK over the products of a step. No sum depends on timing.

constexpr int BK = 32, STAGES = 3, WARPS = WM * WN * WK, THREADS = 32 * WARPS;
constexpr int TM = BM / WM / 16, TN = BN / WN / 8;  // matrix instructions of a warp
constexpr int STEPS = (K + BK - 1) / BK, TILES = (N + BN - 1) / BN;
constexpr bool A_LAST = A_K == 1, B_LAST = B_K == 1;  // whether an operand's products, rather than its rows, are adjacent

// A tile is stored as it lies in memory, padded so that a warp's reads of a fragment meet all banks.
__host__ __device__ constexpr int pitch(bool last, int rows) { return last ? BK + 4 : rows + 8; }
__host__ __device__ constexpr int room(bool last, int rows) { return last ? rows * pitch(last, rows) : BK * pitch(last, rows); }
constexpr int A_ROOM = room(A_LAST, BM), STAGE = A_ROOM + room(B_LAST, BN);

__device__ inline void copy(float* to, const float* from, bool here, bool wide) {
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (wide) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(here ? 16 : 0));
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(here ? 4 : 0));
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;"); }
__device__ inline void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2)); }

// Copy BK products of ROWS rows; what lies outside the operand becomes zero.
template <int ROWS, int LIMIT, bool LAST, bool WIDE, int OUTER>
__device__ inline void load(float* s, const float* g, int row0, int k0) {
    constexpr int WIDTH = WIDE ? 4 : 1, ACROSS = (LAST ? BK : ROWS) / WIDTH, COUNT = ROWS * BK / WIDTH;
    constexpr int TURNS = (COUNT + THREADS - 1) / THREADS;
#pragma unroll
    for (int n = 0; n < TURNS; ++n) {
        int c = n * THREADS + (int)threadIdx.x;
        if (COUNT % THREADS && n == TURNS - 1 && c >= COUNT) break;
        int outer = c / ACROSS, inner = c % ACROSS * WIDTH;
        int row = row0 + (LAST ? outer : inner), k = k0 + (LAST ? inner : outer);
        bool here = (LIMIT % ROWS == 0 || row < LIMIT) && (K % BK == 0 || k < K);
        const float* from = g + (LAST ? row * OUTER + k : k * OUTER + row);
        copy(s + outer * pitch(LAST, ROWS) + inner, here ? from : g, here, WIDE);
    }
}

template <int ROWS, bool LAST>
__device__ inline float at(const float* s, int row, int k) { return LAST ? s[row * pitch(LAST, ROWS) + k] : s[k * pitch(LAST, ROWS) + row]; }

// x = big + small: big is rounded to TF32; the matrix instruction cuts off what TF32 cannot hold of small.
__device__ inline void split(float x, unsigned& big, unsigned& small) {
    big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(big));
}

__device__ inline void mma(float* c, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

extern "C" __global__ void __launch_bounds__(THREADS) product(const float* a, const float* b, float* out) {
    extern __shared__ __align__(16) float shared[];
    const int tiles = (M + BM - 1) / BM * TILES, client = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int i0 = tile / TILES * BM, j0 = tile % TILES * BN;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int wk = warp / (WM * WN), im = warp / WN % WM * (BM / WM), jn = warp % WN * (BN / WN);
    a += (long long)client * A_M;
    b += (long long)client * B_M;

    auto fetch = [&](int step) {
        if (step < STEPS) {
            float* s = shared + step % STAGES * STAGE;
            load<BM, M, A_LAST, A_WIDE, (A_LAST ? A_I : A_K)>(s, a, i0, step * BK);
            load<BN, N, B_LAST, B_WIDE, (B_LAST ? B_J : B_K)>(s + A_ROOM, b, j0, step * BK);
        }
        commit();
    };

    float acc[TM][TN][4] = {};
    for (int step = 0; step < STAGES - 1; ++step) fetch(step);
#pragma unroll(STEPS <= 4 ? STEPS : 1)
    for (int step = 0; step < STEPS; ++step) {
        arrived();
        __syncthreads();
        fetch(step + STAGES - 1);
        const float *s = shared + step % STAGES * STAGE, *r = s + A_ROOM;
#pragma unroll
        for (int k = 8 * wk; k < BK; k += 8 * WK) {
            unsigned big_b[TN][2], small_b[TN][2];
#pragma unroll
            for (int y = 0; y < TN; ++y) {
#pragma unroll
                for (int h = 0; h < 2; ++h) split(at<BN, B_LAST>(r, jn + 8 * y + g, k + t + 4 * h), big_b[y][h], small_b[y][h]);
            }
#pragma unroll
            for (int x = 0; x < TM; ++x) {
                unsigned big[4], small[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) split(at<BM, A_LAST>(s, im + 16 * x + g + q % 2 * 8, k + t + q / 2 * 4), big[q], small[q]);
#pragma unroll
                for (int y = 0; y < TN; ++y) mma(acc[x][y], small, big_b[y]);
#pragma unroll
                for (int y = 0; y < TN; ++y) mma(acc[x][y], big, small_b[y]);
#pragma unroll
                for (int y = 0; y < TN; ++y) mma(acc[x][y], big, big_b[y]);
            }
        }
    }

    // The warps that share a tile's products add their sums one after another.
    for (int turn = 1; turn < WK; ++turn) {
        float* sums = shared + warp % (WM * WN) * (TM * TN * 128);
        __syncthreads();
        if (wk == turn)
            for (int n = 0; n < TM * TN * 4; ++n) sums[n * 32 + lane] = acc[n / 4 / TN][n / 4 % TN][n % 4];
        __syncthreads();
        if (wk == 0)
            for (int n = 0; n < TM * TN * 4; ++n) acc[n / 4 / TN][n / 4 % TN][n % 4] += sums[n * 32 + lane];
    }
    if (wk) return;
    out += (long long)client * M * N;
#pragma unroll
    for (int x = 0; x < TM; ++x)
#pragma unroll
        for (int y = 0; y < TN; ++y)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int i = i0 + im + 16 * x + g + 8 * h, j = j0 + jn + 8 * y + 2 * t;
                if (i >= M || j >= N) continue;
                float* to = out + (long long)i * N + j;
                if (N % 2 == 0) *(float2*)to = make_float2(acc[x][y][2 * h], acc[x][y][2 * h + 1]);
                else {
                    to[0] = acc[x][y][2 * h];
                    if (j + 1 < N) to[1] = acc[x][y][2 * h + 1];
                }
            }
}
