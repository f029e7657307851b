// Convolution, max pooling and activation in one.

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
