// ---- convolution without padding; the input is padded beforehand ----------------------------------------------------
// The same kernel serves the forward pass and, on flipped weights and padded gradients, the gradient of the input.
// ZT, ZR: input rows outside [ZT, ZT + ZR) are zero and are skipped. So are columns outside [ZL, ZL + ZC) in the first and the last tile of
// a row, where the compiler knows which they are: L and R are the bounds as seen from the tile.

template <int OC> constexpr int conv_channels() { return block(OC, ROOM >= 24 ? 6 : 4); }

// packed[block][ic][ky][kx][o in block]; FLIP: the weights of the transposed convolution
template <int IC, int OC, int KH, int KW, bool FLIP>
static void pack(const float* w, float* packed) {
  constexpr int OB = conv_channels<OC>();
  for (int o0 = 0; o0 < OC; o0 += OB) {
    const int ob = least(OB, OC - o0);
    for (int ic = 0; ic < IC; ic++)
      for (int k = 0; k < KH * KW; k++)
        for (int o = 0; o < ob; o++)
          *packed++ = FLIP ? w[(ic * OC + o0 + o) * KH * KW + KH * KW - 1 - k] : w[((o0 + o) * IC + ic) * KH * KW + k];
  }
}

template <int OB, int XB, int L, int R, int IC, int IH, int IW, int KH, int KW, int SH, int SW, int OH, int OW, int ZT, int ZR>
static inline void conv_tile(const v* in, const float* packed, const float* bias, v* out, int y, int x0) {
  v acc[OB][XB];
  UNROLL for (int o = 0; o < OB; o++) { UNROLL for (int x = 0; x < XB; x++) acc[o][x] = splat(bias ? bias[o] : 0.f); }
  const int k0 = most(0, ZT - y * SH), k1 = least(KH, ZT + ZR - y * SH);
  for (int ic = 0; ic < IC; ic++)
    for (int ky = k0; ky < k1; ky++) {
      const v* row = in + (ic * IH + y * SH + ky) * IW + x0 * SW;
      const float* w = packed + (ic * KH + ky) * KW * OB;
      UNROLL for (int kx = 0; kx < KW; kx++) {
        v a[XB];
        UNROLL for (int x = 0; x < XB; x++) a[x] = row[x * SW + kx];
        UNROLL for (int o = 0; o < OB; o++) {
          const v b = splat(w[kx * OB + o]);
          UNROLL for (int x = 0; x < XB; x++)
            if (x * SW + kx >= L && x * SW + kx < R) acc[o][x] += b * a[x];
        }
      }
    }
  UNROLL for (int o = 0; o < OB; o++) { UNROLL for (int x = 0; x < XB; x++) out[(o * OH + y) * OW + x0 + x] = acc[o][x]; }
}

template <int OB, int IC, int IH, int IW, int KH, int KW, int SH, int SW, int OH, int OW, int ZT, int ZR, int ZL, int ZC>
static void conv_rows(const v* in, const float* packed, const float* bias, v* out) {
  constexpr int XB = block(OW, ROOM / OB), TILES = (OW + XB - 1) / XB, LAST = (TILES - 1) * XB;
  constexpr int BEGIN = TILES > 1 ? 0 : ZL, END = ZL + ZC - LAST * SW, FAR = IW;  // bounds of the last tile; 0 and FAR exclude nothing
  for (int y = 0; y < OH; y++) {
    if constexpr (TILES > 1) conv_tile<OB, XB, ZL, FAR, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR>(in, packed, bias, out, y, 0);
    for (int x = XB; x < LAST; x += XB) conv_tile<OB, XB, 0, FAR, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR>(in, packed, bias, out, y, x);
    conv_tile<OB, OW - LAST, BEGIN, END, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR>(in, packed, bias, out, y, LAST);
  }
}

template <int IC, int IH, int IW, int OC, int KH, int KW, int SH, int SW, int OH, int OW, int ZT, int ZR, int ZL, int ZC>
static void conv(const v* in, const float* packed, const float* bias, v* out) {
  constexpr int OB = conv_channels<OC>(), REST = OC % OB;
  int o = 0;
  for (; o + OB <= OC; o += OB)
    conv_rows<OB, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR, ZL, ZC>(in, packed + o * IC * KH * KW, bias ? bias + o : bias, out + o * OH * OW);
  if constexpr (REST > 0)
    conv_rows<REST, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR, ZL, ZC>(in, packed + o * IC * KH * KW, bias ? bias + o : bias, out + o * OH * OW);
}

