// The formula of all kernels, pair by pair in double, and the error bound of a kernel.
//
// Rounding, u the unit roundoff of the compute type: a score is off by some u times the sum of its absolute terms, and
// so is the logarithm of a probability: a relative error of `off` = u (16 + 8 times the largest of those sums in the
// row). Products of probabilities and sums of a few hundred terms add no more. `off` is carried through the formula
// with absolute values. What the backward pass reads of the forward pass (`attended`) was rounded to the dtype of
// storage once. Levels that multiply pairs of bfloat16 round what they multiply: probabilities, the gated gradient of
// the output, dS and the mixed query, each by `u_pair`.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "selftest/inputs.h"

namespace hk::selftest {

// A result, and the bound of its error before it is rounded to its dtype; infinite: unspecified.
struct Expected {
  std::vector<double> value, bound;

  explicit Expected(int64_t count = 0) : value(count), bound(count) {}
  void add(int64_t at, double v, double b) { value[at] += v, bound[at] += b; }
};

class Reference {
 public:
  Reference(const Inputs& inputs, bool pairs) : in(inputs), u_pair(pairs ? roundoff(DType::kBFloat16) : 0) {
    for (int64_t b = 0; b < in.B; ++b)
      for (int64_t h = 0; h < in.H; ++h)
        for (int64_t i = 0; i < in.T; ++i) row(b, h, i);
    // The Python tests hold entmax to its formula.
    if (in.alpha.tensor)
      for (Expected* each : {&out, &attended, &lse, &dquery, &dkey, &dvalue, &dgate, &dalpha})
        std::fill(each->bound.begin(), each->bound.end(), kInfinity);
  }

  std::map<std::string, const Expected*> results() const {
    return {{"out", &out},         {"attended", &attended}, {"lse", &lse},
            {"dquery", &dquery},   {"dkey", &dkey},         {"dvalue", &dvalue},
            {"dmixing", &dmixing}, {"dgate", &dgate},       {"dcontent_bias", &dcontent_bias},
            {"row lse", &row_lse}, {"argmax", &argmax},     {"max_prob", &max_prob},
            {"entropy", &entropy}, {"dalpha", &dalpha},     {"max_score", &max_score}};
  }

 private:
  const Inputs& in;
  const double u_pair;
  const int64_t D = in.D, Dv = in.Dv, S = in.S, count = in.B * in.H * in.T;
  const double u = roundoff(in.compute), u_storage = roundoff(in.dtype);
  const std::vector<double> q = in.query.values(), k = in.key.values(), v = in.value.values();
  const std::vector<double> mix = in.mixing.values(), bias = in.content_bias.values();
  const std::vector<double> grad = in.dout.values();
  Expected out{count * Dv}, attended{count * Dv}, lse{count};
  Expected dquery{in.collaborative ? in.B * in.T * D : count * D};
  Expected dkey{in.collaborative ? in.B * S * D : in.B * in.Hk * S * D};
  Expected dvalue{in.B * in.Hk * S * Dv}, dmixing{in.B * in.H * D};
  Expected dcontent_bias{in.B * in.H * S}, dgate{in.elementwise() ? count * Dv : count};
  Expected row_lse{count}, argmax{count}, max_score{count}, max_prob{count}, entropy{count}, dalpha{count};

