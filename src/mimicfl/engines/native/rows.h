// ---- fully connected layers, samples and losses on rows [n][features] -----------------------------------------------

// y = x w' + bias. The inputs are in the lanes, so that weights are read in PyTorch's order.
template <int I, int O>
static void rows_linear(const float* x, const float* w, const float* bias, float* y, int n) {
  in_blocks<4>(O, [&](int o, auto outputs) {
    in_blocks<ROOM / 4>(n, [&](int s, auto samples) {
      constexpr int B = decltype(outputs)::value, S = decltype(samples)::value;
      v acc[B][S];
      UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < S; j++) acc[i][j] = v{}; }
      int k = 0;
      for (; k + LANES <= I; k += LANES) {
        v a[S];
        UNROLL for (int j = 0; j < S; j++) a[j] = load(x + (size_t)(s + j) * I + k);
        UNROLL for (int i = 0; i < B; i++) {
          const v b = load(w + (size_t)(o + i) * I + k);
          UNROLL for (int j = 0; j < S; j++) acc[i][j] += b * a[j];
        }
      }
      for (int i = 0; i < B; i++)
        for (int j = 0; j < S; j++) {
          float rest = bias ? bias[o + i] : 0.f;
          for (int q = k; q < I; q++) rest += w[(size_t)(o + i) * I + q] * x[(size_t)(s + j) * I + q];
          y[(s + j) * O + o + i] = sum_lanes(acc[i][j]) + rest;
        }
    });
  });
}

// The backward pass for COLUMNS inputs from k, four outputs at a time: dx = dy w, if wanted, then the weights' gradient dy' x, while
// these weights are in the first-level cache. The columns of x and dx are copied to rows that begin at different offsets in a page, because a load waits for an earlier store at the same offset.
template <int COLUMNS, int I, int O>
static inline void rows_linear_columns(const float* x, const float* w, const float* dy, float* dx, float* grad, int n, bool first,
                                       int k, float* room) {
  constexpr int KV = COLUMNS % (4 * LANES) == 0 ? 4 : 1, KX = KV == 4 ? 2 : 1, APART = COLUMNS + LANES;
  float *xs = room, *ds = room + n * APART;
  for (int s = 0; s < n; s++) memcpy(xs + s * APART, x + (size_t)s * I + k, sizeof(float) * COLUMNS);
  if (dx) memset(ds, 0, sizeof(float) * n * APART);
  in_blocks<4>(O, [&](int o, auto outputs) {
    constexpr int B = decltype(outputs)::value;
    for (int q = 0; dx && q < COLUMNS; q += KX * LANES) {
      v b[B][KX];
      UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < KX; j++) b[i][j] = load(w + (size_t)(o + i) * I + k + q + j * LANES); }
      for (int s = 0; s < n; s++) {
        float* to = ds + s * APART + q;
        v acc[KX];
        UNROLL for (int j = 0; j < KX; j++) acc[j] = load(to + j * LANES);
        UNROLL for (int i = 0; i < B; i++) {
          const v a = splat(dy[s * O + o + i]);
          UNROLL for (int j = 0; j < KX; j++) acc[j] += a * b[i][j];
        }
        UNROLL for (int j = 0; j < KX; j++) store(to + j * LANES, acc[j]);
      }
    }
    for (int q = 0; q < COLUMNS; q += KV * LANES) {
      v acc[B][KV];
      UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < KV; j++) acc[i][j] = v{}; }
      for (int s = 0; s < n; s++) {
        v b[KV];
        UNROLL for (int j = 0; j < KV; j++) b[j] = load(xs + s * APART + q + j * LANES);
        UNROLL for (int i = 0; i < B; i++) {
          const v a = splat(dy[s * O + o + i]);
          UNROLL for (int j = 0; j < KV; j++) acc[i][j] += a * b[j];
        }
      }
      UNROLL for (int i = 0; i < B; i++) {
        UNROLL for (int j = 0; j < KV; j++) {
          const size_t to = (size_t)(o + i) * I + k + q + j * LANES;
          store(grad + to, first ? acc[i][j] : load(grad + to) + acc[i][j]);
        }
      }
    }
  });
  for (int s = 0; dx && s < n; s++) memcpy(dx + (size_t)s * I + k, ds + s * APART, sizeof(float) * COLUMNS);
}
constexpr int COLUMNS_AT_ONCE = 16 * LANES;
constexpr size_t rows_linear_room(int group) { return 2 * (size_t)group * (COLUMNS_AT_ONCE + LANES); }
template <int I, int O>
static void rows_linear_back(const float* x, const float* w, const float* dy, float* dx, float* grad, float* grad_bias, int n, bool first,
                             float* room) {
  constexpr int WIDE = COLUMNS_AT_ONCE;
  int k = 0;
  for (; k + WIDE <= I; k += WIDE) rows_linear_columns<WIDE, I, O>(x, w, dy, dx, grad, n, first, k, room);
  for (; k + LANES <= I; k += LANES) rows_linear_columns<LANES, I, O>(x, w, dy, dx, grad, n, first, k, room);
  for (; k < I; k++) {
    for (int s = 0; dx && s < n; s++) {
      float sum = 0.f;
      for (int o = 0; o < O; o++) sum += dy[s * O + o] * w[(size_t)o * I + k];
      dx[(size_t)s * I + k] = sum;
    }
    for (int o = 0; o < O; o++) {
      float sum = 0.f;
      for (int s = 0; s < n; s++) sum += dy[s * O + o] * x[(size_t)s * I + k];
      grad[(size_t)o * I + k] = first ? sum : grad[(size_t)o * I + k] + sum;
    }
  }
  for (int o = 0; grad_bias && o < O; o++) {
    float sum = first ? 0.f : grad_bias[o];
    for (int s = 0; s < n; s++) sum += dy[s * O + o];
    grad_bias[o] = sum;
  }
}

