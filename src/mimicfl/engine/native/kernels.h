// Layers with the samples of a batch in the lanes of a vector: activation [channel][y][x] is a vector of LANES samples.
// Every loop then runs over whole vectors, whatever the layer's shape, and one broadcast weight serves LANES samples.
// Weights keep PyTorch's order (conv OIHW, linear OI). Shapes are template arguments: the compiler sees constants only.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#elif defined(__ARM_NEON) || defined(__SSE2__)
#define LANES 4
#else
#define LANES 1
#endif
#endif

#if LANES == 1
typedef float v;
typedef int32_t vi;
#else
typedef float v __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
#endif

// Accumulators that fit the register file beside what is loaded: 32 registers on AVX-512 and NEON, 16 elsewhere.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int ROOM = 24;
#else
constexpr int ROOM = 12;
#endif

#define UNROLL _Pragma("GCC unroll 32")

static inline v splat(float s) { return v{} + s; }
static inline v load(const float* p) { v a; memcpy(&a, p, sizeof(v)); return a; }
static inline void store(float* p, v a) { memcpy(p, &a, sizeof(v)); }
static inline float sum_lanes(v a) {
  float x[LANES];
  memcpy(x, &a, sizeof(v));
  UNROLL for (int half = LANES / 2; half >= 1; half /= 2) { UNROLL for (int i = 0; i < half; i++) x[i] += x[i + half]; }
  return x[0];
}

// Turn LANES vectors around: lane j of vector i becomes lane i of vector j. Butterflies: each stage swaps blocks of D lanes.
#if LANES > 1 && !defined(__clang__)
template <int D>
static inline void turn_stage(v* r) {
  vi low, high;
  UNROLL for (int l = 0; l < LANES; l++) { low[l] = l & D ? LANES + l - D : l; high[l] = l & D ? LANES + l : l + D; }
  UNROLL for (int i = 0; i < LANES; i++) {
    if (i & D) continue;
    const v a = r[i], b = r[i + D];
    r[i] = __builtin_shuffle(a, b, low);
    r[i + D] = __builtin_shuffle(a, b, high);
  }
}
static inline void turn(v* r) {
  if constexpr (LANES > 8) turn_stage<8>(r);
  if constexpr (LANES > 4) turn_stage<4>(r);
  if constexpr (LANES > 2) turn_stage<2>(r);
  turn_stage<1>(r);
}
#else
static inline void turn(v* r) {
  float a[LANES][LANES], b[LANES][LANES];
  memcpy(a, r, sizeof(a));
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) b[j][i] = a[i][j];
  memcpy(r, b, sizeof(b));
}
#endif

// Zeroed memory, or null.
static void* room(size_t bytes) {
  void* p = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (p) memset(p, 0, (bytes + 63) / 64 * 64);
  return p;
}

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }
// How many of n to take at a time, at most `limit`: a divisor of n if a fairly large one exists.
constexpr int block(int n, int limit) {
  if (n <= limit) return n;
  for (int b = limit; 2 * b > limit; b--) if (n % b == 0) return b;
  return limit;
}

// ---- convolution: valid, on input that was padded before ------------------------------------------------------------
// The same kernel serves the forward pass and, on flipped weights and padded gradients, the gradient of the input.
// ZT, ZR: rows outside [ZT, ZT + ZR) of the input are zero and are skipped.

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

template <int OB, int XB, int IC, int IH, int IW, int KH, int KW, int SH, int SW, int OH, int OW, int ZT, int ZR>
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
          UNROLL for (int x = 0; x < XB; x++) acc[o][x] += b * a[x];
        }
      }
    }
  UNROLL for (int o = 0; o < OB; o++) { UNROLL for (int x = 0; x < XB; x++) out[(o * OH + y) * OW + x0 + x] = acc[o][x]; }
}

template <int OB, int IC, int IH, int IW, int KH, int KW, int SH, int SW, int OH, int OW, int ZT, int ZR>
static void conv_rows(const v* in, const float* packed, const float* bias, v* out) {
  constexpr int XB = block(OW, ROOM / OB), REST = OW % XB;
  for (int y = 0; y < OH; y++) {
    int x = 0;
    for (; x + XB <= OW; x += XB) conv_tile<OB, XB, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR>(in, packed, bias, out, y, x);
    if constexpr (REST > 0) conv_tile<OB, REST, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR>(in, packed, bias, out, y, x);
  }
}

