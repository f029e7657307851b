// ---- 3x3 convolutions with stride 1 as Winograd's F(4x4, 3x3), channels last ----------------------------------------
// An output tile of 4x4 takes 36 multiplications per pair of channels instead of 144. Images are [n][y][x][channel], with the channels in
// the vector lanes (multiples of LANES). With U = G w G', V = B' d B: y = A' (U V) A, where U V is a matrix product per entry of the 6x6
// tile.
// The backward pass applies the transposed steps, so that tiles are the same in all three products:
// dM = A dy A', dd = B (dM U') B', dw = G' (V' dM) G.
// The points are 0, +-sqrt(1/2), +-sqrt(2) and infinity: float32 errors are several times smaller than with 0, +-1, +-2.

struct Points {
  static constexpr float a = 0.70710678118654752f, b = 1.4142135623730951f, a2 = 0.5f, b2 = 2.f;
  static constexpr float a3 = a * a2, b3 = b * b2, both = a2 + b2;  // a2 * b2 = 1
  static constexpr float na = 1 / (2 * a2 * (a2 - b2)), nb = 1 / (2 * b2 * (b2 - a2));
};

// One dimension of each transform: y = B' d, d = B y, y = A' m, m = A y, u = G g, g = G' u.
static inline void to_v(const v* d, v* y) {
  typedef Points P;
  const v ea = d[4] - splat(P::b2) * d[2], eb = d[4] - splat(P::a2) * d[2];
  const v oa = splat(P::a) * (d[3] - splat(P::b2) * d[1]), ob = splat(P::b) * (d[3] - splat(P::a2) * d[1]);
  y[0] = d[0] + d[4] - splat(P::both) * d[2];
  y[1] = ea + oa, y[2] = ea - oa, y[3] = eb + ob, y[4] = eb - ob;
  y[5] = d[1] + d[5] - splat(P::both) * d[3];
}
static inline void from_v(const v* y, v* d) {
  typedef Points P;
  const v sa = y[1] + y[2], da = y[1] - y[2], sb = y[3] + y[4], db = y[3] - y[4];
  d[0] = y[0];
  d[1] = y[5] - splat(P::a * P::b2) * da - splat(P::a2 * P::b) * db;
  d[2] = splat(-P::both) * y[0] - splat(P::b2) * sa - splat(P::a2) * sb;
  d[3] = splat(P::a) * da + splat(P::b) * db - splat(P::both) * y[5];
  d[4] = y[0] + sa + sb;
  d[5] = y[5];
}
static inline void from_m(const v* m, v* y) {
  typedef Points P;
  const v sa = m[1] + m[2], da = m[1] - m[2], sb = m[3] + m[4], db = m[3] - m[4];
  y[0] = m[0] + sa + sb;
  y[1] = splat(P::a) * da + splat(P::b) * db;
  y[2] = splat(P::a2) * sa + splat(P::b2) * sb;
  y[3] = splat(P::a3) * da + splat(P::b3) * db + m[5];
}
static inline void to_m(const v* y, v* m) {
  typedef Points P;
  const v ea = y[0] + splat(P::a2) * y[2], oa = splat(P::a) * y[1] + splat(P::a3) * y[3];
  const v eb = y[0] + splat(P::b2) * y[2], ob = splat(P::b) * y[1] + splat(P::b3) * y[3];
  m[0] = y[0], m[1] = ea + oa, m[2] = ea - oa, m[3] = eb + ob, m[4] = eb - ob, m[5] = y[3];
}
static inline void to_u(const v* g, v* u) {
  typedef Points P;
  const v ea = splat(P::na) * (g[0] + splat(P::a2) * g[2]), oa = splat(P::na * P::a) * g[1];
  const v eb = splat(P::nb) * (g[0] + splat(P::b2) * g[2]), ob = splat(P::nb * P::b) * g[1];
  u[0] = g[0], u[1] = ea + oa, u[2] = ea - oa, u[3] = eb + ob, u[4] = eb - ob, u[5] = g[2];
}
static inline void from_u(const v* u, v* g) {
  typedef Points P;
  const v sa = splat(P::na) * (u[1] + u[2]), da = splat(P::na * P::a) * (u[1] - u[2]);
  const v sb = splat(P::nb) * (u[3] + u[4]), db = splat(P::nb * P::b) * (u[3] - u[4]);
  g[0] = u[0] + sa + sb;
  g[1] = da + db;
  g[2] = splat(P::a2) * sa + splat(P::b2) * sb + u[5];
}

