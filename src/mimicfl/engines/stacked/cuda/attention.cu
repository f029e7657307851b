// Attention over short sequences in float32, and its gradient: one warp computes one head of one sample of one client. Constants are
// defined before this code: H heads, L queries, S keys, E entries of a head, SAMPLES per client, CAUSAL. Lane j holds key j in registers;
// for sums over the keys, lane e holds entry e of all of them. S and E are at most 32, so that all of a head's data stay on the chip.

constexpr int TOGETHER = E + S <= 48 ? 4 : 2;  // queries at a time: a warp waits less if it computes independent rows
constexpr int WARPS = 4, PITCH = E / 4 % 2 ? E : E + 4, KEYS = (S + 3) / 4 * 4;  // the pitch spreads rows over all banks

struct View {  // [clients, samples, heads, rows, E] with adjacent entries
    float* data;
    long long client, sample, head, row;
};

__device__ inline float* begin(const View& x, int n) {
    return x.data + n / H / SAMPLES * x.client + n / H % SAMPLES * x.sample + n % H * x.head;
}

template <int ROWS>
__device__ inline void load(float* s, const View& x, int n, int lane) {
    const float* from = begin(x, n);
#pragma unroll
    for (int c = lane; c < ROWS * E; c += 32) s[c / E * PITCH + c % E] = from[c / E * x.row + c % E];
}

// The products of rows with what each lane holds; all lanes read the same rows, of which there are no more than `rows`.
__device__ inline void dot(float* sum, const float* s, int first, int rows, const float* held) {
    for (int r = 0; r < TOGETHER; ++r) sum[r] = 0;
#pragma unroll
    for (int e = 0; e < E; e += 4) {
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r) {
            float4 x = *(const float4*)(s + min(first + r, rows - 1) * PITCH + e);
            sum[r] += x.x * held[e] + x.y * held[e + 1] + x.z * held[e + 2] + x.w * held[e + 3];
        }
    }
}

__device__ inline void highest(float* x) {
#pragma unroll
    for (int n = 16; n; n /= 2) {
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r) x[r] = fmaxf(x[r], __shfl_xor_sync(~0u, x[r], n));
    }
}
__device__ inline void total(float* x) {
#pragma unroll
    for (int n = 16; n; n /= 2) {
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r) x[r] += __shfl_xor_sync(~0u, x[r], n);
    }
}

// The weights of this lane's key for queries from `first` on.
__device__ inline void weigh(float* p, const float* queries, int first, const float* key, float scale, int lane) {
    float most[TOGETHER], sum[TOGETHER];
    dot(p, queries, first, L, key);
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r)
        most[r] = p[r] = lane < S && (!CAUSAL || lane <= first + r) ? p[r] * scale : -__int_as_float(0x7f800000);
    highest(most);
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r) sum[r] = p[r] = expf(p[r] - most[r]);
    total(sum);
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r) p[r] /= sum[r];
}

__device__ inline void hold_row(float* held, const float* s, int lane) {
#pragma unroll
    for (int e = 0; e < E; ++e) held[e] = lane < S ? s[lane * PITCH + e] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attend(View q, View k, View v, View y, float scale, int count) {
    extern __shared__ __align__(16) float shared[];
    const int lane = threadIdx.x % 32, n = blockIdx.x * WARPS + threadIdx.x / 32;
    if (n >= count) return;
    float* queries = shared + threadIdx.x / 32 * ((L + 2 * S) * PITCH + TOGETHER * KEYS);
    float *keys = queries + L * PITCH, *values = keys + S * PITCH, *weights = values + S * PITCH;
    load<L>(queries, q, n, lane);
    load<S>(keys, k, n, lane);
    load<S>(values, v, n, lane);
    __syncwarp();
    float key[E], column[KEYS];
    hold_row(key, keys, lane);
#pragma unroll
    for (int j = 0; j < KEYS; ++j) column[j] = j < S && lane < E ? values[j * PITCH + lane] : 0.0f;
    float* out = begin(y, n);
    for (int i = 0; i < L; i += TOGETHER) {
        float p[TOGETHER], sum[TOGETHER] = {};
        weigh(p, queries, i, key, scale, lane);
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r)
            if (lane < KEYS) weights[r * KEYS + lane] = p[r];
        __syncwarp();
#pragma unroll
        for (int j = 0; j < KEYS; j += 4) {
#pragma unroll
            for (int r = 0; r < TOGETHER; ++r) {
                float4 w = *(const float4*)(weights + r * KEYS + j);
                sum[r] += w.x * column[j] + w.y * column[j + 1] + w.z * column[j + 2] + w.w * column[j + 3];
            }
        }
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r)
            if (lane < E && i + r < L) out[(i + r) * y.row + lane] = sum[r];
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
attend_back(View q, View k, View v, View dy, View dq, View dk, View dv, float scale, int count) {
    extern __shared__ __align__(16) float shared[];
    const int lane = threadIdx.x % 32, n = blockIdx.x * WARPS + threadIdx.x / 32;
    if (n >= count) return;
    float* queries = shared + threadIdx.x / 32 * ((2 * L + 2 * S) * PITCH + 2 * TOGETHER * KEYS);
    float *slopes = queries + L * PITCH, *keys = slopes + L * PITCH, *values = keys + S * PITCH;
    float *weights = values + S * PITCH, *scores = weights + TOGETHER * KEYS;
    load<L>(queries, q, n, lane);
    load<L>(slopes, dy, n, lane);
    load<S>(keys, k, n, lane);
    load<S>(values, v, n, lane);
    __syncwarp();
    float key[E], value[E], column[KEYS], sum_k[KEYS] = {}, sum_v[KEYS] = {};
    hold_row(key, keys, lane);
    hold_row(value, values, lane);
#pragma unroll
    for (int j = 0; j < KEYS; ++j) column[j] = j < S && lane < E ? keys[j * PITCH + lane] : 0.0f;
    float* out = begin(dq, n);
    for (int i = 0; i < L; i += TOGETHER) {
        float p[TOGETHER], d[TOGETHER], mean[TOGETHER], query[TOGETHER], slope[TOGETHER], sum[TOGETHER] = {};
        weigh(p, queries, i, key, scale, lane);
        dot(d, slopes, i, L, value);  // of the weights
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r) mean[r] = p[r] * d[r];
        total(mean);
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r) {
            if (lane < KEYS) weights[r * KEYS + lane] = p[r], scores[r * KEYS + lane] = p[r] * (d[r] - mean[r]) * scale;
            bool here = lane < E && i + r < L;
            query[r] = here ? queries[(i + r) * PITCH + lane] : 0.0f;
            slope[r] = here ? slopes[(i + r) * PITCH + lane] : 0.0f;
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < KEYS; j += 4) {
#pragma unroll
            for (int r = 0; r < TOGETHER; ++r) {
                float4 x = *(const float4*)(scores + r * KEYS + j), w = *(const float4*)(weights + r * KEYS + j);
                const float xs[4] = {x.x, x.y, x.z, x.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    sum[r] += xs[c] * column[j + c];
                    sum_k[j + c] += xs[c] * query[r];
                    sum_v[j + c] += ws[c] * slope[r];
                }
            }
        }
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r)
            if (lane < E && i + r < L) out[(i + r) * dq.row + lane] = sum[r];
        __syncwarp();
    }
    if (lane >= E) return;
#pragma unroll
    for (int j = 0; j < S; ++j) {
        begin(dk, n)[j * dk.row + lane] = sum_k[j];
        begin(dv, n)[j * dv.row + lane] = sum_v[j];
    }
}
