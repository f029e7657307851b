// Layers of a network whose activations are [feature][LANES], one sample per lane. The gradient of an activation replaces it.
enum Activation { NONE, RELU, TANH };

// NaN stays NaN, so that divergence is detected.
template <Activation A>
DEVICE float activate(float x) {
  if constexpr (A == RELU) return x < 0.f ? 0.f : x;
  if constexpr (A == TANH) return tanhf(x);
  return x;
}
// The gradient before an activation with output y, from the gradient d after it.
template <Activation A>
DEVICE float deactivate(float y, float d) {
  if constexpr (A == RELU) return y <= 0.f ? 0.f : d;
  if constexpr (A == TANH) return d * (1.f - y * y);
  return d;
}

// A local step: where the parameters are, and how gradients are applied to them. SHIFT, PROX, MOMENTUM, PARTS, FIRST and LAST say what the
// clients of a program may have; code for the rest is left out, because a step's code should fit into the instruction cache.
struct Step {
  float* w;
  float* g;
  float* u;           // momentum; null without
  float* sum;         // gradient of the earlier parts of a batch
  const float* w0;
  const float* shift;  // null without
  float* sent_first;   // the gradient of the first step
  float* sent_last;    // and of the last
  float eta, mu, beta, decay;
  bool first, last;      // part of the batch
  bool opening, closing;  // step of the client

  // h = grad + shift + mu (w - w_t), replaced by u = beta u + h if there is momentum; w -= eta h, g += h, for N parameters from k on, each
  // STRIDE apart, of which `count` exist. Their loads come before the first store, so that they wait for memory together. Returns whether the
  // parameters changed; h is then their new value.
  template <int STRIDE, int N>
  DEVICE_MEMBER bool apply(int k, float (&h)[N], int count) const {
#define MOST(n) UNROLL for (int n = 0; n < N; n++) if (n < count)
    if (PARTS && !first) MOST(n) h[n] += sum[k + n * STRIDE];
    if (PARTS && !last) {
      MOST(n) sum[k + n * STRIDE] = h[n];
      return false;
    }
    float now[N], total[N];
    MOST(n) now[n] = w[k + n * STRIDE], total[n] = load_once(g + k + n * STRIDE);
    if (FIRST && opening) MOST(n) sent_first[k + n * STRIDE] = h[n] + decay * now[n];
    if (LAST && closing) MOST(n) sent_last[k + n * STRIDE] = h[n] + decay * now[n];
    if (SHIFT && shift) MOST(n) h[n] += shift[k + n * STRIDE];
    if (PROX && mu != 0.f) MOST(n) h[n] += mu * (now[n] - w0[k + n * STRIDE]);
    if (MOMENTUM && u) {
      MOST(n) h[n] += beta * u[k + n * STRIDE];
      MOST(n) u[k + n * STRIDE] = h[n];
    }
    MOST(n) {
      store_once(g + k + n * STRIDE, total[n] + h[n]);
      w[k + n * STRIDE] = h[n] = now[n] - eta * h[n];
    }
#undef MOST
    return true;
  }
};

// ---- convolution, max pooling and activation in one ------------------------------------------------------------------

// An image of H x W with a border of P zeros; channels are STRIDE features apart.
template <int C_, int H_, int W_, int P_, int STRIDE_>
struct Image {
  static constexpr int C = C_, H = H_, W = W_, P = P_, STRIDE = STRIDE_, ROW = W_ + 2 * P_, ROWS = H_ + 2 * P_;
  static DEVICE_MEMBER int at(int c, int y, int x) { return c * STRIDE + (y + P) * ROW + x + P; }
};

// In and Out are Images; the kernel is KH x KW, the stride SH x SW, the pooling window PH x PW (1 x 1: none). A thread computes TY x TX
// windows of G channels in the forward pass; GW channels in the gradient of the weights, over 1/SPLIT of the windows; NY x NX pixels of GI
// channels in the gradient of the input.
template <class In, class Out, int KH, int KW, int SH, int SW, int PH, int PW, int TY, int TX, int G, int GW, int SPLIT, int GI, int NY, int NX,
          Activation A>
