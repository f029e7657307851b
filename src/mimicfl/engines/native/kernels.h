// ---- pooling --------------------------------------------------------------------------------------------------------

// The maximum of two values; NaN if either is NaN.
static inline v larger(v q, v m) { return (q > m) | (q != q) ? q : m; }

template <int C, int H, int W, int OH, int OW, int KH, int KW, int SH, int SW>
static void max_pool(const v* in, v* out) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < OH; y++)
      for (int x = 0; x < OW; x++) {
        const v* p = in + (c * H + y * SH) * W + x * SW;
        v m = p[0];
        UNROLL for (int ky = 0; ky < KH; ky++) { UNROLL for (int kx = 0; kx < KW; kx++) m = larger(p[ky * W + kx], m); }
        out[(c * OH + y) * OW + x] = m;
      }
}
// If several values are equally large, the first one gets the gradient, as in PyTorch.
template <int C, int H, int W, int OH, int OW, int KH, int KW, int SH, int SW>
static void max_pool_back(const v* in, const v* out, const v* d, v* din) {
  constexpr bool APART = KH <= SH && KW <= SW;
  if (!APART || OH * SH != H || OW * SW != W || KH != SH || KW != SW) memset(din, 0, sizeof(v) * C * H * W);
  for (int c = 0; c < C; c++)
    for (int y = 0; y < OH; y++)
      for (int x = 0; x < OW; x++) {
        const v* p = in + (c * H + y * SH) * W + x * SW;
        v* q = din + (c * H + y * SH) * W + x * SW;
        const v m = out[(c * OH + y) * OW + x];
        v left = d[(c * OH + y) * OW + x];
        UNROLL for (int ky = 0; ky < KH; ky++) {
          UNROLL for (int kx = 0; kx < KW; kx++) {
            const v g = p[ky * W + kx] == m ? left : v{};
            left = p[ky * W + kx] == m ? v{} : left;
            if (APART) q[ky * W + kx] = g;
            else q[ky * W + kx] += g;
          }
        }
      }
}

template <int C, int H, int W, int OH, int OW, int KH, int KW, int SH, int SW>
static void avg_pool(const v* in, v* out) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < OH; y++)
      for (int x = 0; x < OW; x++) {
        v s = v{};
        for (int ky = 0; ky < KH; ky++)
          for (int kx = 0; kx < KW; kx++) s += in[(c * H + y * SH + ky) * W + x * SW + kx];
        out[(c * OH + y) * OW + x] = s * splat(1.f / (KH * KW));
      }
}
template <int C, int H, int W, int OH, int OW, int KH, int KW, int SH, int SW>
static void avg_pool_back(const v* d, v* din) {
  memset(din, 0, sizeof(v) * C * H * W);
  for (int c = 0; c < C; c++)
    for (int y = 0; y < OH; y++)
      for (int x = 0; x < OW; x++) {
        const v g = d[(c * OH + y) * OW + x] * splat(1.f / (KH * KW));
        for (int ky = 0; ky < KH; ky++)
          for (int kx = 0; kx < KW; kx++) din[(c * H + y * SH + ky) * W + x * SW + kx] += g;
      }
}

// ---- element by element ---------------------------------------------------------------------------------------------

// NaN stays NaN, so that divergence is detected.
static void relu(v* x, int n) { for (int i = 0; i < n; i++) x[i] = x[i] < v{} ? v{} : x[i]; }
static void relu_back(const v* y, v* d, int n) { for (int i = 0; i < n; i++) d[i] = y[i] <= v{} ? v{} : d[i]; }
static void tanh_layer(const v* x, v* y, int n) {
  const float* a = (const float*)x;
  float* b = (float*)y;
  for (int i = 0; i < n * LANES; i++) b[i] = tanhf(a[i]);
}
static void tanh_back(const v* y, const v* d, v* din, int n) { for (int i = 0; i < n; i++) din[i] = d[i] * (splat(1.f) - y[i] * y[i]); }

