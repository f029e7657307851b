// Single layers for models that are not chains: PyTorch's memory layout outside, the lanes of vectors.h inside.

// Loads samples [count, F] into lanes; lanes without a sample are zero.
template <int F>
static void enter(const float* samples, int count, v* x) {
  int64_t rows[LANES];
  for (int s = 0; s < LANES; s++) rows[s] = s;
  gather<F, 1>(samples, nullptr, rows, count, x);
  if (count < LANES)
    for (int f = 0; f < F; f++)
      for (int s = count; s < LANES; s++) ((float*)x)[f * LANES + s] = 0.f;
}
// Stores the lanes as samples [count, F].
template <int F>
static void leave(const v* x, int count, float* samples) {
  int f = 0;
  for (; f + LANES <= F; f += LANES) {
    v r[LANES];
    UNROLL for (int j = 0; j < LANES; j++) r[j] = x[f + j];
    turn(r);
    for (int s = 0; s < count; s++) store(samples + (size_t)s * F + f, r[s]);
  }
  for (; f < F; f++)
    for (int s = 0; s < count; s++) samples[(size_t)s * F + f] = ((const float*)x)[f * LANES + s];
}

template <int IC, int H, int W, int OC, int KH, int KW, int SH, int SW, int PH, int PW>
struct Convolution {
  static constexpr int IH = H + 2 * PH, IW = W + 2 * PW, OH = (IH - KH) / SH + 1, OW = (IW - KW) / SW + 1;
  static constexpr int ROWS = (OH - 1) * SH + 1, COLUMNS = (OW - 1) * SW + 1;
  static constexpr int EH = ROWS + 2 * (KH - 1), EW = COLUMNS + 2 * (KW - 1), VH = ROWS + KH - 1, VW = COLUMNS + KW - 1;
  struct Work {
    alignas(64) v raw[IC * H * W];
    alignas(64) v in[IC * IH * IW];  // the border stays zero
    alignas(64) v out[OC * OH * OW];
    alignas(64) v apart[OC * EH * EW];  // the output gradient, spread by the stride, with a border of zeros
    alignas(64) v seen[IC * VH * VW];
    alignas(64) float packed[IC * OC * KH * KW];
  };
  static Work* work() {
    static thread_local Work* own = (Work*)room(sizeof(Work));
    return own;
  }
  static const v* inputs(Work& s, const float* x, int count) {
    enter<IC * H * W>(x, count, s.raw);
    if constexpr (PH == 0 && PW == 0) return s.raw;
    spread<IC, H, W, IH, IW, PH, PW, 1, 1>(s.raw, s.in);
    return s.in;
  }
  static int forward(const float* x, const float* w, const float* bias, float* y, int64_t batch) {
    Work* s = work();
    if (!s) return 1;
    pack<IC, OC, KH, KW, false>(w, s->packed);
    for (int64_t at = 0; at < batch; at += LANES) {
      const int count = (int)(batch - at < LANES ? batch - at : LANES);
      conv<IC, IH, IW, OC, KH, KW, SH, SW, OH, OW, PH, H, PW, W>(inputs(*s, x + at * IC * H * W, count), s->packed, bias, s->out);
      leave<OC * OH * OW>(s->out, count, y + at * OC * OH * OW);
    }
    return 0;
  }
  static int backward(const float* x, const float* w, const float* dy, float* dx, float* dw, float* dbias, int64_t batch) {
    Work* s = work();
    if (!s) return 1;
    if (dx) pack<OC, IC, KH, KW, true>(w, s->packed);
    for (int64_t at = 0; at < batch; at += LANES) {
      const int count = (int)(batch - at < LANES ? batch - at : LANES);
      const v* in = inputs(*s, x + at * IC * H * W, count);
      enter<OC * OH * OW>(dy + at * OC * OH * OW, count, s->out);
      conv_weights<IC, IH, IW, OC, KH, KW, SH, SW, OH, OW>(in, s->out, dw, dbias, at == 0);
      if (!dx) continue;
      spread<OC, OH, OW, EH, EW, KH - 1, KW - 1, SH, SW>(s->out, s->apart);
      conv<OC, EH, EW, IC, KH, KW, 1, 1, VH, VW, KH - 1, ROWS, KW - 1, COLUMNS>(s->apart, s->packed, nullptr, s->seen);
      crop<IC, H, W, VH, VW, PH, PW>(s->seen, s->raw);
      leave<IC * H * W>(s->raw, count, dx + at * IC * H * W);
    }
    return 0;
  }
};

// A workspace for one layer at a time, kept for the next one.
static float* scratch(size_t floats) {
  static thread_local float* own = nullptr;
  static thread_local size_t size = 0;
  if (floats > size) {
    release(own);
    own = (float*)room(sizeof(float) * floats);
    size = own ? floats : 0;
  }
  return own;
}