struct Conv {
  static constexpr int IC = In::C, OC = Out::C, TAPS = KH * KW, WEIGHTS = IC * OC * TAPS;
  static constexpr int GROUPS = (OC + G - 1) / G, OCP = GROUPS * pad(G), IGROUPS = GI > 0 ? (IC + GI - 1) / (GI > 0 ? GI : 1) : 0, ICP = IGROUPS * pad(GI);
  static constexpr int WGROUPS = (OC + GW - 1) / GW;
  static constexpr int DOWN = (Out::H + TY - 1) / TY, ACROSS = (Out::W + TX - 1) / TX;  // tiles of windows
  static constexpr int MY = TY * PH, MX = TX * PW, RY = (MY - 1) * SH + KH, RX = (MX - 1) * SW + KW;
  static constexpr bool POOLED = PH * PW > 1;

  // The weights w[OC][IC][KH][KW] with the channels innermost: ahead[IC][tap][OCP], back[OC][tap][ICP].
  static DEVICE_MEMBER void pack(const float* w, float* ahead, float* back) {
    EACH(k, IC * TAPS * OCP) {
      const int c = k % OCP / pad(G) * G + k % pad(G), rest = k / OCP;
      ahead[k] = k % pad(G) < G && c < OC ? w[(c * IC + rest / TAPS) * TAPS + rest % TAPS] : 0.f;
    }
    if constexpr (GI > 0) EACH(k, OC * TAPS * ICP) {
      const int c = k % ICP / pad(GI) * GI + k % pad(GI), rest = k / ICP;
      back[k] = k % pad(GI) < GI && c < IC ? w[(rest / TAPS * IC + c) * TAPS + rest % TAPS] : 0.f;
    }
  }

  // The RY x RX inputs of a tile of windows. Tiles at the edge read no further than the image.
  static DEVICE_MEMBER void patch(const float* in, int c, int y, int x, int lane, float (&p)[RY][RX]) {
    UNROLL for (int i = 0; i < RY; i++) {
      UNROLL for (int j = 0; j < RX; j++) {
        int row = y * MY * SH + i, column = x * MX * SW + j;
        if constexpr (Out::H % TY != 0) row = row < In::ROWS ? row : In::ROWS - 1;
        if constexpr (Out::W % TX != 0) column = column < In::ROW ? column : In::ROW - 1;
        p[i][j] = in[(c * In::STRIDE + row * In::ROW + column) * LANES + lane];
      }
    }
  }

  static DEVICE_MEMBER void forward(const float* in, const float* ahead, const float* bias, float* out, uint8_t* place) {
    EACH(item, LANES * GROUPS * DOWN * ACROSS) {
      const int lane = item % LANES, group = item / LANES % GROUPS, tile = item / (LANES * GROUPS), y = tile / ACROSS, x = tile % ACROSS;
      float sum[G][MY][MX], p[RY][RX], k[pad(G)];
      UNROLL for (int o = 0; o < G; o++) {
        const float b = bias && group * G + o < OC ? bias[group * G + o] : 0.f;
        UNROLL for (int i = 0; i < MY; i++) { UNROLL for (int j = 0; j < MX; j++) sum[o][i][j] = b; }
      }
      LOOP for (int c = 0; c < IC; c++) {
        patch(in, c, y, x, lane, p);
        UNROLL for (int ky = 0; ky < KH; ky++) {
          UNROLL for (int kx = 0; kx < KW; kx++) {
            load(ahead + (c * TAPS + ky * KW + kx) * OCP + group * pad(G), k);
            UNROLL for (int o = 0; o < G; o++) {
              UNROLL for (int i = 0; i < MY; i++) {
                UNROLL for (int j = 0; j < MX; j++) sum[o][i][j] += k[o] * p[i * SH + ky][j * SW + kx];
              }
            }
          }
        }
      }
      UNROLL for (int o = 0; o < G; o++) {
        UNROLL for (int i = 0; i < TY; i++) {
          UNROLL for (int j = 0; j < TX; j++) {
            const int channel = group * G + o, row = y * TY + i, column = x * TX + j;
            float most = sum[o][i * PH][j * PW];
            int at = 0;
            UNROLL for (int q = 1; q < PH * PW; q++) {
              const float other = sum[o][i * PH + q / PW][j * PW + q % PW];
              const bool more = other > most || other != other;  // as in PyTorch, the first of equal values wins and NaN stays NaN
              most = more ? other : most;
              at = more ? q : at;
            }
            if (channel < OC && row < Out::H && column < Out::W) {
              out[Out::at(channel, row, column) * LANES + lane] = activate<A>(most);
              if (POOLED && place) place[((channel * Out::H + row) * Out::W + column) * LANES + lane] = (uint8_t)at;
            }
          }
        }
      }
    }
  }