// Transforms a tile in both dimensions: F from N to K values, first along x, then along y.
template <int N, int K, void (*F)(const v*, v*)>
static inline void both_ways(const v (*in)[N], v (*out)[K]) {
  v half[K][N];  // transposed
  UNROLL for (int i = 0; i < N; i++) {
    v row[K];
    F(in[i], row);
    UNROLL for (int j = 0; j < K; j++) half[j][i] = row[j];
  }
  UNROLL for (int j = 0; j < K; j++) {
    v column[K];
    F(half[j], column);
    UNROLL for (int i = 0; i < K; i++) out[i][j] = column[i];
  }
}

// Columns of a product that are computed together, in vectors; panels of packed weights are as wide.
constexpr int panel(int channels) {
  const int vectors = channels / LANES;
  return vectors % 4 == 0 ? 4 : vectors % 3 == 0 ? 3 : vectors % 2 == 0 ? 2 : 1;
}

// out[rows][N] = a[rows][K] times u, whose panels are [K][P * LANES]. `rows` is a multiple of R.
template <int K, int N>
static void product(const float* a, const float* u, float* out, int rows) {
  constexpr int P = panel(N), R = ROOM / P, WIDTH = P * LANES;
  for (int n = 0; n < N; n += WIDTH, u += K * WIDTH)
    for (int r = 0; r < rows; r += R) {
      v acc[R][P];
      UNROLL for (int i = 0; i < R; i++) { UNROLL for (int j = 0; j < P; j++) acc[i][j] = v{}; }
      const float* x = a + (size_t)r * K;
      for (int k = 0; k < K; k++) {
        v b[P];
        UNROLL for (int j = 0; j < P; j++) b[j] = load(u + k * WIDTH + j * LANES);
        UNROLL for (int i = 0; i < R; i++) {
          const v s = splat(x[i * K + k]);
          UNROLL for (int j = 0; j < P; j++) acc[i][j] += s * b[j];
        }
      }
      UNROLL for (int i = 0; i < R; i++) { UNROLL for (int j = 0; j < P; j++) store(out + (size_t)(r + i) * N + n + j * LANES, acc[i][j]); }
    }
}

// out, in panels [K][P * LANES], = or += the transposed a[rows][K] times d[rows][N].
template <int K, int N>
static void outer(const float* a, const float* d, float* out, int rows, bool first) {
  constexpr int P = panel(N), R = block(K, ROOM / P), WIDTH = P * LANES;
  static_assert(K % R == 0, "channels are multiples of 16");
  for (int n = 0; n < N; n += WIDTH, out += K * WIDTH)
    for (int k = 0; k < K; k += R) {
      v acc[R][P];
      UNROLL for (int i = 0; i < R; i++) {
        UNROLL for (int j = 0; j < P; j++) acc[i][j] = first ? v{} : load(out + (k + i) * WIDTH + j * LANES);
      }
      for (int r = 0; r < rows; r++) {
        v b[P];
        UNROLL for (int j = 0; j < P; j++) b[j] = load(d + (size_t)r * N + n + j * LANES);
        UNROLL for (int i = 0; i < R; i++) {
          const v s = splat(a[(size_t)r * K + k + i]);
          UNROLL for (int j = 0; j < P; j++) acc[i][j] += s * b[j];
        }
      }
      UNROLL for (int i = 0; i < R; i++) { UNROLL for (int j = 0; j < P; j++) store(out + (k + i) * WIDTH + j * LANES, acc[i][j]); }
    }
}

