// ---- layers on images [n][y][x][channel] with the channels in the vector lanes ---------------------------------------
// No lane is empty, whatever the batch size; channels of outputs are multiples of LANES. Inputs are padded beforehand.

// Calls f(i, size) for blocks of n items; the size of a block, MOST but for the last one, is a constant in f.
template <int MOST, typename F>
static inline void in_blocks(int n, F f) {
  int i = 0;
  for (; i + MOST <= n; i += MOST) f(i, std::integral_constant<int, MOST>());
  if constexpr (MOST > 1)
    if (i < n) in_blocks<MOST - 1>(n - i, [&](int j, auto size) { f(i + j, size); });
}

// Convolutions as products without unfolding: for a kernel row, the KW * IC values that an output depends on are contiguous.
template <int IC, int H, int W, int OC, int KH, int KW, int SH, int SW>
struct Direct {
  static constexpr int OH = (H - KH) / SH + 1, OW = (W - KW) / SW + 1, ROW = KW * IC;
  static constexpr int P = panel(OC), WIDTH = P * LANES;
  static constexpr size_t PACKED = (size_t)KH * ROW * OC;

  // Weights [OC][IC][KH][KW] as panels [KH][KW][IC][WIDTH].
  static size_t place(int o, int ic, int ky, int kx) { return ((size_t)o / WIDTH * KH * ROW + (ky * KW + kx) * IC + ic) * WIDTH + o % WIDTH; }
  static void pack(const float* w, float* packed) {
    for (int o = 0; o < OC; o++)
      for (int ic = 0; ic < IC; ic++)
        for (int k = 0; k < KH * KW; k++) packed[place(o, ic, k / KW, k % KW)] = *w++;
  }
  static void unpack(const float* packed, float* grad, bool first) {
    for (int o = 0; o < OC; o++)
      for (int ic = 0; ic < IC; ic++)
        for (int k = 0; k < KH * KW; k++, grad++) *grad = packed[place(o, ic, k / KW, k % KW)] + (first ? 0.f : *grad);
  }

  static void forward(const float* x, const float* packed, const float* bias, float* y, int n) {
    constexpr int R = block(OW, ROOM / P);
    for (int o = 0; o < OC; o += WIDTH, packed += KH * ROW * WIDTH)
      for (int line = 0; line < n * OH; line++)
        in_blocks<R>(OW, [&](int x0, auto size) {
          constexpr int B = decltype(size)::value;
          v acc[B][P];
          UNROLL for (int j = 0; j < P; j++) { UNROLL for (int i = 0; i < B; i++) acc[i][j] = bias ? load(bias + o + j * LANES) : v{}; }
          for (int ky = 0; ky < KH; ky++) {
            const float* from = x + ((line / OH * H + line % OH * SH + ky) * (size_t)W + x0 * SW) * IC;
            for (int k = 0; k < ROW; k++) {
              v b[P];
              UNROLL for (int j = 0; j < P; j++) b[j] = load(packed + (ky * ROW + k) * WIDTH + j * LANES);
              UNROLL for (int i = 0; i < B; i++) {
                const v a = splat(from[i * SW * IC + k]);
                UNROLL for (int j = 0; j < P; j++) acc[i][j] += a * b[j];
              }
            }
          }
          float* to = y + ((size_t)line * OW + x0) * OC + o;
          UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < P; j++) store(to + i * OC + j * LANES, acc[i][j]); }
        });
  }

  // Panels of the weights' gradient.
  static void weights(const float* x, const float* dy, float* packed, int n) {
    for (int s = 0; s < n; s++)  // sample by sample, so that it stays in the cache
      for (int o = 0; o < OC; o += WIDTH)
        for (int ky = 0; ky < KH; ky++)
          in_blocks<block(ROW, ROOM / P)>(ROW, [&](int k, auto size) {
            constexpr int B = decltype(size)::value;
            float* to = packed + ((size_t)o / WIDTH * KH * ROW + ky * ROW + k) * WIDTH;
            v acc[B][P];
            UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < P; j++) acc[i][j] = s ? load(to + i * WIDTH + j * LANES) : v{}; }
            for (int y = 0; y < OH; y++) {
              const float* from = x + ((size_t)s * H + y * SH + ky) * W * IC + k;
              const float* d = dy + ((size_t)s * OH + y) * OW * OC + o;
              for (int c = 0; c < OW; c++) {
                v b[P];
                UNROLL for (int j = 0; j < P; j++) b[j] = load(d + c * OC + j * LANES);
                UNROLL for (int i = 0; i < B; i++) {
                  const v a = splat(from[c * SW * IC + i]);
                  UNROLL for (int j = 0; j < P; j++) acc[i][j] += a * b[j];
                }
              }
            }
            UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < P; j++) store(to + i * WIDTH + j * LANES, acc[i][j]); }
          });
  }

  // For the input gradient, whose channels are in the lanes, too: weights as panels [KH * KW][IC / width][OC][width].
  static constexpr int PI = panel(IC), WIDTH_I = PI * LANES;
  static void pack_turned(const float* w, float* turned) {
    for (int o = 0; o < OC; o++)
      for (int ic = 0; ic < IC; ic++)
        for (int k = 0; k < KH * KW; k++) turned[(((size_t)k * IC + ic / WIDTH_I * WIDTH_I) * OC) + o * WIDTH_I + ic % WIDTH_I] = *w++;
  }
  static void input(const float* dy, const float* turned, float* dx, int n) {
    memset(dx, 0, sizeof(float) * n * H * W * IC);
    for (int k = 0; k < KH * KW; k++)
      for (int c = 0; c < IC; c += WIDTH_I, turned += OC * WIDTH_I)
        for (int line = 0; line < n * OH; line++)
          in_blocks<block(OW, ROOM / PI)>(OW, [&](int x0, auto size) {
            constexpr int B = decltype(size)::value;
            const float* d = dy + ((size_t)line * OW + x0) * OC;
            float* to = dx + ((line / OH * H + line % OH * SH + k / KW) * (size_t)W + x0 * SW + k % KW) * IC + c;
            v acc[B][PI];
            UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < PI; j++) acc[i][j] = load(to + i * SW * IC + j * LANES); }
            for (int o = 0; o < OC; o++) {
              v b[PI];
              UNROLL for (int j = 0; j < PI; j++) b[j] = load(turned + o * WIDTH_I + j * LANES);
              UNROLL for (int i = 0; i < B; i++) {
                const v a = splat(d[i * OC + o]);
                UNROLL for (int j = 0; j < PI; j++) acc[i][j] += a * b[j];
              }
            }
            UNROLL for (int i = 0; i < B; i++) { UNROLL for (int j = 0; j < PI; j++) store(to + i * SW * IC + j * LANES, acc[i][j]); }
          });
  }
};

