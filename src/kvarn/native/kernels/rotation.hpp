// R, the rotation of int8 cells: the Hadamard matrix of 32 on each 32 consecutive numbers, not
// normalized, so R(R(x)) = 32 x. Stages 1, 2, 4, 8, 16, each (a, b) -> (a + b, a - b) for numbers i
// and i + stage: only f32 additions in this order, so every instruction set gives the same bits. In
// the instruction set's namespace.
#pragma once

#include "simd.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr int64_t kRotated = 32;
constexpr float kUnrotate = 1.0f / 32;

inline void rotate_block(F& a, F& b) {
    a = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(a))));
    b = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(b))));
    const F sum = add(a, b);
    b = sub(a, b);
    a = sum;
}

inline void rotate_blocks(float* x, int64_t n) {  // n is a multiple of 32
    for (int64_t i = 0; i < n; i += kRotated) {
        F a = load(x + i), b = load(x + i + kLanes);
        rotate_block(a, b);
        store(x + i, a);
        store(x + i + kLanes, b);
    }
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