template <int IC, int H, int W, int OC, int PH, int PW>
struct Winograd {
  static constexpr int OH = H + 2 * PH - 2, OW = W + 2 * PW - 2, TY = (OH + 3) / 4, TX = (OW + 3) / 4;
  static constexpr int RI = ROOM / panel(IC), RO = ROOM / panel(OC);
  static constexpr int up(int n, int by) { return (n + by - 1) / by * by; }
  // Tiles that are transformed together: both of their transforms should fit into a second-level cache of 1 MB.
  static constexpr int CHUNK = up(most(24, least(96, 786432 / (144 * (IC + OC)))), most(RI, RO));
  static constexpr int ROWS = most(up(CHUNK, RI), up(CHUNK, RO));  // products are computed in blocks of RI or RO tiles
  // The 36 matrices lie one line apart, so that the entries of a tile do not share a set of the cache.
  static constexpr size_t V = (size_t)ROWS * IC + 16, M = (size_t)ROWS * OC + 16, U = (size_t)IC * OC + 16;
  static constexpr size_t FORWARD = 36 * (V + M), BACKWARD = 36 * (2 * V + M + U);  // floats of workspace
  static constexpr size_t WORK = FORWARD > BACKWARD ? FORWARD : BACKWARD, PACKED = 36 * U;
  static_assert(IC % LANES == 0 && OC % LANES == 0, "channels are in the lanes");

  struct Place {  // of a tile: its sample, and the position of its first output
    int64_t n;
    int y, x;
    explicit Place(int64_t tile) : n(tile / (TY * TX)), y(tile / TX % TY * 4), x(tile % TX * 4) {}
  };

  // Weights [OC][IC][3][3] as panels; TURN: as panels of IC, for the input gradient.
  template <bool TURN>
  static void pack(const float* w, float* u) {
    constexpr int K = TURN ? OC : IC, N = TURN ? IC : OC, WIDTH = panel(N) * LANES;
    for (int n = 0; n < N; n += WIDTH)
      for (int k = 0; k < K; k++)
        for (int j = 0; j < WIDTH; j += LANES) {
          v g[3][3], t[6][6];
          for (int l = 0; l < LANES; l++) {
            const int channel = n + j + l;
            const float* from = w + (size_t)(TURN ? k * IC + channel : channel * IC + k) * 9;
            for (int i = 0; i < 9; i++) ((float*)g)[i * LANES + l] = from[i];
          }
          both_ways<3, 6, to_u>(g, t);
          UNROLL for (int e = 0; e < 36; e++) store(u + e * U + (size_t)n * K + k * WIDTH + j, t[e / 6][e % 6]);
        }
  }
  // The gradient of the weights from that of the panels.
  static void unpack(const float* u, float* grad, bool first) {
    constexpr int WIDTH = panel(OC) * LANES;
    for (int n = 0; n < OC; n += WIDTH)
      for (int k = 0; k < IC; k++)
        for (int j = 0; j < WIDTH; j += LANES) {
          v t[6][6], g[3][3];
          UNROLL for (int e = 0; e < 36; e++) t[e / 6][e % 6] = load(u + e * U + (size_t)n * IC + k * WIDTH + j);
          both_ways<6, 3, from_u>(t, g);
          for (int l = 0; l < LANES; l++) {
            float* to = grad + ((size_t)(n + j + l) * IC + k) * 9;
            for (int i = 0; i < 9; i++) to[i] = first ? ((float*)g)[i * LANES + l] : to[i] + ((float*)g)[i * LANES + l];
          }
        }
  }