// The bias' gradient: the sum over all positions, in blocks, so that rounding errors do not grow with the number of positions.
template <int OC>
static void sum_positions(const float* dy, float* grad, size_t positions, bool first) {
  for (int o = 0; o < OC; o += LANES) {
    v total = first ? v{} : load(grad + o);
    for (size_t at = 0; at < positions; at += 64) {
      v s = v{};
      for (size_t p = at; p < positions && p < at + 64; p++) s += load(dy + p * OC + o);
      total += s;
    }
    store(grad + o, total);
  }
}

// Copies images into the middle of larger ones, whose border stays zero; and back.
template <int C, int H, int W, int PH, int PW>
static void pad(const float* in, float* out, int n) {
  for (int s = 0; s < n; s++)
    for (int y = 0; y < H; y++)
      memcpy(out + (((size_t)s * (H + 2 * PH) + y + PH) * (W + 2 * PW) + PW) * C, in + ((size_t)s * H + y) * W * C, sizeof(float) * W * C);
}
template <int C, int H, int W, int PH, int PW>
static void unpad(const float* in, float* out, int n) {
  for (int s = 0; s < n; s++)
    for (int y = 0; y < H; y++)
      memcpy(out + ((size_t)s * H + y) * W * C, in + (((size_t)s * (H + 2 * PH) + y + PH) * (W + 2 * PW) + PW) * C, sizeof(float) * W * C);
}

template <int C, int H, int W, int OH, int OW, int KH, int KW, int SH, int SW>
struct PoolLast {
  template <typename F>
  static inline void each(int n, F f) {  // f(first input of the window, output)
    for (int s = 0; s < n; s++)
      for (int y = 0; y < OH; y++)
        for (int x = 0; x < OW; x++)
          for (int c = 0; c < C; c += LANES) f((((size_t)s * H + y * SH) * W + x * SW) * C + c, (((size_t)s * OH + y) * OW + x) * C + c);
  }
  static constexpr int at(int k) { return (k / KW * W + k % KW) * C; }
  static void max_pool(const float* in, float* out, int n) {
    each(n, [&](size_t i, size_t o) {
      v m = load(in + i);
      UNROLL for (int k = 0; k < KH * KW; k++) m = larger(load(in + i + at(k)), m);
      store(out + o, m);
    });
  }
  // If several values are equally large, the first one gets the gradient, as in PyTorch.
  static void max_pool_back(const float* in, const float* out, const float* d, float* din, int n) {
    constexpr bool TILED = KH == SH && KW == SW && OH * SH == H && OW * SW == W;
    if (!TILED) memset(din, 0, sizeof(float) * n * H * W * C);
    each(n, [&](size_t i, size_t o) {
      const v m = load(out + o);
      v left = load(d + o);
      UNROLL for (int k = 0; k < KH * KW; k++) {
        const v q = load(in + i + at(k)), g = q == m ? left : v{};
        left = q == m ? v{} : left;
        store(din + i + at(k), TILED ? g : load(din + i + at(k)) + g);
      }
    });
  }
  static void avg_pool(const float* in, float* out, int n) {
    each(n, [&](size_t i, size_t o) {
      v s = v{};
      for (int k = 0; k < KH * KW; k++) s += load(in + i + at(k));
      store(out + o, s * splat(1.f / (KH * KW)));
    });
  }
  static void avg_pool_back(const float* d, float* din, int n) {
    memset(din, 0, sizeof(float) * n * H * W * C);
    each(n, [&](size_t i, size_t o) {
      const v g = load(d + o) * splat(1.f / (KH * KW));
      for (int k = 0; k < KH * KW; k++) store(din + i + at(k), load(din + i + at(k)) + g);
    });
  }
};
