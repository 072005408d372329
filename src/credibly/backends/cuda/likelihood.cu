// Overwrites the outputs of a row with the derivatives of its log likelihood. Returns the log likelihood if
// `want_value` is set. Adds the derivative with respect to learned log scales to `scale_gradient`.
__device__ inline double likelihood(const Arguments& args, const REAL* theta, REAL* out, long long row, int lane,
                                    bool want_value, REAL* scale_gradient) {
  const bool valid = row < args.rows;
  const REAL w = REAL(args.weight);
  double value = 0;
  if (KIND == CATEGORICAL) {
    const int label = valid ? int(args.y[row]) : 0;
    REAL largest = out[lane], normaliser = 0, chosen = 0;
#pragma unroll 1
    for (int k = 1; k < TARGETS; ++k) largest = out[k * PITCH + lane] > largest ? out[k * PITCH + lane] : largest;
#pragma unroll 1
    for (int k = 0; k < TARGETS; ++k) {
      const REAL shifted = out[k * PITCH + lane] - largest, e = exp_real(shifted);
      if (k == label) chosen = shifted;
      out[k * PITCH + lane] = e, normaliser += e;
    }
    const REAL normalised_weight = divide(w, normaliser);
#pragma unroll 1
    for (int k = 0; k < TARGETS; ++k) {
      REAL* z = out + k * PITCH + lane;
      *z = valid ? (k == label ? w : REAL(0)) - *z * normalised_weight : REAL(0);
    }
    return want_value && valid ? double(chosen) - log(double(normaliser)) : 0.0;
  }
#pragma unroll
  for (int k = 0; k < TARGETS; ++k) {
    REAL* z = out + k * PITCH + lane;
    const REAL y = valid ? args.y[k * args.padded + row] : REAL(0);
    if (KIND == GAUSSIAN) {
      const bool learned = LOG_SCALE >= 0;
      const int slot = LOG_SCALE + (PER_TARGET ? k : 0);
      const REAL scale = learned ? exp_real(theta[learned ? slot : 0]) : REAL(args.scale[k]);
      const REAL precision = divide(REAL(1), scale * scale), residual = y - *z;
      *z = valid ? residual * precision * w : REAL(0);
      if (learned && valid) scale_gradient[PER_TARGET ? k : 0] += w * (residual * residual * precision - REAL(1));
      if (want_value && valid) {
        const double log_scale = learned ? double(theta[learned ? slot : 0]) : log(args.scale[k]);
        value += -0.5 * double(residual) * double(residual) * exp(-2 * log_scale) - log_scale - HALF_LOG_TWO_PI;
      }
    } else if (KIND == HETEROSCEDASTIC) {
      REAL* log_variance = out + (TARGETS + k) * PITCH + lane;
      const REAL v = *log_variance, residual = y - *z, scaled = residual * exp_real(-v);
      if (want_value && valid) value += -0.5 * (double(residual * scaled) + double(v)) - HALF_LOG_TWO_PI;
      *z = valid ? w * scaled : REAL(0);
      *log_variance = valid ? REAL(0.5) * w * (residual * scaled - REAL(1)) : REAL(0);
    } else {
      const double logit = double(*z);
      if (want_value && valid)
        value += double(y) * logit - (logit > 0 ? logit + log1p(exp(-logit)) : log1p(exp(logit)));
      *z = valid ? w * (y - logistic(*z)) : REAL(0);
    }
  }
  return value;
}