  static void image_tiles(const float* x, int64_t begin, int count, float* out) {
    for (int t = 0; t < count; t++) {
      const Place at(begin + t);
      const int y = at.y - PH, x0 = at.x - PW;
      const float* from = x + at.n * H * W * IC;
      for (int c = 0; c < IC; c += LANES) {
        v d[6][6], m[6][6];
        if (y >= 0 && x0 >= 0 && y + 6 <= H && x0 + 6 <= W) {
          UNROLL for (int e = 0; e < 36; e++) d[e / 6][e % 6] = load(from + ((y + e / 6) * W + x0 + e % 6) * IC + c);
        } else {
          for (int i = 0; i < 6; i++)
            for (int j = 0; j < 6; j++) {
              const bool inside = y + i >= 0 && y + i < H && x0 + j >= 0 && x0 + j < W;
              d[i][j] = inside ? load(from + ((y + i) * W + x0 + j) * IC + c) : v{};
            }
        }
        both_ways<6, 6, to_v>(d, m);
        UNROLL for (int e = 0; e < 36; e++) store(out + e * V + t * IC + c, m[e / 6][e % 6]);
      }
    }
  }
  // Adds the gradient of the tiles to dx, where tiles overlap.
  static void add_tiles(const float* in, int64_t begin, int count, float* dx) {
    for (int t = 0; t < count; t++) {
      const Place at(begin + t);
      const int y = at.y - PH, x0 = at.x - PW;
      float* to = dx + at.n * H * W * IC;
      for (int c = 0; c < IC; c += LANES) {
        v m[6][6], d[6][6];
        UNROLL for (int e = 0; e < 36; e++) m[e / 6][e % 6] = load(in + e * V + t * IC + c);
        both_ways<6, 6, from_v>(m, d);
        for (int i = most(0, -y); i < least(6, H - y); i++)
          for (int j = most(0, -x0); j < least(6, W - x0); j++) {
            float* p = to + ((y + i) * W + x0 + j) * IC + c;
            store(p, load(p) + d[i][j]);
          }
      }
    }
  }
  static void output_tiles(const float* in, const float* bias, int64_t begin, int count, float* y) {
    for (int t = 0; t < count; t++) {
      const Place at(begin + t);
      float* to = y + ((at.n * OH + at.y) * OW + at.x) * OC;
      for (int c = 0; c < OC; c += LANES) {
        const v b = bias ? load(bias + c) : v{};
        v m[6][6], d[4][4];
        UNROLL for (int e = 0; e < 36; e++) m[e / 6][e % 6] = load(in + e * M + t * OC + c);
        both_ways<6, 4, from_m>(m, d);
        for (int i = 0; i < least(4, OH - at.y); i++)
          for (int j = 0; j < least(4, OW - at.x); j++) store(to + (i * OW + j) * OC + c, d[i][j] + b);
      }
    }
  }
  static void gradient_tiles(const float* dy, int64_t begin, int count, float* out) {
    for (int t = 0; t < count; t++) {
      const Place at(begin + t);
      const float* from = dy + ((at.n * OH + at.y) * OW + at.x) * OC;
      for (int c = 0; c < OC; c += LANES) {
        v d[4][4], m[6][6];
        for (int i = 0; i < 4; i++)
          for (int j = 0; j < 4; j++) d[i][j] = at.y + i < OH && at.x + j < OW ? load(from + (i * OW + j) * OC + c) : v{};
        both_ways<4, 6, to_m>(d, m);
        UNROLL for (int e = 0; e < 36; e++) store(out + e * M + t * OC + c, m[e / 6][e % 6]);
      }
    }
  }

  // Images [n][y][x][channel]; u: packed weights.
  static void forward(const float* x, const float* u, const float* bias, float* y, int64_t n, float* work) {
    float *tiles = work, *products = tiles + 36 * V;
    const int64_t all = n * TY * TX;
    for (int64_t at = 0; at < all; at += CHUNK) {
      const int count = (int)(all - at < CHUNK ? all - at : CHUNK);
      image_tiles(x, at, count, tiles);
      for (int e = 0; e < 36; e++) product<IC, OC>(tiles + e * V, u + e * U, products + e * M, up(count, RO));
      output_tiles(products, bias, at, count, y);
    }
  }
  // u: weights packed for the input gradient. dx or dw may be null.
  static void backward(const float* x, const float* u, const float* dy, float* dx, float* dw, bool first, int64_t n, float* work) {
    float *tiles = work, *d = tiles + 36 * V, *m = d + 36 * V, *du = m + 36 * M;
    if (dx) memset(dx, 0, sizeof(float) * n * H * W * IC);
    const int64_t all = n * TY * TX;
    for (int64_t at = 0; at < all; at += CHUNK) {
      const int count = (int)(all - at < CHUNK ? all - at : CHUNK);
      gradient_tiles(dy, at, count, m);
      if (dw) {
        image_tiles(x, at, count, tiles);
        for (int e = 0; e < 36; e++) outer<IC, OC>(tiles + e * V, m + e * M, du + e * U, count, at == 0);
      }
      if (dx) {
        for (int e = 0; e < 36; e++) product<OC, IC>(m + e * M, u + e * U, d + e * V, up(count, RI));
        add_tiles(d, at, count, dx);
      }
    }
    if (dw) unpack(du, dw, first);
  }
};
