// Products of query rows with staged tiles: scores and outputs. In the instruction set's namespace.
#pragma once

#include "axes.hpp"

namespace kvarn::KVARN_ISA {
namespace {

// s[r][32] = scores of R query rows with one tile. A row of q is `depth` numbers, bf16 if A::pairs,
// else f32.
template <typename A, int R>
inline void scores(const void* q, int64_t depth, const void* tile, float* s, int64_t s_stride) {
    F acc[R][2];
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
#if defined(__AVX512BF16__)
    if constexpr (A::pairs && !A::tiled) {
        const auto* a = static_cast<const uint16_t*>(q);
        const auto* b = static_cast<const uint16_t*>(tile);
        for (int64_t d = 0; d < depth; d += 2, b += 2 * kSlots) {
            const auto b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 32);
            KVARN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                const __m512bh x = pair_at(a + r * depth + d);
                acc[r][0].v = _mm512_dpbf16_ps(acc[r][0].v, b0, x);
                acc[r][1].v = _mm512_dpbf16_ps(acc[r][1].v, b1, x);
            }
        }
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r) store(s + r * s_stride, acc[r][0]), store(s + r * s_stride + 16, acc[r][1]);
        return;
    }
#endif
    const auto* a = static_cast<const float*>(q);
    const auto* b = static_cast<const float*>(tile);
    in_turn<A::tiled>(acc, depth, [&](F(&sums)[R][2], int64_t d) {
        const F b0 = load(b + d * kSlots), b1 = load(b + d * kSlots + 16);
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r) {
            const F x = set1(a[r * depth + d]);
            sums[r][0] = fma(b0, x, sums[r][0]);
            sums[r][1] = fma(b1, x, sums[r][1]);
        }
    });
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) store(s + r * s_stride, acc[r][0]), store(s + r * s_stride + 16, acc[r][1]);
}

// o[r][N * 16 dims] = sum over n tiles of p[r][slot] * V[slot][dim]. Staged tiles of V follow each
// other.
template <typename A, int R, int N>
inline void values(const void* p, int64_t p_stride, const void* v, int64_t width, int64_t n, float* o,
                   int64_t o_stride) {
    F acc[R][N];
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) {
        KVARN_UNROLL(4)
        for (int i = 0; i < N; ++i) acc[r][i] = zero();
    }
#if defined(__AVX512BF16__)
    if constexpr (A::pairs && !A::tiled) {
        const auto* a = static_cast<const uint16_t*>(p);
        const auto* b = static_cast<const uint16_t*>(v);
        for (int64_t s = 0; s < n * kSlots; s += 2, b += 2 * width) {
            KVARN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                const __m512bh x = pair_at(a + r * p_stride + s);
                KVARN_UNROLL(4)
                for (int i = 0; i < N; ++i)
                    acc[r][i].v = _mm512_dpbf16_ps(acc[r][i].v, (__m512bh)_mm512_loadu_si512(b + i * 32), x);
            }
        }
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r) {
            KVARN_UNROLL(4)
            for (int i = 0; i < N; ++i) store(o + r * o_stride + i * kLanes, acc[r][i]);
        }
        return;
    }
#endif
    const auto* a = static_cast<const float*>(p);
    const auto* b = static_cast<const float*>(v);
    in_turn<A::tiled>(acc, n * kSlots, [&](F(&sums)[R][N], int64_t s) {
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r) {
            const F x = set1(a[r * p_stride + s]);
            KVARN_UNROLL(4)
            for (int i = 0; i < N; ++i) sums[r][i] = fma(load(b + s * width + i * kLanes), x, sums[r][i]);
        }
    });
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) {
        KVARN_UNROLL(4)
        for (int i = 0; i < N; ++i) store(o + r * o_stride + i * kLanes, acc[r][i]);
    }
}

template <typename A, int R>
inline void values_rows(const void* p, int64_t p_stride, const void* v, int64_t width, int64_t n, float* o,
                        int64_t o_stride) {
    constexpr int64_t bytes = 4;  // per dim: a pair of bf16, or one f32
    int64_t d = 0;
    const auto* at = static_cast<const uint8_t*>(v);
    for (; d + kValueLanes * kLanes <= width; d += kValueLanes * kLanes)
        values<A, R, kValueLanes>(p, p_stride, at + d * bytes, width, n, o + d, o_stride);
    for (; d < width; d += kLanes) values<A, R, 1>(p, p_stride, at + d * bytes, width, n, o + d, o_stride);
}

// s[row][32]: scores of some rows of q with one staged tile.
template <typename K, int kMost>
void score_rows(const uint8_t* q, int64_t rows, int64_t depth, const uint8_t* tile, float* s) {
    int64_t r = 0;
    const auto at = [&](int64_t row) { return q + row * depth * K::number_bytes; };
    for (; r + kMost <= rows; r += kMost) scores<K, kMost>(at(r), depth, tile, s + r * kChunk, kChunk);
    if constexpr (kMost > 4)
        for (; r + 4 <= rows; r += 4) scores<K, 4>(at(r), depth, tile, s + r * kChunk, kChunk);
    for (; r < rows; ++r) scores<K, 1>(at(r), depth, tile, s + r * kChunk, kChunk);
}

// out[row][width]: outputs of some rows of p with n staged tiles.
template <typename V>
void value_rows(const uint8_t* p, int64_t rows, const uint8_t* tiles, int64_t width, int64_t n, float* out) {
    int64_t r = 0;
    const auto at = [&](int64_t row) { return p + row * kChunk * V::number_bytes; };
    for (; r + kValueRows <= rows; r += kValueRows)
        values_rows<V, kValueRows>(at(r), kChunk, tiles, width, n, out + r * width, width);
    if constexpr (kValueRows > 2)
        for (; r + 2 <= rows; r += 2) values_rows<V, 2>(at(r), kChunk, tiles, width, n, out + r * width, width);
    for (; r < rows; ++r) values_rows<V, 1>(at(r), kChunk, tiles, width, n, out + r * width, width);
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