// Samples [C][HW] as [HW][C]; uint8 samples are converted with a table of 256 input values per channel.
template <int C, int HW, typename T>
static void rows_gather(const T* pool, const float* table, const int64_t* rows, int count, float* x) {
  for (int s = 0; s < count; s++)
    for (int c = 0; c < C; c++) {
      const T* from = pool + ((size_t)rows[s] * C + c) * HW;
      float* to = x + (size_t)s * C * HW + c;
      for (int p = 0; p < HW; p++) {
        if constexpr (sizeof(T) == 1) to[p * C] = table[c * 256 + from[p]];
        else to[p * C] = from[p];
      }
    }
}
// [n][R][C] to [n][C][R]; C is a multiple of LANES.
template <int R, int C>
static void transpose(const float* in, float* out, int n) {
  for (; n-- > 0; in += R * C, out += R * C)
    for (int c = 0; c < C; c += LANES) {
      int r = 0;
      for (; r + LANES <= R; r += LANES) {
        v t[LANES];
        UNROLL for (int i = 0; i < LANES; i++) t[i] = load(in + (r + i) * C + c);
        turn(t);
        UNROLL for (int i = 0; i < LANES; i++) store(out + (c + i) * R + r, t[i]);
      }
      for (; r < R; r++)
        for (int i = 0; i < LANES; i++) out[(c + i) * R + r] = in[r * C + c + i];
    }
}
// [n][C][R] to [n][R][C].
template <int R, int C>
static void transpose_back(const float* in, float* out, int n) {
  for (; n-- > 0; in += R * C, out += R * C)
    for (int c = 0; c < C; c += LANES) {
      int r = 0;
      for (; r + LANES <= R; r += LANES) {
        v t[LANES];
        UNROLL for (int i = 0; i < LANES; i++) t[i] = load(in + (c + i) * R + r);
        turn(t);
        UNROLL for (int i = 0; i < LANES; i++) store(out + (r + i) * C + c, t[i]);
      }
      for (; r < R; r++)
        for (int i = 0; i < LANES; i++) out[r * C + c + i] = in[(c + i) * R + r];
    }
}

template <int C>
static double rows_cross_entropy(const float* z, const int64_t* target, const int64_t* rows, int count, int batch, float* d) {
  double total = 0;
  for (int s = 0; s < count; s++, z += C, d += C) {
    float m = z[0], sum = 0.f;
    for (int j = 1; j < C; j++) m = z[j] > m ? z[j] : m;
    for (int j = 0; j < C; j++) sum += d[j] = expf(z[j] - m);
    const int64_t y = target[rows[s]];
    for (int j = 0; j < C; j++) d[j] = (d[j] / sum - (j == y)) / batch;
    total += (double)(logf(sum) + m - z[y]) / batch;
  }
  return total;
}
// Half the mean squared error.
template <int C>
static double rows_squared_error(const float* z, const float* target, const int64_t* rows, int count, int batch, float* d) {
  double total = 0;
  for (int s = 0; s < count; s++)
    for (int j = 0; j < C; j++) {
      const float e = z[s * C + j] - target[rows[s] * C + j];
      d[s * C + j] = e / (batch * C);
      total += 0.5 * (double)e * e / (batch * C);
    }
  return total;
}