// One random number per element, from its key and position, so that results do not depend on threads and order.
static inline uint32_t scramble(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (uint32_t)((z ^ (z >> 31)) >> 32);
}
// n: vectors of a full group, used: of this one.
static void dropout(const v* x, v* y, v* mask, int n, int used, float p, uint64_t key, uint64_t position) {
  float* m = (float*)mask;
  const float keep = p < 1.f ? 1.f / (1.f - p) : 0.f;
  const double limit = p * 4294967296.0;
  for (int i = 0; i < used * LANES; i++) m[i] = scramble(key + 0x9e3779b97f4a7c15ull * (position * (uint64_t)n * LANES + i + 1)) < limit ? 0.f : keep;
  for (int i = 0; i < used; i++) y[i] = x[i] * mask[i];
}
static void dropout_back(const v* mask, const v* d, v* din, int n) { for (int i = 0; i < n; i++) din[i] = d[i] * mask[i]; }

// ---- fully connected ------------------------------------------------------------------------------------------------

template <int OB, int I>
static inline void linear_tile(const v* in, const float* w, const float* bias, v* out) {
  v acc[OB];
  UNROLL for (int o = 0; o < OB; o++) acc[o] = splat(bias ? bias[o] : 0.f);
  for (int k = 0; k < I; k++) {
    const v x = in[k];
    UNROLL for (int o = 0; o < OB; o++) acc[o] += splat(w[o * I + k]) * x;
  }
  UNROLL for (int o = 0; o < OB; o++) out[o] = acc[o];
}
template <int I, int O>
static void linear(const v* in, const float* w, const float* bias, v* out) {
  constexpr int OB = block(O, 12), REST = O % OB;
  int o = 0;
  for (; o + OB <= O; o += OB) linear_tile<OB, I>(in, w + o * I, bias ? bias + o : bias, out + o);
  if constexpr (REST > 0) linear_tile<REST, I>(in, w + o * I, bias ? bias + o : bias, out + o);
}

template <int KB, int I, int O>
static inline void linear_input_tile(const v* d, const float* w, v* din) {
  v acc[KB];
  UNROLL for (int k = 0; k < KB; k++) acc[k] = v{};
  for (int o = 0; o < O; o++) {
    const v g = d[o];
    UNROLL for (int k = 0; k < KB; k++) acc[k] += splat(w[o * I + k]) * g;
  }
  UNROLL for (int k = 0; k < KB; k++) din[k] = acc[k];
}
template <int I, int O>
static void linear_input(const v* d, const float* w, v* din) {
  constexpr int KB = block(I, ROOM >= 24 ? 16 : 12), REST = I % KB;
  int k = 0;
  for (; k + KB <= I; k += KB) linear_input_tile<KB, I, O>(d, w + k, din + k);
  if constexpr (REST > 0) linear_input_tile<REST, I, O>(d, w + k, din + k);
}

