// ---- softmax: cross-entropy with many classes, attention over short sequences ---------------------------------------

// e^x for x <= 0. Relative error about 2e-7; 0 below -87, where float32 leaves its normal range; NaN stays NaN.
static inline v exp_lanes(v x) {
  const v low = splat(-87.f), magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const v in = x < low ? low : x;
  const v shifted = in * splat(1.44269504f) + magic, n = shifted - magic;  // n = round(x / ln 2)
  const v r = in - n * splat(0.693359375f) + n * splat(2.12194440e-4f);    // ln 2 in two parts
  v p = splat(1.f / 5040);
  p = p * r + splat(1.f / 720);
  p = p * r + splat(1.f / 120);
  p = p * r + splat(1.f / 24);
  p = p * r + splat(1.f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.f);
  p = p * r + splat(1.f);
  vi bits;
  memcpy(&bits, &shifted, sizeof(v));
  bits = (bits << 23) + (127 << 23);  // 2^n: the low bits of the shifted value are n
  v power;
  memcpy(&power, &bits, sizeof(v));
  return x < low ? v{} : p * power;
}

static inline float max_lanes(v a) {
  float x[LANES];
  memcpy(x, &a, sizeof(v));
  for (int i = 1; i < LANES; i++) x[0] = (x[i] > x[0]) | (x[i] != x[i]) ? x[i] : x[0];
  return x[0];
}

// The last numbers of a row, in lanes; the other lanes hold `other`.
static inline v load_rest(const float* p, int count, float other) {
  float x[LANES];
  for (int i = 0; i < LANES; i++) x[i] = i < count ? p[i] : other;
  return load(x);
}

template <int C>
struct CrossEntropy {
  static constexpr int WHOLE = C / LANES * LANES, REST = C - WHOLE, FOUR = C / (4 * LANES) * 4 * LANES;
  // most = max z, sum = sum exp (z - most), loss = log sum - (z_y - most) for each of n rows.
  static void forward(const float* z, const int64_t* y, float* loss, float* mosts, float* sums, int64_t n) {
    const float low = -INFINITY;
    for (int64_t i = 0; i < n; i++, z += C) {
      v m[4];
      UNROLL for (int k = 0; k < 4; k++) m[k] = splat(low);
      for (int j = 0; j < FOUR; j += 4 * LANES) { UNROLL for (int k = 0; k < 4; k++) m[k] = larger(load(z + j + k * LANES), m[k]); }
      for (int j = FOUR; j < WHOLE; j += LANES) m[0] = larger(load(z + j), m[0]);
      if (REST) m[0] = larger(load_rest(z + WHOLE, REST, low), m[0]);
      const float most = max_lanes(larger(larger(m[0], m[1]), larger(m[2], m[3])));
      v s[4] = {};
      for (int j = 0; j < FOUR; j += 4 * LANES) { UNROLL for (int k = 0; k < 4; k++) s[k] += exp_lanes(load(z + j + k * LANES) - splat(most)); }
      for (int j = FOUR; j < WHOLE; j += LANES) s[0] += exp_lanes(load(z + j) - splat(most));
      if (REST) s[0] += exp_lanes(load_rest(z + WHOLE, REST, low) - splat(most));
      mosts[i] = most;
      sums[i] = sum_lanes((s[0] + s[1]) + (s[2] + s[3]));
      loss[i] = logf(sums[i]) - (z[y[i]] - most);
    }
  }
  // dz = (softmax z - 1_y) times the gradient of the row's loss, for `width` classes from `from`, as rows of this width.
  static void backward(const float* z, const int64_t* y, const float* mosts, const float* sums, const float* scale, float* dz,
                       int64_t from, int64_t width, int64_t n) {
    const int64_t whole = width / LANES * LANES;
    const int rest = (int)(width - whole);
    z += from;
    for (int64_t i = 0; i < n; i++, z += C, dz += width) {
      const v most = splat(mosts[i]), by = splat(scale[i] / sums[i]);
      for (int64_t j = 0; j < whole; j += LANES) store(dz + j, exp_lanes(load(z + j) - most) * by);
      if (rest) {
        const v last = exp_lanes(load_rest(z + whole, rest, -INFINITY) - most) * by;
        memcpy(dz + whole, &last, sizeof(float) * rest);
      }
      if (y[i] >= from && y[i] < from + width) dz[y[i] - from] -= scale[i];
    }
  }
};