  // The gradient before pooling in the window (channel, row, column), at each of its PH x PW positions.
  static DEVICE_MEMBER void window(const float* d, const uint8_t* place, int channel, int row, int column, int lane, float (&e)[PH][PW]) {
    const bool inside = channel < OC && row >= 0 && row < Out::H && column >= 0 && column < Out::W;
    const float value = inside ? d[Out::at(channel, row, column) * LANES + lane] : 0.f;
    int at = 0;
    if constexpr (POOLED) at = inside ? place[((channel * Out::H + row) * Out::W + column) * LANES + lane] : 0;
    UNROLL for (int i = 0; i < PH; i++) { UNROLL for (int j = 0; j < PW; j++) e[i][j] = at == i * PW + j ? value : 0.f; }
  }

  // parts[SPLIT][WEIGHTS + OC]: the gradients of weights and biases.
  static DEVICE_MEMBER void weights(const float* in, const float* d, const uint8_t* place, float* parts) {
    EACH(item, LANES * IC * WGROUPS * SPLIT) {
      const int lane = item % LANES, c = item / LANES % IC, group = item / (LANES * IC) % WGROUPS, split = item / (LANES * IC * WGROUPS);
      float sum[GW * TAPS + GW], p[RY][RX], e[PH][PW];
      UNROLL for (int j = 0; j < GW * TAPS + GW; j++) sum[j] = 0.f;
      LOOP for (int tile = split; tile < DOWN * ACROSS; tile += SPLIT) {
        const int y = tile / ACROSS, x = tile % ACROSS;
        patch(in, c, y, x, lane, p);
        UNROLL for (int o = 0; o < GW; o++) {
          UNROLL for (int w = 0; w < TY * TX; w++) {
            const int oy = w / TX * PH * SH, ox = w % TX * PW * SW;
            window(d, place, group * GW + o, y * TY + w / TX, x * TX + w % TX, lane, e);
            UNROLL for (int i = 0; i < PH; i++) {
              UNROLL for (int j = 0; j < PW; j++) {
                sum[GW * TAPS + o] += e[i][j];
                UNROLL for (int tap = 0; tap < TAPS; tap++)
                  sum[o * TAPS + tap] += e[i][j] * p[oy + i * SH + tap / KW][ox + j * SW + tap % KW];
              }
            }
          }
        }
      }
      float* part = parts + split * (WEIGHTS + OC);
      lane_sums(sum, lane, [&](int j, float value) {
        const int channel = group * GW + (j < GW * TAPS ? j / TAPS : j - GW * TAPS);
        if (channel >= OC) return;
        if (j < GW * TAPS) part[(channel * IC + c) * TAPS + j % TAPS] = value;
        else if (c == 0) part[WEIGHTS + channel] = value;
      });
    }
  }
  // Also keeps the packed weights up to date.
  static DEVICE_MEMBER void apply(const float* parts, const Step& step, int weight, int bias, float* ahead, float* back) {
    constexpr int N = WEIGHTS > 4 * THREADS ? 8 : WEIGHTS > THREADS ? 4 : 1, ITEMS = (WEIGHTS + N - 1) / N, COUNT = WEIGHTS + OC;
    LOOP EACH(item, ITEMS + (bias < 0 ? 0 : OC)) {
      if (item >= ITEMS) {
        const int o = item - ITEMS;
        float h[1] = {0.f};
        UNROLL for (int s = 0; s < SPLIT; s++) h[0] += parts[s * COUNT + WEIGHTS + o];
        step.apply<1>(bias + o, h, 1);
        continue;
      }
      float h[N];
      const int count = (WEIGHTS - item + ITEMS - 1) / ITEMS;
      UNROLL for (int n = 0; n < N; n++) {
        h[n] = 0.f;
        if (n < count) UNROLL for (int s = 0; s < SPLIT; s++) h[n] += parts[s * COUNT + item + n * ITEMS];
      }
      if (!step.apply<ITEMS>(weight + item, h, count)) continue;
      UNROLL for (int n = 0; n < N; n++) {
        const int j = item + n * ITEMS, tap = j % TAPS, c = j / TAPS % IC, o = j / (TAPS * IC);
        if (n >= count) continue;
        ahead[(c * TAPS + tap) * OCP + o / G * pad(G) + o % G] = h[n];
        if constexpr (GI > 0) back[(o * TAPS + tap) * ICP + c / GI * pad(GI) + c % GI] = h[n];
      }
    }
  }

