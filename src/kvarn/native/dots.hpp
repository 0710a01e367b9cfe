// Sums of products in an order of our own, for the reference backend: no library is asked in which order it adds.
// A product of two f32 is exact in f64, so that a fused multiply-add changes nothing; sums are f64 and rounded once.
// An output depends on its own row and its own column, and on nothing beside them.
#pragma once

#include <cstdint>

namespace kvarn {

struct Dots {
    // out [m, n] = a [m, k] times b [n, k] transposed: eight sums, terms k mod 8, added from the first to the last.
    // Rows of out lie `stride` apart.
    void (*dots)(const float* a, const float* b, int64_t m, int64_t n, int64_t k, int64_t stride, float* out);
    // out [m, d] = weights [m, j] times v [j, d]: terms in ascending j, those that are not `seen` left out, so that
    // what they hold, NaN included, does not matter.
    void (*weigh)(const float* weights, const bool* seen, const float* v, int64_t m, int64_t j, int64_t d, float* out);
};

}  // namespace kvarn
