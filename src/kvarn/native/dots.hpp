// Sums of products in a fixed order, for the reference backend. A BLAS library does not promise an
// order. A product of two f32 is exact in f64, so a fused multiply-add changes nothing. Sums
// are f64 and are rounded once. An output depends only on its own row of a and its own row of b.
#pragma once

#include <cstdint>

namespace kvarn {

struct Dots {
    // out [m, n] = a [m, k] times b [n, k] transposed. Eight partial sums take the terms k mod 8
    // and are added from the first to the last. Rows of out are `stride` apart.
    void (*dots)(const float* a, const float* b, int64_t m, int64_t n, int64_t k, int64_t stride, float* out);
    // out [m, d] = weights [m, j] times v [j, d], in ascending j. Terms that are not `seen` are
    // left out, so v may hold anything there, NaN included.
    void (*weigh)(const float* weights, const bool* seen, const float* v, int64_t m, int64_t j, int64_t d, float* out);
};

}  // namespace kvarn
