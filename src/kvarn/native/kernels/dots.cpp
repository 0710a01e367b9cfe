// Compiled once per instruction set; see dots.hpp. Plain loops that the compiler vectorizes.
#include "../dots.hpp"

#include <vector>

#include "../base.hpp"
#include "../isa.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr int64_t kSums = 8;                // partial sums of one output
constexpr int64_t kRows = 2, kColumns = 4;  // outputs computed together: their sums are independent

// Outputs of kM rows of a with kN rows of b. All are widened, and padded with zeros to `k`, a
// multiple of kSums.
template <int64_t kM, int64_t kN>
void outputs(const double* a, const double* b, int64_t k, int64_t stride, float* out) {
    double sums[kM][kN][kSums] = {};
    for (int64_t i = 0; i < k; i += kSums)
        for (int64_t row = 0; row < kM; ++row)
            for (int64_t column = 0; column < kN; ++column)
                for (int64_t j = 0; j < kSums; ++j) sums[row][column][j] += a[row * k + i + j] * b[column * k + i + j];
    for (int64_t row = 0; row < kM; ++row)
        for (int64_t column = 0; column < kN; ++column) {
            double total = sums[row][column][0];
            for (int64_t j = 1; j < kSums; ++j) total += sums[row][column][j];
            out[row * stride + column] = float(total);
        }
}

// Padding adds +0 to sums that began at +0, which changes nothing.
void widen(const float* x, int64_t rows, int64_t k, int64_t padded, double* out) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < k; ++i) out[row * padded + i] = double(x[row * k + i]);
        for (int64_t i = k; i < padded; ++i) out[row * padded + i] = 0.0;
    }
}

template <int64_t kN>
void columns(const std::vector<double>& a, const double* b, int64_t m, int64_t k, int64_t stride, float* out) {
    int64_t row = 0;
    for (; row + kRows <= m; row += kRows) outputs<kRows, kN>(&a[size_t(row * k)], b, k, stride, out + row * stride);
    for (; row < m; ++row) outputs<1, kN>(&a[size_t(row * k)], b, k, stride, out + row * stride);
}

// Some rows of a, few enough to stay in the cache while b is read.
void some_rows(const float* a, const float* b, int64_t m, int64_t n, int64_t k, int64_t stride, float* out) {
    const int64_t padded = (k + kSums - 1) / kSums * kSums;
    std::vector<double> left(size_t(m * padded)), right(size_t(kColumns * padded));
    widen(a, m, k, padded, left.data());
    int64_t column = 0;
    for (; column + kColumns <= n; column += kColumns) {
        widen(b + column * k, kColumns, k, padded, right.data());
        columns<kColumns>(left, right.data(), m, padded, stride, out + column);
    }
    for (; column < n; ++column) {
        widen(b + column * k, 1, k, padded, right.data());
        columns<1>(left, right.data(), m, padded, stride, out + column);
    }
}

void dots(const float* a, const float* b, int64_t m, int64_t n, int64_t k, int64_t stride, float* out) {
    constexpr int64_t kSome = 32;
    for (int64_t row = 0; row < m; row += kSome)
        some_rows(a + row * k, b, m - row < kSome ? m - row : kSome, n, k, stride, out + row * stride);
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
