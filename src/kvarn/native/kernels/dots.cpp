// Compiled once per instruction set; see dots.hpp. Plain loops that the compiler vectorizes.
#include "../dots.hpp"

#include <vector>

#include "../isa.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr int64_t kSums = 8;  // of one output
constexpr int64_t kRows = 4;  // of b at a time: their sums are independent

float rounded(const double* sums) {
    double total = sums[0];
    for (int64_t i = 1; i < kSums; ++i) total += sums[i];
    return float(total);
}

// Outputs of one row of a, widened and padded with zeros, with kN rows of b.
template <int64_t kN>
void outputs(const double* a, const float* b, int64_t k, float* out) {
    double sums[kN][kSums] = {};
    const int64_t whole = k / kSums * kSums;
    for (int64_t i = 0; i < whole; i += kSums)
        for (int64_t row = 0; row < kN; ++row)
            for (int64_t j = 0; j < kSums; ++j) sums[row][j] += a[i + j] * double(b[row * k + i + j]);
    for (int64_t row = 0; row < kN; ++row) {
        for (int64_t i = whole; i < k; ++i) sums[row][i - whole] += a[i] * double(b[row * k + i]);
        out[row] = rounded(sums[row]);
    }
}

void dots(const float* a, const float* b, int64_t m, int64_t n, int64_t k, int64_t stride, float* out) {
    std::vector<double> wide(size_t(m * k));
    for (int64_t i = 0; i < m * k; ++i) wide[size_t(i)] = double(a[i]);
    int64_t column = 0;
    for (; column + kRows <= n; column += kRows)
        for (int64_t row = 0; row < m; ++row)
            outputs<kRows>(&wide[size_t(row * k)], b + column * k, k, out + row * stride + column);
    for (; column < n; ++column)
        for (int64_t row = 0; row < m; ++row)
            outputs<1>(&wide[size_t(row * k)], b + column * k, k, out + row * stride + column);
}

void weigh(const float* weights, const bool* seen, const float* v, int64_t m, int64_t j, int64_t d, float* out) {
    std::vector<double> sums(static_cast<size_t>(d));
    for (int64_t row = 0; row < m; ++row) {
        sums.assign(size_t(d), 0.0);
        for (int64_t term = 0; term < j; ++term) {
            if (!seen[row * j + term]) continue;
            const double weight = double(weights[row * j + term]);
            const float* values = v + term * d;
            double* sum = sums.data();
            for (int64_t i = 0; i < d; ++i) sum[i] += weight * double(values[i]);
        }
        for (int64_t i = 0; i < d; ++i) out[row * d + i] = float(sums[size_t(i)]);
    }
}

}  // namespace

extern const Dots products;
const Dots products = {dots, weigh};

}  // namespace kvarn::KVARN_ISA