  // Replaces the input, the output of activation B, by its gradient. The stride is 1. Rows of windows outside of the image are skipped, and
  // columns too where a tile is as wide as the image.
  template <Activation B>
  static DEVICE_MEMBER void input(const float* d, const uint8_t* place, const float* back, float* in) {
    constexpr int ROWS = (In::H + NY - 1) / NY, COLUMNS = (In::W + NX - 1) / NX, EY = NY + KH - 1, EX = NX + KW - 1;
    // A tile's outputs before pooling begin at y * NY + P - (KH - 1): how far into a window is that?
    constexpr int OY = ((In::P - KH + 1) % PH + PH) % PH, OX = ((In::P - KW + 1) % PW + PW) % PW;
    constexpr int CY = (OY + EY - 1) / PH + 1, CX = (OX + EX - 1) / PW + 1;  // windows that it covers
    constexpr int LEFT = (In::P - KW + 1 - OX) / PW;
    EACH(item, LANES * IGROUPS * ROWS * COLUMNS) {
      const int lane = item % LANES, group = item / LANES % IGROUPS, tile = item / (LANES * IGROUPS), y = tile / COLUMNS, x = tile % COLUMNS;
      const int top = (y * NY + In::P - KH + 1 - OY) / PH, left = COLUMNS == 1 ? LEFT : x * NX / PW + LEFT;
      float sum[GI][NY][NX], value[CX], e[CX * PW], k[pad(GI)];
      int at[CX];
      UNROLL for (int c = 0; c < GI; c++) { UNROLL for (int i = 0; i < NY; i++) { UNROLL for (int j = 0; j < NX; j++) sum[c][i][j] = 0.f; } }
      LOOP for (int o = 0; o < OC; o++) {
        UNROLL for (int a = 0; a < CY; a++) {
          if (top + a < 0 || top + a >= Out::H) continue;
          UNROLL for (int b = 0; b < CX; b++) {
            const bool inside = left + b >= 0 && left + b < Out::W;
            value[b] = inside ? d[Out::at(o, top + a, left + b) * LANES + lane] : 0.f;
            at[b] = POOLED && inside ? place[((o * Out::H + top + a) * Out::W + left + b) * LANES + lane] : 0;
          }
          UNROLL for (int i = 0; i < PH; i++) {
            const int r = a * PH + i - OY;
            if (r < 0 || r >= EY) continue;
            UNROLL for (int q = 0; q < CX * PW; q++) e[q] = at[q / PW] == i * PW + q % PW ? value[q / PW] : 0.f;
            UNROLL for (int j = 0; j < NY; j++) {
              const int ky = j + KH - 1 - r;
              if (ky < 0 || ky >= KH) continue;
              UNROLL for (int kx = 0; kx < KW; kx++) {
                load(back + (o * TAPS + ky * KW + kx) * ICP + group * pad(GI), k);
                UNROLL for (int n = 0; n < NX; n++) {
                  const int q = OX + n + KW - 1 - kx;
                  if (COLUMNS == 1 && (LEFT * PW + q < 0 || LEFT * PW + q >= Out::W * PW)) continue;
                  UNROLL for (int c = 0; c < GI; c++) sum[c][j][n] += k[c] * e[q];
                }
              }
            }
          }
        }
      }
      UNROLL for (int c = 0; c < GI; c++) {
        UNROLL for (int i = 0; i < NY; i++) {
          UNROLL for (int j = 0; j < NX; j++) {
            const int channel = group * GI + c, row = y * NY + i, column = x * NX + j;
            if (channel < IC && row < In::H && column < In::W) {
              float& target = in[In::at(channel, row, column) * LANES + lane];
              target = deactivate<B>(target, sum[c][i][j]);
            }
          }
        }
      }
    }
  }
};

