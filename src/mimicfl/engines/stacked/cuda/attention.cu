// Attention over short sequences in float32, and its gradient: one warp computes one head of one sample of one client. Constants are
// defined before this code: H heads, L queries, S keys, E entries of a head, SAMPLES per client, CAUSAL. Lane j holds key j in registers;
// for sums over the keys, lane e holds entry e of all of them. S and E are at most 32, so that all of a head's data stay on the chip.

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

__device__ inline float dot(const float* row, const float* held) {  // every lane reads the same row
    float sum = 0;
#pragma unroll
    for (int e = 0; e < E; e += 4) {
        float4 x = *(const float4*)(row + e);
        sum += x.x * held[e] + x.y * held[e + 1] + x.z * held[e + 2] + x.w * held[e + 3];
    }
    return sum;
}

__device__ inline float highest(float x) {
    for (int n = 16; n; n /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, n));
    return x;
}
__device__ inline float total(float x) {
    for (int n = 16; n; n /= 2) x += __shfl_xor_sync(~0u, x, n);
    return x;
}

// The weight of this lane's key for query i, given their product.
__device__ inline float weight(float product, int i, int lane) {
    float x = lane < S && (!CAUSAL || lane <= i) ? product : -__int_as_float(0x7f800000);
    float y = expf(x - highest(x));
    return y / total(y);
}

__device__ inline void hold_row(float* held, const float* s, int lane) {
#pragma unroll
    for (int e = 0; e < E; ++e) held[e] = lane < S ? s[lane * PITCH + e] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attend(View q, View k, View v, View y, float scale, int count) {
    extern __shared__ __align__(16) float shared[];
    const int lane = threadIdx.x % 32, n = blockIdx.x * WARPS + threadIdx.x / 32;
    if (n >= count) return;
    float* queries = shared + threadIdx.x / 32 * ((L + 2 * S) * PITCH + KEYS);
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
    for (int i = 0; i < L; ++i) {
        float p = weight(dot(queries + i * PITCH, key) * scale, i, lane), sum = 0;
        if (lane < KEYS) weights[lane] = p;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < KEYS; j += 4) {
            float4 w = *(const float4*)(weights + j);
            sum += w.x * column[j] + w.y * column[j + 1] + w.z * column[j + 2] + w.w * column[j + 3];
        }
        if (lane < E) out[i * y.row + lane] = sum;
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
attend_back(View q, View k, View v, View dy, View dq, View dk, View dv, float scale, int count) {
    extern __shared__ __align__(16) float shared[];
    const int lane = threadIdx.x % 32, n = blockIdx.x * WARPS + threadIdx.x / 32;
    if (n >= count) return;
    float* queries = shared + threadIdx.x / 32 * ((2 * L + 2 * S) * PITCH + 2 * KEYS);
    float *slopes = queries + L * PITCH, *keys = slopes + L * PITCH, *values = keys + S * PITCH;
    float *weights = values + S * PITCH, *scores = weights + KEYS;
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
    for (int i = 0; i < L; ++i) {
        float p = weight(dot(queries + i * PITCH, key) * scale, i, lane);
        float d = dot(slopes + i * PITCH, value);  // of the weight
        d = p * (d - total(p * d)) * scale;  // of the product
        if (lane < KEYS) weights[lane] = p, scores[lane] = d;
        __syncwarp();
        float query = lane < E ? queries[i * PITCH + lane] : 0.0f, slope = lane < E ? slopes[i * PITCH + lane] : 0.0f, sum = 0;
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            float x = scores[j];
            sum += x * column[j];
            sum_k[j] += x * query;
            sum_v[j] += weights[j] * slope;
        }
        if (lane < E) out[i * dq.row + lane] = sum;
        __syncwarp();
    }
    if (lane >= E) return;
#pragma unroll
    for (int j = 0; j < S; ++j) {
        begin(dk, n)[j * dk.row + lane] = sum_k[j];
        begin(dv, n)[j * dv.row + lane] = sum_v[j];
    }
}
