// One gradient step of a model whose parameters are parts of one vector: the gradients of the parameters lie apart, null for zero.
extern "C" void mimicfl_descend(float* w, float* g, const float* w0, const float* shift, const float* const* gradients,
                                const int64_t* sizes, float eta, float mu, int64_t count) {
  const bool terms = shift || mu != 0.f;
  int64_t at = 0;
  for (int64_t k = 0; k < count; at += sizes[k++]) {
    const Step step{w + at, g + at, nullptr, w0 + at, shift ? shift + at : nullptr, eta, mu, 0.f};
    if (gradients[k]) step.range(0, sizes[k], gradients[k]);
    else for (int64_t i = 0; terms && i < sizes[k]; i++) step.apply_one(i, 0.f);
  }
}