// ---- linear layers ---------------------------------------------------------------------------------------------------

// The weights w[O][I] are read from global memory; VECTOR: their rows are aligned to four floats. A thread computes four lanes of G outputs
// from 1/S of the inputs, and in the gradient of the input V inputs from 1/SI of the outputs; the parts are added in a second phase.
template <int I, int O, int G, int S, int SI, bool VECTOR, Activation A>
struct Linear {
  static constexpr int V = VECTOR ? 4 : 1, LG = LANES / 4, GROUPS = (O + G - 1) / G, IG = I / V;
  static constexpr int R = ((I + S - 1) / S + V - 1) / V * V, RO = (O + SI - 1) / SI, PER = 8;

  static DEVICE_MEMBER void forward(const float* in, const float* w, float* parts) {
    EACH(item, S * GROUPS * LG) {
      const int lane = item % LG * 4, first = item / LG % GROUPS * G, part = item / (LG * GROUPS), end = (part + 1) * R < I ? (part + 1) * R : I;
      float sum[G][4];
      UNROLL for (int o = 0; o < G; o++) { UNROLL for (int l = 0; l < 4; l++) sum[o][l] = 0.f; }
      _Pragma("unroll 2") for (int i = part * R; i < end; i += V) {
        float x[V][4], k[V];
        UNROLL for (int j = 0; j < V; j++) load(in + (i + j) * LANES + lane, x[j]);
        UNROLL for (int o = 0; o < G; o++) {
          load(w + (size_t)(first + o < O ? first + o : O - 1) * I + i, k);
          UNROLL for (int j = 0; j < V; j++) { UNROLL for (int l = 0; l < 4; l++) sum[o][l] += k[j] * x[j][l]; }
        }
      }
      UNROLL for (int o = 0; o < G; o++) {
        if (first + o < O) UNROLL for (int l = 0; l < 4; l++) parts[(part * O + first + o) * LANES + lane + l] = sum[o][l];
      }
    }
  }
  static DEVICE_MEMBER void finish(const float* parts, const float* bias, float* out) {
    EACH(k, O * LANES) {
      float sum = bias ? bias[k / LANES] : 0.f;
      UNROLL for (int part = 0; part < S; part++) sum += parts[part * O * LANES + k];
      out[k] = activate<A>(sum);
    }
  }

  static DEVICE_MEMBER void input(const float* d, const float* w, float* parts) {
    EACH(item, SI * IG * LG) {
      const int lane = item % LG * 4, i = item / LG % IG * V, part = item / (LG * IG), end = (part + 1) * RO < O ? (part + 1) * RO : O;
      float sum[V][4];
      UNROLL for (int j = 0; j < V; j++) { UNROLL for (int l = 0; l < 4; l++) sum[j][l] = 0.f; }
      _Pragma("unroll 4") for (int o = part * RO; o < end; o++) {
        float k[V], above[4];
        load(w + (size_t)o * I + i, k);
        load(d + o * LANES + lane, above);
        UNROLL for (int j = 0; j < V; j++) { UNROLL for (int l = 0; l < 4; l++) sum[j][l] += k[j] * above[l]; }
      }
      UNROLL for (int j = 0; j < V; j++) { UNROLL for (int l = 0; l < 4; l++) parts[(part * I + i + j) * LANES + lane + l] = sum[j][l]; }
    }
  }
  // Replaces the input, the output of activation B, by its gradient.
  template <Activation B>
  static DEVICE_MEMBER void finish_input(const float* parts, float* in) {
    EACH(k, I * LANES) {
      float sum = 0.f;
      UNROLL for (int part = 0; part < SI; part++) sum += parts[part * I * LANES + k];
      in[k] = deactivate<B>(in[k], sum);
    }
  }

