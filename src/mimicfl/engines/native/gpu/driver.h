// Local training of clients, one per thread block, with a generated network. A block takes the next job when it has finished one.
struct Round {
  const float* w0;          // [models, D] initial parameters
  const int32_t* model;     // [m] index of each client's initial parameters
  float* g;                 // [m, D] out
  double* loss;             // [m] out: sum over the steps of the mean batch loss
  const Sample* pool;       // [n, features]
  const float* table;       // [channels, 256] for uint8 samples
  const Target* target;     // [n] or [n, outputs]
  const int32_t* rows;      // samples of all steps of all clients, concatenated
  const int64_t* begin;     // [m] where each client's samples begin in `rows`; clients may share them
  const int32_t* sizes;     // batch sizes of all steps of all clients
  const int64_t* step;      // [m, 2] where each client's steps begin and end in `sizes`
  const float* const* shift;  // [m] of [D], or null
  const float* eta;         // [m]
  const float* mu;          // [m]
  const float* beta;        // [m] momentum
  const float* decay;       // [m] weight decay, which the gradients that are sent include
  float* sent_first;        // [m, D] out: the gradient of the first step, if FIRST
  float* sent_last;         // [m, D] out: and of the last, if LAST
  float* space;             // [blocks, SPACE]: parameters, sums and large activations of a block
  int32_t* next;            // the next job, 0 at the start
  int32_t m;
};

DEVICE void train_one(const Round& r, int c, int block, float* shared, double* total) {
  float* space = r.space + (size_t)block * Net::SPACE;
  const Net net{shared, space + 4 * Net::ROOM};
  float *w = space, *g = space + Net::ROOM, *u = MOMENTUM && r.beta[c] != 0.f ? space + 3 * Net::ROOM : nullptr;
  const float* w0 = r.w0 + (size_t)r.model[c] * Net::D;
  net.clear();
  LOOP EACH(k, Net::D) {
    w[k] = w0[k];
    g[k] = 0.f;
    if (u) u[k] = 0.f;
  }
  EACH(k, Net::TABLE) net.table()[k] = r.table[k];
  EACH(lane, LANES) total[lane] = 0;
  net.prepare(w0);
  const int32_t* rows = r.rows + r.begin[c];
  Step step{w, g, u, space + 2 * Net::ROOM, w0, r.shift[c]};
  step.eta = r.eta[c], step.mu = r.mu[c], step.beta = r.beta[c], step.decay = r.decay[c];
  step.sent_first = r.sent_first + (size_t)c * Net::D, step.sent_last = r.sent_last + (size_t)c * Net::D;
  LOOP for (int64_t k = r.step[2 * c]; k < r.step[2 * c + 1]; k++) {
    const int batch = r.sizes[k];
    step.opening = k == r.step[2 * c], step.closing = k + 1 == r.step[2 * c + 1];
    for (int at = 0; at == 0 || (PARTS && at < batch); at += LANES) {
      const int count = batch - at < LANES ? batch - at : LANES;
      SYNC;
      step.first = at == 0, step.last = at + LANES >= batch;
      net.gather_samples(r.pool, rows + at, count);
      SYNC;
      net.forward(w, true);
      LOSS<Net::OUTPUTS>(net.output(), r.target, rows + at, count, batch, total);
      SYNC;
      net.backward(w, step);
    }
    rows += batch;
  }
  SYNC;
  LOOP EACH(k, Net::D) r.g[(size_t)c * Net::D + k] = g[k];
  EACH(one, 1) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    r.loss[c] = sum;
  }
  SYNC;
}

// The outputs [models, n, OUTPUTS] of n samples in evaluation mode; a block takes one model and each PARTS-th group of LANES samples.
DEVICE void evaluate(const float* models, const Sample* pool, const float* table, int n, float* out, float* all_space, int block, int parts,
                     float* shared, int32_t* rows) {
  float* space = all_space + (size_t)block * Net::SPACE;
  const Net net{shared, space + 4 * Net::ROOM};
  const int model = block / parts;
  net.clear();
  LOOP EACH(k, Net::D) space[k] = models[(size_t)model * Net::D + k];
  EACH(k, Net::TABLE) net.table()[k] = table[k];
  SYNC;
  net.prepare(space);
  LOOP for (int at = block % parts * LANES; at < n; at += parts * LANES) {
    const int count = n - at < LANES ? n - at : LANES;
    SYNC;
    EACH(lane, LANES) rows[lane] = at + (lane < count ? lane : 0);
    SYNC;
    net.gather_samples(pool, rows, count);
    SYNC;
    net.forward(space, false);
    EACH(k, count * Net::OUTPUTS) {
      const int lane = k / Net::OUTPUTS, j = k % Net::OUTPUTS;
      out[((size_t)model * n + at + lane) * Net::OUTPUTS + j] = net.output()[j * LANES + lane];
    }
  }
}

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(THREADS, 1) mimicfl_train(const Round r) {
  extern __shared__ __align__(16) float shared[];
  __shared__ double total[LANES];
  __shared__ int32_t job;
  for (;;) {
    if (threadIdx.x == 0) job = atomicAdd(r.next, 1);
    SYNC;
    const int c = job;
    if (c >= r.m) return;
    train_one(r, c, blockIdx.x, shared, total);
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) mimicfl_outputs(const float* models, const Sample* pool, const float* table, int n,
                                                                         float* out, float* space, int parts) {
  extern __shared__ __align__(16) float shared[];
  __shared__ int32_t rows[LANES];
  evaluate(models, pool, table, n, out, space, blockIdx.x, parts, shared, rows);
}
#else
extern "C" void mimicfl_train(const Round* r) {
  alignas(16) static float shared[Net::SHARED];
  double total[LANES];
  for (int c = 0; c < r->m; c++) train_one(*r, c, 0, shared, total);
}
extern "C" void mimicfl_outputs(const float* models, const Sample* pool, const float* table, int n, float* out, float* space, int parts,
                                int blocks) {
  alignas(16) static float shared[Net::SHARED];
  int32_t rows[LANES];
  for (int block = 0; block < blocks; block++) evaluate(models, pool, table, n, out, space, block, parts, shared, rows);
}
#endif