  // Query row i of head h: its row of the outputs and its part of the gradients.
  void row(int64_t b, int64_t h, int64_t i) {
    const int64_t bh = b * in.H + h, at = bh * in.T + i, hk = b * in.Hk + h / (in.H / in.Hk);
    const int64_t q_at = (in.collaborative ? b * in.T + i : at) * D;
    const int64_t k_at = (in.collaborative ? b : hk) * S * D, v_at = hk * S * Dv;
    const auto mixed = [&](int64_t d) { return in.collaborative ? mix[h * D + d] : 1; };
    std::vector<int64_t> keys;
    std::vector<double> score(S), p(S), sum(Dv), size(Dv), dsum(Dv);
    double top = -kInfinity, total = 0, largest = 0;
    for (int64_t j = 0; j < S; ++j) {
      if (!in.sees(b, i, j)) continue;
      keys.push_back(j);
      double terms = 0;
      const auto term = [&](double x) { score[j] += in.scale * x, terms += std::abs(in.scale * x); };
      for (int64_t d = 0; d < D; ++d) term(q[q_at + d] * mixed(d) * k[k_at + j * D + d]);
      if (!bias.empty()) term(bias[bh * S + j]);
      top = std::max(top, score[j]), largest = std::max(largest, terms);
    }
    for (int64_t j : keys) total += p[j] = std::exp(score[j] - top);
    for (int64_t j : keys) p[j] /= total;
    const double sum_exp = keys.empty() ? -kInfinity : top + std::log(total);
    double off = u * (16 + 8 * largest);
    statistics(at, keys, score, p, sum_exp, off);
    if (in.collaborative) off += u_pair * largest;

    const bool closed = in.closed(b, h);
    // Of closed rows lse and attended are unspecified, and so is the gradient of a gate per token without closed_grad.
    const bool unread = !closed && !in.closed_grad && !in.elementwise() && in.activation == Activation::kIdentity &&
                        in.gate_at(b, h, i, 0) == 0;
    lse.add(at, sum_exp, closed || unread ? kInfinity : off);
    for (int64_t j : keys) {
      const double kept = p[j] * in.kept(b, h, i, j);
      for (int64_t w = 0; w < Dv; ++w) {
        const double term = kept * v[v_at + j * Dv + w];
        sum[w] += term, size[w] += std::abs(term);
      }
    }
    double delta = 0, delta_size = 0, delta_off = 0;
    for (int64_t w = 0; w < Dv; ++w) {
      const double gate = in.gate_at(b, h, i, w), g = keys.empty() ? 0 : grad[at * Dv + w];
      const double p_off = off + u_pair;
      const double sum_off = 2 * p_off * size[w] + u_storage * std::abs(sum[w]);
      attended.add(at * Dv + w, sum[w], closed || unread ? kInfinity : p_off * size[w]);
      if (!closed) out.add(at * Dv + w, gate * sum[w], p_off * std::abs(gate) * size[w]);
      if (!closed || in.closed_grad)
        dgate.add(in.elementwise() ? at * Dv + w : at, g * sum[w], unread ? kInfinity : std::abs(g) * sum_off);
      dsum[w] = gate * g;
      delta += dsum[w] * sum[w];
      delta_size += std::abs(dsum[w]) * size[w], delta_off += std::abs(dsum[w]) * sum_off;
    }
    if (closed) return;
    for (int64_t j : keys) {
      const double kept = in.kept(b, h, i, j);
      double dp = 0, dp_size = 0;
      for (int64_t w = 0; w < Dv; ++w) {
        const double term = kept * dsum[w] * v[v_at + j * Dv + w], dv = p[j] * kept * dsum[w];
        dp += term, dp_size += std::abs(term);
        dvalue.add(v_at + j * Dv + w, dv, (off + 3 * u_pair) * std::abs(dv));
      }
      const double ds = in.scale * p[j] * (dp - delta);
      const double dp_off = off * (dp_size + delta_size) + u_pair * dp_size + delta_off;
      const double ds_off = in.scale * p[j] * dp_off;
      const double rounded_off = ds_off + 3 * u_pair * (std::abs(ds) + ds_off);
      for (int64_t d = 0; d < D; ++d) {
        const double qd = q[q_at + d], kd = k[k_at + j * D + d], m = mixed(d);
        dquery.add(q_at + d, ds * m * kd, rounded_off * std::abs(m * kd));
        dkey.add(k_at + j * D + d, ds * m * qd, rounded_off * std::abs(m * qd));
        if (in.closed_grad || !in.skipped(h, d)) dmixing.add(bh * D + d, ds * qd * kd, rounded_off * std::abs(qd * kd));
      }
      dcontent_bias.add(bh * S + j, ds, ds_off);
    }
  }

  void statistics(int64_t at, const std::vector<int64_t>& keys, const std::vector<double>& score,
                  const std::vector<double>& p, double sum_exp, double off) {
    int64_t best = -1;  // the first of equal ones
    double second = -kInfinity, h = 0;
    for (int64_t j : keys) {
      if (p[j] > 0) h -= p[j] * std::log(p[j]);
      if (in.excluded[j]) continue;
      if (best >= 0) second = std::max(second, std::min(score[j], score[best]));
      if (best < 0 || score[j] > score[best]) best = j;
    }
    const bool close = best >= 0 && score[best] > second && score[best] - second < off;
    row_lse.add(at, sum_exp, off);
    argmax.add(at, static_cast<double>(best), close ? kInfinity : 0);
    max_score.add(at, best >= 0 ? score[best] : -kInfinity, off);
    if (best >= 0) max_prob.add(at, p[best], off * p[best]);
    entropy.add(at, h, off * (1 + h));
  }
};

}  // namespace hk::selftest
