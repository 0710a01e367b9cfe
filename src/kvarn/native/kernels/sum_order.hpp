// The two orders in which products of bf16 are summed (../isa.hpp). In the instruction set's
// namespace.
#pragma once

#include "../isa.hpp"
#include "simd.hpp"

namespace kvarn::KVARN_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool kDotUnit = true;

inline __m512bh pair_at(const uint16_t* p) {
    int32_t two;
    memcpy(&two, p, 4);
    return (__m512bh)_mm512_set1_epi32(two);
}
#else
constexpr bool kDotUnit = false;
#endif

// Adds terms 0 .. n - 1 to R x N sums; one(sums, i) adds term i. In pairs, the odd term first; or,
// if tiled, per 32 terms a chain of even terms and a chain of odd terms, whose sum is then added.
template <bool kTiled, int R, int N, typename One>
KVARN_INLINE void in_turn(F (&sums)[R][N], int64_t n, One&& one) {
    if constexpr (!kTiled) {
        for (int64_t i = 0; i < n; i += 2) one(sums, i + 1), one(sums, i);
    } else {
        for (int64_t from = 0; from < n; from += 32) {
            F chain[2][R][N];
            for (int odd = 0; odd < 2; ++odd) {
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < N; ++j) chain[odd][r][j] = zero();
                for (int64_t i = from + odd; i < smaller(from + 32, n); i += 2) one(chain[odd], i);
            }
            for (int r = 0; r < R; ++r)
                for (int j = 0; j < N; ++j) sums[r][j] = add(sums[r][j], add(chain[0][r][j], chain[1][r][j]));
        }
    }
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
