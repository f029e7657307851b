// The gradient of the embeddings of many clients: row (client, token) is the sum of dy over the places of this token, in their order.
// Constants are defined before this code: T places per client, V rows, E entries of a row. Each warp collects one row after another.

constexpr int ROWS = 64, BLOCKS = (V + ROWS - 1) / ROWS, PARTS = (E + 31) / 32;  // rows per block, blocks per client, entries per lane

extern "C" __global__ void __launch_bounds__(256) embedding_back(const float* dy, const long long* ids, float* out) {
    extern __shared__ int tokens[];
    const int client = blockIdx.x / BLOCKS, first = blockIdx.x % BLOCKS * ROWS, lane = threadIdx.x % 32;
    for (int t = threadIdx.x; t < T; t += 256) tokens[t] = (int)(ids[(long long)client * T + t] - (long long)client * V);
    __syncthreads();
    dy += (long long)client * T * E;
    out += (long long)client * V * E;
    for (int row = first + threadIdx.x / 32; row < min(first + ROWS, V); row += 8) {
        float sum[PARTS] = {};
        for (int begin = 0; begin < T; begin += 32) {
            unsigned hits = __ballot_sync(~0u, begin + lane < T && tokens[begin + lane] == row);
            for (; hits; hits &= hits - 1) {
                const float* from = dy + (long long)(begin + __ffs(hits) - 1) * E;
#pragma unroll
                for (int n = 0; n < PARTS; ++n)
                    if (32 * n + lane < E) sum[n] += from[32 * n + lane];
            }
        }
#pragma unroll
        for (int n = 0; n < PARTS; ++n)
            if (32 * n + lane < E) out[(long long)row * E + 32 * n + lane] = sum[n];
    }
}
