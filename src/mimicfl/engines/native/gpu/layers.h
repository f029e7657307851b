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
