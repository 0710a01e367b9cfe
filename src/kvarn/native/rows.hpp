// Operations on single rows of activations: norms, rotation, gates. Sums over a row have one order:
// lane i sums the elements whose index is i mod 16.
#pragma once

#include <cstdint>

namespace kvarn {

enum class Gate : int32_t { Silu, Gelu };

struct Rows {
    void (*norm)(const float* x, const float* weight, int64_t n, float eps, float* out);  // x / rms(x) * weight
    void (*rotate)(float* x, const float* cos, const float* sin, int64_t half);           // pairs (i, i + half)
    void (*gate)(const float* gate, const float* up, int64_t n, Gate kind, float* out);
    void (*scale)(float* x, int64_t n, float factor);
    void (*add)(float* x, const float* y, int64_t n);
};

}  // namespace kvarn
