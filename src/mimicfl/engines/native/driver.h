// Local training of a round's clients with a generated network: `Net` has D parameters, FEATURES inputs, OUTPUTS outputs,
// a workspace for GROUP samples, forward() and backward(). ZEROED: the gradient is set to zero before a backward pass, because the pass
// writes some entries twice or never. Each thread trains one client after another. A step clips the gradient and applies it.

struct Round {
  const float* w0;        // [models, D] initial parameters
  const int32_t* model;   // [m] index of each client's initial parameters
  float* g;               // [m, D] out
  double* loss;           // [m] out: sum over the steps of the mean batch loss
  const Sample* pool;     // [n, FEATURES]
  const float* table;     // [channels, 256] for uint8 samples
  const Target* target;   // [n] or [n, OUTPUTS]
  const int64_t* rows;    // samples of all steps of all clients, concatenated
  const int64_t* begin;   // [m] where each client's samples begin in `rows`
  const int32_t* sizes;   // batch sizes of all steps of all clients
  const int64_t* step;    // [m + 1] where each client's steps begin in `sizes`
  const float* const* shift;  // [m] of [D], or null: a client without a shift runs the same code alone and in a group
  const uint64_t* key;    // [m] for dropout
  const float* eta;       // [m]
  const float* mu;        // [m]
  const float* beta;      // [m] momentum
  const float* clip;      // [m] maximum gradient norm; 0: no clipping
};

static void shorten(float* grad, float most) {
  double square = 0;
  for (int k = 0; k < Net::D; k++) square += (double)grad[k] * grad[k];
  const float factor = most / ((float)sqrt(square) + 1e-6f);
  if (factor < 1.f)
    for (int k = 0; k < Net::D; k++) grad[k] *= factor;
}

static void train_one(const Round& r, int c, Net::Work& s, float* w, float* grad, float* u) {
  const float* w0 = r.w0 + (size_t)r.model[c] * Net::D;
  memcpy(w, w0, sizeof(float) * Net::D);
  float* g = r.g + (size_t)c * Net::D;
  memset(g, 0, sizeof(float) * Net::D);
  memset(u, 0, sizeof(float) * Net::D);
  const int64_t* rows = r.rows + r.begin[c];
  const Step step{w, g, u, w0, r.shift[c], r.eta[c], r.mu[c], r.beta[c]};
  double loss = 0;
  uint64_t position = 0;
  for (int64_t k = r.step[c]; k < r.step[c + 1]; k++) {
    const int batch = r.sizes[k];
    Net::prepare(s, w);
    if (Net::ZEROED) memset(grad, 0, sizeof(float) * Net::D);
    for (int at = 0; at < batch; at += Net::GROUP) {
      const int count = least(Net::GROUP, batch - at);
      Net::gather(s, r.pool, r.table, rows + at, count);
      Net::forward(s, w, count, true, r.key[c], position++);
      loss += Net::loss(s, r.target, rows + at, count, batch);
      Net::backward(s, w, grad, count, at == 0 && !Net::ZEROED);
    }
    if (r.clip[c] > 0.f) shorten(grad, r.clip[c]);
    step.range(0, Net::D, grad);
    rows += batch;
  }
  r.loss[c] = loss;
}

template <typename F>
static int on_threads(int threads, int jobs, F work) {
  std::atomic<int> next{0}, failed{0};
  auto loop = [&] {
    auto* s = (Net::Work*)room(sizeof(Net::Work));
    auto* w = (float*)room(sizeof(float) * 3 * (Net::D + LANES));
    if (!s || !w) failed = 1;
    else for (int j; (j = next++) < jobs;) work(j, *s, w, w + Net::D + LANES, w + 2 * (Net::D + LANES));
    release(s);
    release(w);
  };
  std::vector<std::thread> others;
  try {
    for (int t = 1; t < least(threads, jobs); t++) others.emplace_back(loop);
  } catch (...) {  // no more threads available: the running ones do the work
  }
  loop();
  for (auto& t : others) t.join();
  return failed;
}

extern "C" int mimicfl_lanes() { return LANES; }

extern "C" int mimicfl_train(const float* w0, const int32_t* model, float* g, double* loss, const Sample* pool, const float* table,
                             const Target* target, const int64_t* rows, const int64_t* begin, const int32_t* sizes, const int64_t* step,
                             const float* const* shift, const uint64_t* key, const float* eta, const float* mu, const float* beta,
                             const float* clip, const int32_t* order, int m, int threads) {
  const Round r{w0, model, g, loss, pool, table, target, rows, begin, sizes, step, shift, key, eta, mu, beta, clip};
  return on_threads(threads, m, [&](int j, Net::Work& s, float* w, float* grad, float* u) { train_one(r, order[j], s, w, grad, u); });
}

// Computes the outputs [n, OUTPUTS] of n samples in evaluation mode.
extern "C" int mimicfl_outputs(const float* w, const Sample* pool, const float* table, int64_t n, float* out, int threads) {
  const int jobs = (int)((n + 255) / 256);
  return on_threads(threads, jobs, [&](int job, Net::Work& s, float*, float*, float*) {
    Net::prepare(s, w);
    int64_t rows[Net::GROUP];
    const int64_t end = least64(n, 256 * ((int64_t)job + 1));
    for (int64_t at = 256 * (int64_t)job; at < end; at += Net::GROUP) {
      const int count = (int)least64(Net::GROUP, end - at);
      for (int i = 0; i < count; i++) rows[i] = at + i;
      Net::gather(s, pool, table, rows, count);
      Net::forward(s, w, count, false, 0, 0);
      for (int i = 0; i < count; i++)
        for (int j = 0; j < Net::OUTPUTS; j++) out[(at + i) * Net::OUTPUTS + j] = Net::output(s, i, j);
    }
  });
}
