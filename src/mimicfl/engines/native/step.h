// ---- a local step ---------------------------------------------------------------------------------------------------

// `apply` adds a vector of the gradient at position k: h = grad + shift + mu (w - w0), u = beta u + h, w -= eta u, g += u.
struct Step {
  float *w, *g, *u;
  const float *w0, *shift;
  float eta, mu, beta;
  inline void apply(int64_t k, v h) const {
    if (shift) h += load(shift + k);
    if (mu != 0.f) h += splat(mu) * (load(w + k) - load(w0 + k));
    if (beta != 0.f) {
      h += splat(beta) * load(u + k);
      store(u + k, h);
    }
    store(g + k, load(g + k) + h);
    store(w + k, load(w + k) - splat(eta) * h);
  }
  inline void apply_one(int64_t k, float h) const {
    h += (shift ? shift[k] : 0.f) + (mu != 0.f ? mu * (w[k] - w0[k]) : 0.f);
    if (beta != 0.f) h = u[k] = h + beta * u[k];
    g[k] += h;
    w[k] -= eta * h;
  }
  void range(int64_t k, int64_t end, const float* grad) const {
    for (; k + LANES <= end; k += LANES) apply(k, load(grad + k));
    for (; k < end; k++) apply_one(k, grad[k]);
  }
};
