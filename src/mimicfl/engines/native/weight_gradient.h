// ---- the gradient of a linear layer's weights -----------------------------------------------------------------------

// dw[o][i] = sum over r of dy[r][o] x[r][i], in tiles of A outputs and B vectors of inputs that stay in registers. The matrices are read
// in place: a library would copy one or both of them first. The last tiles overlap their neighbours and write the same numbers again.
template <int A, int B>
static void gradient_tile(const float* dy, const float* x, float* dw, int64_t rows, int64_t outputs, int64_t inputs, const int64_t* column) {
  v sum[A][B] = {};
  for (int64_t r = 0; r < rows; r++, dy += outputs, x += inputs) {
    v in[B];
    UNROLL for (int b = 0; b < B; b++) in[b] = load(x + column[b]);
    UNROLL for (int a = 0; a < A; a++) {
      const v one = splat(dy[a]);
      UNROLL for (int b = 0; b < B; b++) sum[a][b] += one * in[b];
    }
  }
  UNROLL for (int a = 0; a < A; a++) { UNROLL for (int b = 0; b < B; b++) store(dw + a * inputs + column[b], sum[a][b]); }
}

template <int B>
static void gradient_columns(const float* dy, const float* x, float* dw, int64_t rows, int64_t outputs, int64_t inputs, int64_t begin) {
  constexpr int A = ROOM / B;
  int64_t column[B];
  for (int b = 0; b < B; b++) column[b] = least64(begin + b * LANES, inputs - LANES);
  for (int64_t o = 0; o < outputs; o += A) {
    const int64_t first = least64(o, outputs - A);
    gradient_tile<A, B>(dy + first, x, dw + first * inputs, rows, outputs, inputs, column);
  }
}

// For at least LANES inputs and ROOM outputs. db, if it is not null, becomes the sum of the rows of dy.
extern "C" void mimicfl_weight_gradient(const float* dy, const float* x, float* dw, float* db, int64_t rows, int64_t outputs, int64_t inputs) {
  const int64_t vectors = (inputs + LANES - 1) / LANES, panels = (vectors + 5) / 6;
  int64_t begin = 0;
  for (int64_t p = 0; p < panels; p++) {  // as equal as possible
    const int64_t width = vectors / panels + (p < vectors % panels), at = begin * LANES;
    begin += width;
    switch (width) {
      case 6: gradient_columns<6>(dy, x, dw, rows, outputs, inputs, at); break;
      case 5: gradient_columns<5>(dy, x, dw, rows, outputs, inputs, at); break;
      case 4: gradient_columns<4>(dy, x, dw, rows, outputs, inputs, at); break;
      case 3: gradient_columns<3>(dy, x, dw, rows, outputs, inputs, at); break;
      case 2: gradient_columns<2>(dy, x, dw, rows, outputs, inputs, at); break;
      default: gradient_columns<1>(dy, x, dw, rows, outputs, inputs, at);
    }
  }
  if (!db) return;
  memset(db, 0, sizeof(float) * outputs);
  for (int64_t r = 0; r < rows; r++) { for (int64_t o = 0; o < outputs; o++) db[o] += dy[r * outputs + o]; }
}