// Weight gradients: keeps one kernel row of OB output channels in registers while it reads the whole image.
template <int OB, int KB, int IH, int IW, int SH, int SW, int OH, int OW>
static inline void conv_weights_tile(const v* in, const v* d, float* grad, int stride_o, bool first) {
  v acc[OB][KB];
  UNROLL for (int o = 0; o < OB; o++) { UNROLL for (int k = 0; k < KB; k++) acc[o][k] = v{}; }
  for (int y = 0; y < OH; y++) {
    const v* p = in + y * SH * IW;
    const v* q = d + y * OW;
    for (int x = 0; x < OW; x++) {
      v g[OB];
      UNROLL for (int o = 0; o < OB; o++) g[o] = q[o * OH * OW + x];
      UNROLL for (int k = 0; k < KB; k++) {
        const v a = p[x * SW + k];
        UNROLL for (int o = 0; o < OB; o++) acc[o][k] += g[o] * a;
      }
    }
  }
  UNROLL for (int o = 0; o < OB; o++) {
    UNROLL for (int k = 0; k < KB; k++) {
      const float s = sum_lanes(acc[o][k]);
      grad[o * stride_o + k] = first ? s : grad[o * stride_o + k] + s;
    }
  }
}

template <int OB, int IC, int IH, int IW, int KH, int KW, int SH, int SW, int OH, int OW>
static void conv_weights_rows(const v* in, const v* d, float* grad, bool first) {
  constexpr int KB = block(KW, least(8, most(1, ROOM / OB))), REST = KW % KB;
  for (int ic = 0; ic < IC; ic++)
    for (int ky = 0; ky < KH; ky++) {
      const v* p = in + (ic * IH + ky) * IW;
      float* g = grad + (ic * KH + ky) * KW;
      int k = 0;
      for (; k + KB <= KW; k += KB) conv_weights_tile<OB, KB, IH, IW, SH, SW, OH, OW>(p + k, d, g + k, IC * KH * KW, first);
      if constexpr (REST > 0) conv_weights_tile<OB, REST, IH, IW, SH, SW, OH, OW>(p + k, d, g + k, IC * KH * KW, first);
    }
}

template <int IC, int IH, int IW, int OC, int KH, int KW, int SH, int SW, int OH, int OW>
static void conv_weights(const v* in, const v* d, float* grad, float* grad_bias, bool first) {
  constexpr int OB = block(OC, most(1, ROOM / most(KW, 4))), REST = OC % OB;
  int o = 0;
  for (; o + OB <= OC; o += OB)
    conv_weights_rows<OB, IC, IH, IW, KH, KW, SH, SW, OH, OW>(in, d + o * OH * OW, grad + o * IC * KH * KW, first);
  if constexpr (REST > 0) conv_weights_rows<REST, IC, IH, IW, KH, KW, SH, SW, OH, OW>(in, d + o * OH * OW, grad + o * IC * KH * KW, first);
  if (grad_bias)
    for (o = 0; o < OC; o++) {
      v s = v{};
      for (int i = 0; i < OH * OW; i++) s += d[o * OH * OW + i];
      grad_bias[o] = first ? sum_lanes(s) : grad_bias[o] + sum_lanes(s);
    }
}

// Copies [C][H][W] into a zeroed [C][OH][OW] with offsets PH, PW and strides SH, SW; and back.
template <int C, int H, int W, int OH, int OW, int PH, int PW, int SH, int SW>
static void spread(const v* in, v* out) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < H; y++)
      for (int x = 0; x < W; x++) out[(c * OH + PH + y * SH) * OW + PW + x * SW] = in[(c * H + y) * W + x];
}
// VH, VW: the size of the computed part of the padded gradient. No output depends on the rest, so its gradient is zero.
template <int C, int H, int W, int VH, int VW, int PH, int PW>
static void crop(const v* in, v* out) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < H; y++)
      for (int x = 0; x < W; x++) out[(c * H + y) * W + x] = y + PH < VH && x + PW < VW ? in[(c * VH + y + PH) * VW + x + PW] : v{};
}