// 3x3 convolutions with stride 1, images channels last.
template <int IC, int H, int W, int OC, int KH, int KW, int SH, int SW, int PH, int PW>
struct ChannelsLast {
  static_assert(KH == 3 && KW == 3 && SH == 1 && SW == 1, "");
  typedef Winograd<IC, H, W, OC, PH, PW> Tiles;
  static int forward(const float* x, const float* w, const float* bias, float* y, int64_t batch) {
    float* s = scratch(Tiles::PACKED + Tiles::FORWARD);
    if (!s) return 1;
    Tiles::template pack<false>(w, s);
    Tiles::forward(x, s, bias, y, batch, s + Tiles::PACKED);
    return 0;
  }
  static int backward(const float* x, const float* w, const float* dy, float* dx, float* dw, float* dbias, int64_t batch) {
    float* s = scratch(Tiles::PACKED + Tiles::BACKWARD);
    if (!s) return 1;
    if (dx) Tiles::template pack<true>(w, s);
    Tiles::backward(x, s, dy, dx, dw, true, batch, s + Tiles::PACKED);
    if (dbias) sum_positions<OC>(dy, dbias, (size_t)batch * Tiles::OH * Tiles::OW, true);
    return 0;
  }
};

// Max pooling of planes [n, H, W]; `place` stores the position in the window for the backward pass. As in PyTorch, the first of equal
// values wins and NaN stays NaN. There are no branches and rows are processed one by one, so that the compiler can vectorise over windows.
template <int H, int W, int KH, int KW, int SH, int SW>
struct MaxPool {
  static constexpr int OH = (H - KH) / SH + 1, OW = (W - KW) / SW + 1;
  static constexpr bool APART = KH <= SH && KW <= SW;  // windows do not overlap
  static void forward(const float* x, float* y, int32_t* place, int64_t planes) {
    for (int64_t n = 0; n < planes; n++, x += H * W)
      for (int i = 0; i < OH; i++, y += OW, place += OW) {
        const float* p = x + i * SH * W;
        for (int j = 0; j < OW; j++) {
          float m = p[j * SW];
          int32_t at = 0;
          UNROLL for (int k = 1; k < KH * KW; k++) {
            const float q = p[k / KW * W + j * SW + k % KW];
            const bool more = (q > m) | (q != q);
            m = more ? q : m;
            at = more ? k : at;
          }
          y[j] = m;
          place[j] = at;
        }
      }
  }
  static void backward(const float* dy, const int32_t* place, float* dx, int64_t planes) {
    memset(dx, 0, sizeof(float) * planes * H * W);
    for (int64_t n = 0; n < planes; n++, dx += H * W)
      for (int i = 0; i < OH; i++, dy += OW, place += OW) {
        float* p = dx + i * SH * W;
        for (int j = 0; j < OW; j++) {
          float& q = p[place[j] / KW * W + j * SW + place[j] % KW];
          q = APART ? dy[j] : q + dy[j];
        }
      }
  }
};

// The same for images [n, H, W, C], with channels in the lanes.
template <int C, int H, int W, int KH, int KW, int SH, int SW>
struct MaxPoolLast {
  static constexpr int OH = (H - KH) / SH + 1, OW = (W - KW) / SW + 1, WHOLE = C / LANES * LANES;
  static constexpr bool APART = KH <= SH && KW <= SW, COVERED = KH == SH && KW == SW && H % KH == 0 && W % KW == 0;
  template <typename F, typename I>
  static inline void best(const float* p, float* y, int32_t* place) {
    F m, q;
    I at = {};
    memcpy(&m, p, sizeof(F));
    UNROLL for (int k = 1; k < KH * KW; k++) {
      memcpy(&q, p + (k / KW * W + k % KW) * C, sizeof(F));
      const auto more = (q > m) | (q != q);
      m = more ? q : m;
      at = more ? I{} + k : at;
    }
    memcpy(y, &m, sizeof(F));
    memcpy(place, &at, sizeof(I));
  }
  template <typename F, typename I>
  static inline void send_back(const float* dy, const int32_t* place, float* p) {
    F h, q;
    I at;
    memcpy(&h, dy, sizeof(F));
    memcpy(&at, place, sizeof(I));
    UNROLL for (int k = 0; k < KH * KW; k++) {
      float* to = p + (k / KW * W + k % KW) * C;
      if (!APART) memcpy(&q, to, sizeof(F));
      const F part = at == I{} + k ? h : F{};
      q = APART ? part : q + part;
      memcpy(to, &q, sizeof(F));
    }
  }
  static void forward(const float* x, float* y, int32_t* place, int64_t images) {
    for (int64_t n = 0; n < images; n++, x += H * W * C)
      for (int i = 0; i < OH; i++)
        for (int j = 0; j < OW; j++, y += C, place += C) {
          const float* p = x + (i * SH * W + j * SW) * C;
          for (int c = 0; c < WHOLE; c += LANES) best<v, vi>(p + c, y + c, place + c);
          for (int c = WHOLE; c < C; c++) best<float, int32_t>(p + c, y + c, place + c);
        }
  }
  static void backward(const float* dy, const int32_t* place, float* dx, int64_t images) {
    if (!COVERED) memset(dx, 0, sizeof(float) * images * H * W * C);
    for (int64_t n = 0; n < images; n++, dx += H * W * C)
      for (int i = 0; i < OH; i++)
        for (int j = 0; j < OW; j++, dy += C, place += C) {
          float* p = dx + (i * SH * W + j * SW) * C;
          for (int c = 0; c < WHOLE; c += LANES) send_back<v, vi>(dy + c, place + c, p + c);
          for (int c = WHOLE; c < C; c++) send_back<float, int32_t>(dy + c, place + c, p + c);
        }
  }
};
