// SPDX-License-Identifier: Apache-2.0
//
// Rows of logits and widened weights of module "decoder" against float64.
#pragma once

#include "cuda_decoder_support.h"

namespace bench {

inline void check_rows(Launcher& run) {
  namespace decoder = metrale::cuda::decoder;
  std::uint64_t seed = 4000;
  for (const std::uint32_t n : {1U, 5U, 1000U, 32000U, 128256U, 151937U}) {
    for (const std::uint32_t rows : {1U, 7U}) {
      for (const std::uint32_t pad : {0U, 1U}) {
        Random random(++seed);
        const RowsParams p{rows, n, n + pad};
        std::vector<float> logits = random.vector(static_cast<std::size_t>(rows) * p.ld, 12);
        std::vector<std::int32_t> targets(rows);
        for (std::uint32_t r = 0; r < rows; ++r) {
          float* row = &logits[static_cast<std::size_t>(r) * p.ld];
          targets[r] = static_cast<std::int32_t>(random.bits() % n);
          const std::uint32_t one = random.bits() % n;
          const std::uint32_t other = random.bits() % n;
          if (r == 1) row[one] = row[other] = 20;  // equals: the lower index
          if (r == 2) row[one] = NAN;
          if (r == 3) row[one] = INFINITY;
          if (r == 4) {
            for (std::uint32_t i = 0; i < n; ++i) row[i] = -INFINITY;
          }
          if (r == 5) {
            for (std::uint32_t i = 0; i < n; ++i) row[i] = i == one ? -3.0F : -INFINITY;
          }
          if (r == 6) {
            for (std::uint32_t i = 0; i < n; ++i) row[i] = 1;
          }
          if (pad) row[n] = NAN;  // no part of the row
        }
        const Dev<float> dev_logits(logits);
        const Dev<std::int32_t> ids(rows), dev_targets(targets);
        const Dev<RowScore> dev_scores(rows);
        run(argmax, decoder::plan_rows(p), dev_logits.ptr(), ids.ptr(), p);
        run(score, decoder::plan_rows(p), dev_logits.ptr(), dev_targets.ptr(), dev_scores.ptr(), p);
        const std::vector<std::int32_t> got = ids.get();
        const std::vector<RowScore> scores = dev_scores.get();
        for (std::uint32_t r = 0; r < rows; ++r) {
          const float* row = &logits[static_cast<std::size_t>(r) * p.ld];
          std::int32_t best = -1;
          bool refused = false;
          for (std::uint32_t i = 0; i < n; ++i) {
            refused = refused || !(row[i] < INFINITY);
            if (row[i] > -INFINITY && (best < 0 || row[i] > row[best])) best = static_cast<std::int32_t>(i);
          }
          if (refused) best = -1;
          const std::string name = text({{"n", n}, {"rows", rows}, {"row", r}, {"pad", pad}});
          expect("argmax", got[r] == best, name);
          expect("score", scores[r].best == best, name + " best");
          if (best < 0) {
            expect("score", std::isnan(scores[r].loss), name + " loss of a refused row");
            continue;
          }
          double sum = 0;
          for (std::uint32_t i = 0; i < n; ++i) sum += std::exp(static_cast<double>(row[i]) - row[best]);
          const double loss = std::log(sum) + row[best] - static_cast<double>(row[targets[r]]);
          const double error = std::isinf(loss) ? (scores[r].loss == static_cast<float>(loss) ? 0 : 1)
                                                : std::abs(scores[r].loss - loss) / std::max(1.0, std::abs(loss));
          expect("score", error < 2e-6, name + " loss", error, 2e-6);
        }
      }
    }
  }
}

inline void check_widen(Launcher& run) {
  namespace decoder = metrale::cuda::decoder;
  std::uint64_t seed = 5000;
  for (const std::uint32_t dtype : {decoder::kF32, decoder::kBf16, decoder::kF16}) {
    for (const WidenOp op : {WidenOp::copy, WidenOp::plus_one, WidenOp::negative_exp}) {
      for (const std::uint32_t transpose : {0U, 1U}) {
        Random random(++seed);
        const WidenParams p{.rows = 33, .cols = 70, .dtype = dtype, .op = op, .transpose = transpose};
        const std::uint32_t n = p.rows * p.cols;
        std::vector<std::uint8_t> from(n * (dtype == decoder::kF32 ? 4 : 2));
        std::vector<double> want(n);
        for (std::uint32_t i = 0; i < n; ++i) {
          float x = random.next() * 4;
          if (dtype == decoder::kBf16) {
            const std::uint16_t b = bf16_of(x);
            std::memcpy(&from[2 * i], &b, 2);
            x = float_of(b);
          } else if (dtype == decoder::kF16) {
            const __half h = __float2half(x);
            std::memcpy(&from[2 * i], &h, 2);
            x = __half2float(h);
          } else {
            std::memcpy(&from[4 * i], &x, 4);
          }
          double y = x;
          if (op == WidenOp::plus_one) y += 1;
          if (op == WidenOp::negative_exp) y = -std::exp(y);
          want[transpose ? i % p.cols * p.rows + i / p.cols : i] = y;
        }
        const Dev<std::uint8_t> dev_from(from);
        const Dev<float> to(n);
        run(widen, decoder::plan_widen(n, run.chip), dev_from.ptr(), to.ptr(), p);
        compare("widen", text({{"dtype", dtype}, {"op", static_cast<double>(op)}, {"transpose", transpose}}), to.get(), want, 2e-7);
      }
    }
  }
}

}  // namespace bench