  // A thread computes two inputs of PER outputs. It begins at a chunk of lanes that depends on the input, so that threads side by side read
  // from different banks.
  static DEVICE_MEMBER void apply(const float* in, const float* d, const Step& step, int weight, int bias) {
    constexpr int HALF = (I + 1) / 2, ITEMS = HALF * ((O + PER - 1) / PER);
    LOOP EACH(item, ITEMS + (bias < 0 ? 0 : O)) {
      if (item >= ITEMS) {
        float h[1] = {0.f};
        LOOP for (int lane = 0; lane < LANES; lane++) h[0] += d[(item - ITEMS) * LANES + lane];
        step.apply<1>(bias + item - ITEMS, h, 1);
        continue;
      }
      const int i = item % HALF, j = i + HALF < I ? i + HALF : i, first = item / HALF * PER, count = O % PER == 0 ? PER : O - first;
      float h[PER], other[PER];
      UNROLL for (int q = 0; q < PER; q++) h[q] = other[q] = 0.f;
      LOOP for (int chunk = 0; chunk < LG; chunk++) {
        const int lane = (chunk + i / 2) % LG * 4;
        float x[4], y[4], e[4];
        load(in + i * LANES + lane, x);
        load(in + j * LANES + lane, y);
        UNROLL for (int q = 0; q < PER; q++) {
          load(d + (O % PER == 0 || first + q < O ? first + q : O - 1) * LANES + lane, e);
          UNROLL for (int l = 0; l < 4; l++) h[q] += e[l] * x[l], other[q] += e[l] * y[l];
        }
      }
      const int k = weight + first * I + i;
      step.apply<I>(k, h, count);
      step.apply<I>(k + HALF, other, I % 2 == 0 || i + HALF < I ? count : 0);
    }
  }
};

// ---- samples and losses ----------------------------------------------------------------------------------------------

// Loads the samples `rows` into the lanes; lanes without a sample repeat the first one, with weight 0 in the loss.
template <class In, int CHANNELS>
DEVICE void gather(const Sample* pool, const float* table, const int32_t* rows, int count, float* in) {
  constexpr int F = In::C * In::H * In::W, N = F % 4 == 0 ? 4 : 1;
  struct alignas(N * sizeof(Sample)) Few { Sample values[N]; };
  _Pragma("unroll 2") EACH(item, LANES * (F / N)) {
    const int lane = item % LANES, first = item / LANES * N;
    const Few few = load_once((const Few*)(pool + (size_t)rows[lane < count ? lane : 0] * F + first));
    UNROLL for (int n = 0; n < N; n++) {
      const int f = first + n, c = f / (In::H * In::W), y = f / In::W % In::H, x = f % In::W;
      float& target = in[In::at(c, y, x) * LANES + lane];
      if constexpr (sizeof(Sample) == 1) target = table[f / (F / CHANNELS) * 256 + (int)few.values[n]];
      else target = (float)few.values[n];
    }
  }
}

// Each lane replaces its outputs z[C] by the gradient of the mean loss of the batch, and adds its share of the loss to total[lane].
template <int C>
DEVICE void cross_entropy(float* z, const int64_t* target, const int32_t* rows, int count, int batch, double* total) {
  EACH(lane, LANES) {
    if (lane >= count) {
      for (int j = 0; j < C; j++) z[j * LANES + lane] = 0.f;
      continue;
    }
    float most = z[lane], sum = 0.f;
    LOOP for (int j = 1; j < C; j++) most = z[j * LANES + lane] > most ? z[j * LANES + lane] : most;
    const int y = (int)target[rows[lane]];
    const float right = z[y * LANES + lane];
    LOOP for (int j = 0; j < C; j++) sum += z[j * LANES + lane] = expf(z[j * LANES + lane] - most);
    LOOP for (int j = 0; j < C; j++) z[j * LANES + lane] = (z[j * LANES + lane] / sum - (j == y)) / batch;
    total[lane] += (double)(logf(sum) + most - right) / batch;
  }
}
// Half the mean squared error.
template <int C>
DEVICE void squared_error(float* z, const float* target, const int32_t* rows, int count, int batch, double* total) {
  EACH(lane, LANES)
    for (int j = 0; j < C; j++) {
      const float e = lane < count ? z[j * LANES + lane] - target[(size_t)rows[lane] * C + j] : 0.f;
      z[j * LANES + lane] = e / (batch * C);
      total[lane] += 0.5 * (double)e * e / (batch * C);
    }
}