// This sums over the lanes, so the input is transposed first: a vector then holds LANES inputs of one sample.
template <int I, int O>
static void linear_weights(const v* in, const v* d, float* grad, float* grad_bias, float* turned, bool first) {
  constexpr int STEP = (I + LANES - 1) / LANES * LANES;
  for (int k = 0; k < I; k += LANES) {
    v r[LANES];
    UNROLL for (int j = 0; j < LANES; j++) r[j] = k + j < I ? in[k + j] : v{};
    turn(r);
    UNROLL for (int s = 0; s < LANES; s++) store(turned + s * STEP + k, r[s]);
  }
  for (int o = 0; o < O; o++) {
    const float* g = (const float*)(d + o);
    float* row = grad + (size_t)o * I;
    int k = 0;
    for (; k + 4 * LANES <= I; k += 4 * LANES) {
      v acc[4];
      UNROLL for (int j = 0; j < 4; j++) acc[j] = first ? v{} : load(row + k + j * LANES);
      UNROLL for (int s = 0; s < LANES; s++) {
        const v b = splat(g[s]);
        UNROLL for (int j = 0; j < 4; j++) acc[j] += b * load(turned + s * STEP + k + j * LANES);
      }
      UNROLL for (int j = 0; j < 4; j++) store(row + k + j * LANES, acc[j]);
    }
    for (; k + LANES <= I; k += LANES) {
      v acc = first ? v{} : load(row + k);
      UNROLL for (int s = 0; s < LANES; s++) acc += splat(g[s]) * load(turned + s * STEP + k);
      store(row + k, acc);
    }
    for (; k < I; k++) {
      float acc = first ? 0.f : row[k];
      for (int s = 0; s < LANES; s++) acc += g[s] * turned[s * STEP + k];
      row[k] = acc;
    }
    if (grad_bias) grad_bias[o] = first ? sum_lanes(d[o]) : grad_bias[o] + sum_lanes(d[o]);
  }
}

// ---- input and output: samples into lanes, losses out ---------------------------------------------------------------

// uint8 samples are converted with a table of 256 input values per channel, computed with the dataset's formula.
template <int F, int CHANNELS, typename T>
static void gather(const T* pool, const float* table, const int64_t* rows, int count, v* x) {
  const T* sample[LANES];
  for (int s = 0; s < LANES; s++) sample[s] = pool + (size_t)rows[s < count ? s : 0] * F;  // empty lanes repeat the first sample, with weight 0
  int f = 0;
  for (; f + LANES <= F; f += LANES) {
    v r[LANES];
    for (int s = 0; s < LANES; s++) {
      float piece[LANES];
      for (int j = 0; j < LANES; j++) {
        if constexpr (sizeof(T) == 1) piece[j] = table[(f + j) / (F / CHANNELS) * 256 + sample[s][f + j]];
        else piece[j] = sample[s][f + j];
      }
      r[s] = load(piece);
    }
    turn(r);
    UNROLL for (int j = 0; j < LANES; j++) x[f + j] = r[j];
  }
  for (; f < F; f++)
    for (int s = 0; s < LANES; s++) {
      if constexpr (sizeof(T) == 1) ((float*)x)[f * LANES + s] = table[f / (F / CHANNELS) * 256 + sample[s][f]];
      else ((float*)x)[f * LANES + s] = sample[s][f];
    }
}

template <int C>
static double cross_entropy(const v* z, const int64_t* target, const int64_t* rows, int count, int batch, v* d) {
  const float* a = (const float*)z;
  float* g = (float*)d;
  double total = 0;
  for (int s = 0; s < LANES; s++) {
    if (s >= count) { for (int j = 0; j < C; j++) g[j * LANES + s] = 0.f; continue; }
    float m = a[s], e[C], sum = 0.f;
    for (int j = 1; j < C; j++) m = a[j * LANES + s] > m ? a[j * LANES + s] : m;
    for (int j = 0; j < C; j++) sum += e[j] = expf(a[j * LANES + s] - m);
    const int64_t y = target[rows[s]];
    for (int j = 0; j < C; j++) g[j * LANES + s] = (e[j] / sum - (j == y)) / batch;
    total += (double)(logf(sum) + m - a[y * LANES + s]) / batch;
  }
  return total;
}

// Half the mean squared error.
template <int C>
static double squared_error(const v* z, const float* target, const int64_t* rows, int count, int batch, v* d) {
  const float* a = (const float*)z;
  float* g = (float*)d;
  double total = 0;
  for (int s = 0; s < LANES; s++)
    for (int j = 0; j < C; j++) {
      const float e = s < count ? a[j * LANES + s] - target[rows[s] * C + j] : 0.f;
      g[j * LANES + s] = e / (batch * C);
      total += 0.5 * (double)e * e / (batch * C);
    }
  return total;
}