template <int IC, int IH, int IW, int OC, int KH, int KW, int SH, int SW, int OH, int OW, int ZT, int ZR>
static void conv(const v* in, const float* packed, const float* bias, v* out) {
  constexpr int OB = conv_channels<OC>(), REST = OC % OB;
  int o = 0;
  for (; o + OB <= OC; o += OB)
    conv_rows<OB, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR>(in, packed + o * IC * KH * KW, bias ? bias + o : bias, out + o * OH * OW);
  if constexpr (REST > 0)
    conv_rows<REST, IC, IH, IW, KH, KW, SH, SW, OH, OW, ZT, ZR>(in, packed + o * IC * KH * KW, bias ? bias + o : bias, out + o * OH * OW);
}

// Gradients of the weights: one kernel row of OB output channels in registers while the whole image passes by.
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

// Copy [C][H][W] into the middle of a zeroed [C][OH][OW], PH and PW from the top left, SH and SW apart; and back.
template <int C, int H, int W, int OH, int OW, int PH, int PW, int SH, int SW>
static void spread(const v* in, v* out) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < H; y++)
      for (int x = 0; x < W; x++) out[(c * OH + PH + y * SH) * OW + PW + x * SW] = in[(c * H + y) * W + x];
}
// VH, VW: how much of the padded gradient was computed; beyond it no output looked, so the gradient is zero.
template <int C, int H, int W, int VH, int VW, int PH, int PW>
static void crop(const v* in, v* out) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < H; y++)
      for (int x = 0; x < W; x++) out[(c * H + y) * W + x] = y + PH < VH && x + PW < VW ? in[(c * VH + y + PH) * VW + x + PW] : v{};
}

// ---- pooling --------------------------------------------------------------------------------------------------------

template <int C, int H, int W, int OH, int OW, int KH, int KW, int SH, int SW>
static void max_pool(const v* in, v* out) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < OH; y++)
      for (int x = 0; x < OW; x++) {
        const v* p = in + (c * H + y * SH) * W + x * SW;
        v m = p[0];
        UNROLL for (int ky = 0; ky < KH; ky++) { UNROLL for (int kx = 0; kx < KW; kx++) m = p[ky * W + kx] > m ? p[ky * W + kx] : m; }
        out[(c * OH + y) * OW + x] = m;
      }
}
// The first of several equal largest values gets the gradient, as in PyTorch.
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

static void relu(v* x, int n) { for (int i = 0; i < n; i++) x[i] = x[i] > v{} ? x[i] : v{}; }
static void relu_back(const v* y, v* d, int n) { for (int i = 0; i < n; i++) d[i] = y[i] > v{} ? d[i] : v{}; }
static void tanh_layer(const v* x, v* y, int n) {
  const float* a = (const float*)x;
  float* b = (float*)y;
  for (int i = 0; i < n * LANES; i++) b[i] = tanhf(a[i]);
}
static void tanh_back(const v* y, const v* d, v* din, int n) { for (int i = 0; i < n; i++) din[i] = d[i] * (splat(1.f) - y[i] * y[i]); }

// One random number per element from its key and position, so that threads and order change nothing.
static inline uint32_t scramble(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (uint32_t)((z ^ (z >> 31)) >> 32);
}
static void dropout(const v* x, v* y, v* mask, int n, float p, uint64_t key, uint64_t position) {
  float* m = (float*)mask;
  const float keep = p < 1.f ? 1.f / (1.f - p) : 0.f;
  const double limit = p * 4294967296.0;
  for (int i = 0; i < n * LANES; i++) m[i] = scramble(key + 0x9e3779b97f4a7c15ull * (position * (uint64_t)n * LANES + i + 1)) < limit ? 0.f : keep;
  for (int i = 0; i < n; i++) y[i] = x[i] * mask[i];
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

// Here the lanes must be summed, so the input is turned around first: then a vector holds LANES inputs of one sample.
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

// ---- the two ends: samples into lanes, losses out -------------------------------------------------------------------

// uint8 samples go through a table of 256 inputs per channel, made by the same formula as everywhere else.
template <int F, int CHANNELS, typename T>
static void gather(const T* pool, const float* table, const int64_t* rows, int count, v* x) {
  const T* sample[LANES];
  for (int s = 0; s < LANES; s++) sample[s] = pool + (size_t)rows[s < count ? s : 0] * F;  // an empty lane repeats the first; it has no weight
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