// Scaled dot-product attention with L queries, M keys and D features per head. The heads of all samples are in the lanes. Tensors are
// given with the distances between samples, heads and positions; features are contiguous.
template <int HEADS, int L, int M, int D, bool CAUSAL>
struct Attention {
  static constexpr int WHOLE = D / LANES * LANES, REST = D - WHOLE;
  struct Work {
    alignas(64) v q[L * D], k[M * D], value[M * D], o[L * D], dq[L * D], dk[M * D], dvalue[M * D], p[L * M];
  };
  static Work* work() {
    static thread_local Work* own = (Work*)room(sizeof(Work));
    return own;
  }
  static const float* head(const float* x, const int64_t* at, int64_t number) { return x + number / HEADS * at[0] + number % HEADS * at[1]; }
  static constexpr int keys(int l) { return CAUSAL ? least(l + 1, M) : M; }
  // LANES heads as vectors, a square of features at a time; lanes without a head repeat the first one.
  template <int P>
  static void enter(const float* x, const int64_t* at, int64_t first, int count, v* y) {
    const float* from[LANES];
    for (int s = 0; s < LANES; s++) from[s] = head(x, at, first + (s < count ? s : 0));
    for (int l = 0; l < P; l++, y += D) {
      v r[LANES];
      for (int d = 0; d < WHOLE; d += LANES) {
        UNROLL for (int s = 0; s < LANES; s++) r[s] = load(from[s] + l * at[2] + d);
        turn(r);
        UNROLL for (int j = 0; j < LANES; j++) y[d + j] = r[j];
      }
      if (!REST) continue;
      UNROLL for (int s = 0; s < LANES; s++) { r[s] = v{}; memcpy(&r[s], from[s] + l * at[2] + WHOLE, sizeof(float) * REST); }
      turn(r);
      UNROLL for (int j = 0; j < REST; j++) y[WHOLE + j] = r[j];
    }
  }
  template <int P>
  static void leave(const v* x, const int64_t* at, int64_t first, int count, float* y) {
    float* to[LANES];
    for (int s = 0; s < count; s++) to[s] = (float*)head(y, at, first + s);
    for (int l = 0; l < P; l++, x += D) {
      v r[LANES];
      for (int d = 0; d < WHOLE; d += LANES) {
        UNROLL for (int j = 0; j < LANES; j++) r[j] = x[d + j];
        turn(r);
        for (int s = 0; s < count; s++) store(to[s] + l * at[2] + d, r[s]);
      }
      if (!REST) continue;
      UNROLL for (int j = 0; j < LANES; j++) r[j] = j < REST ? x[WHOLE + j] : v{};
      turn(r);
      for (int s = 0; s < count; s++) memcpy(to[s] + l * at[2] + WHOLE, &r[s], sizeof(float) * REST);
    }
  }
  // y_m = sum over d of x_d rows_md, for n rows. Several rows at a time, so that x is loaded once for all and no sum waits for itself.
  static void dots(const v* x, const v* rows, int n, v* y) {
    constexpr int B = ROOM / 3;
    int m = 0;
    for (; m + B <= n; m += B) {
      v acc[B];
      UNROLL for (int b = 0; b < B; b++) acc[b] = v{};
      for (int d = 0; d < D; d++) { UNROLL for (int b = 0; b < B; b++) acc[b] += x[d] * rows[(m + b) * D + d]; }
      UNROLL for (int b = 0; b < B; b++) y[m + b] = acc[b];
    }
    for (; m < n; m++) {
      v acc[4] = {};
      int d = 0;
      for (; d + 4 <= D; d += 4) { UNROLL for (int k = 0; k < 4; k++) acc[k] += x[d + k] * rows[m * D + d + k]; }
      for (; d < D; d++) acc[0] += x[d] * rows[m * D + d];
      y[m] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
    }
  }
  // p = softmax(q k' scale), row by row.
  static void weights(Work& s, float scale) {
    for (int l = 0; l < L; l++) {
      v* p = s.p + l * M;
      v most = splat(-INFINITY), sum = v{};
      dots(s.q + l * D, s.k, keys(l), p);
      for (int m = 0; m < keys(l); m++) {
        p[m] *= splat(scale);
        most = larger(p[m], most);
      }
      for (int m = 0; m < keys(l); m++) sum += p[m] = exp_lanes(p[m] - most);
      const v by = splat(1.f) / sum;
      for (int m = 0; m < keys(l); m++) p[m] *= by;
    }
  }
  // The distances of q, k, v and the output follow one another in `at`, three each.
  static int forward(const float* q, const float* k, const float* value, float* o, const int64_t* at, float scale, int64_t n) {
    Work* s = work();
    if (!s) return 1;
    for (int64_t first = 0; first < n; first += LANES) {
      const int count = (int)least64(LANES, n - first);
      load_group(*s, q, k, value, at, first, count);
      weights(*s, scale);
      for (int l = 0; l < L; l++) mix(s->p + l * M, 1, s->value, keys(l), s->o + l * D);
      leave<L>(s->o, at + 9, first, count, o);
    }
    return 0;
  }
  // Distances: q, k, v, the output's gradient, then the gradients of q, k and v.
  static int backward(const float* q, const float* k, const float* value, const float* d_o, float* dq, float* dk, float* dvalue,
                      const int64_t* at, float scale, int64_t n) {
    Work* s = work();
    if (!s) return 1;
    for (int64_t first = 0; first < n; first += LANES) {
      const int count = (int)least64(LANES, n - first);
      load_group(*s, q, k, value, at, first, count);
      enter<L>(d_o, at + 9, first, count, s->o);
      weights(*s, scale);
      for (int m = 0; m < M; m++) {
        const int from = CAUSAL ? least(m, L) : 0;
        mix(s->p + from * M + m, M, s->o + from * D, L - from, s->dvalue + m * D);
      }
      for (int l = 0; l < L; l++) {
        v* p = s->p + l * M;
        v dp[M], along = v{};
        dots(s->o + l * D, s->value, keys(l), dp);
        for (int m = 0; m < keys(l); m++) along += dp[m] * p[m];
        for (int m = 0; m < keys(l); m++) p[m] *= (dp[m] - along) * splat(scale);
        mix(p, 1, s->k, keys(l), s->dq + l * D);
      }
      for (int m = 0; m < M; m++) {
        const int from = CAUSAL ? least(m, L) : 0;
        mix(s->p + from * M + m, M, s->q + from * D, L - from, s->dk + m * D);
      }
      leave<L>(s->dq, at + 12, first, count, dq);
      leave<M>(s->dk, at + 15, first, count, dk);
      leave<M>(s->dvalue, at + 18, first, count, dvalue);
    }
    return 0;
  }
  static void load_group(Work& s, const float* q, const float* k, const float* value, const int64_t* at, int64_t first, int count) {
    enter<L>(q, at, first, count, s.q);
    enter<M>(k, at + 3, first, count, s.k);
    enter<M>(value, at + 6, first, count, s.value);
  }
  // y = sum of w_i x_i over n rows x_i of D features; the weights are `step` apart.
  static void mix(const v* w, int step, const v* x, int n, v* y) {
    constexpr int B = block(D, 12);
    for (int at = 0; at < D; at += B) {
      v acc[B];
      UNROLL for (int d = 0; d < B; d++) acc[d] = v{};
      if (at + B <= D)
        for (int i = 0; i < n; i++) { UNROLL for (int d = 0; d < B; d++) acc[d] += w[i * step] * x[i * D + at + d]; }
      else
        for (int i = 0; i < n; i++) for (int d = 0; d < D - at; d++) acc[d] += w[i * step] * x[i * D + at + d];
      for (int d = 0; d < least(B, D - at); d++) y[at + d] = acc[d];
    }
  }
};
