// Scores, softmax and outputs of some query rows over staged tiles. Included by attention.cpp.
#pragma once

#include "../scratch.hpp"
#include "tiles.hpp"

namespace kvarn::KVARN_ISA {
namespace {

// -- products of query rows with staged tiles

// s[r][32] = scores of R query rows with one tile. A row of q is `depth` numbers, bf16 if pairs(C),
// else f32.
template <Math C, int R>
inline void scores(const void* q, int64_t depth, const void* tile, float* s, int64_t s_stride) {
    F acc[R][2];
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
#if defined(__AVX512BF16__)
    if constexpr (pairs(C) && !tiled(C)) {
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
    in_turn<tiled(C)>(acc, depth, [&](F(&sums)[R][2], int64_t d) {
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
template <Math C, int R, int N>
inline void values(const void* p, int64_t p_stride, const void* v, int64_t width, int64_t n, float* o,
                   int64_t o_stride) {
    F acc[R][N];
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) {
        KVARN_UNROLL(4)
        for (int i = 0; i < N; ++i) acc[r][i] = zero();
    }
#if defined(__AVX512BF16__)
    if constexpr (pairs(C) && !tiled(C)) {
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
    in_turn<tiled(C)>(acc, n * kSlots, [&](F(&sums)[R][N], int64_t s) {
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

template <Math C, int R>
inline void values_rows(const void* p, int64_t p_stride, const void* v, int64_t width, int64_t n, float* o,
                        int64_t o_stride) {
    constexpr int64_t bytes = 4;  // per dim: a pair of bf16, or one f32
    int64_t d = 0;
    const auto* at = static_cast<const uint8_t*>(v);
    for (; d + kValueLanes * kLanes <= width; d += kValueLanes * kLanes)
        values<C, R, kValueLanes>(p, p_stride, at + d * bytes, width, n, o + d, o_stride);
    for (; d < width; d += kLanes) values<C, R, 1>(p, p_stride, at + d * bytes, width, n, o + d, o_stride);
}

// -- softmax over a chunk

struct MaxSum {
    float m, l;
};

template <Math C>
constexpr int64_t a_bytes() {  // bytes of one number of q or p
    return pairs(C) ? 2 : 4;
}

template <Math C>
inline void store_weights(void* p, int64_t at, F x) {  // 16 numbers of p, in the same type as q
    if constexpr (pairs(C)) {
        store_bf16(static_cast<uint16_t*>(p) + at, x);
    } else if constexpr (rounds(C)) {
        uint16_t narrow[kLanes];
        store_bf16(narrow, x);
        store(static_cast<float*>(p) + at, load_bf16(narrow));
    } else {
        store(static_cast<float*>(p) + at, x);
    }
}

// Softmax of one row: s has n tiles of 32 scores, in base 2. Writes p (bf16 or f32, like q).
// Returns the maximum and the sum of the chunk.
template <Math C>
MaxSum softmax(float* s, const uint32_t* seen, int64_t n, const float* k_scale, const float* v_scale, void* p) {
    F top = set1(kMinusInfinity);
    for (int64_t t = 0; t < n; ++t)
        for (int64_t i = 2 * t; i < 2 * t + 2; ++i) {
            F x = load(s + i * kLanes);
            if constexpr (codec(C) == Codec::Int8) x = mul(x, load(k_scale + i * kLanes));
            if (seen[t] != ~0u) x = keep(seen[t] >> (i % 2 * 16) & 0xffffu, x, set1(kMinusInfinity));
            if (codec(C) == Codec::Int8 || seen[t] != ~0u) store(s + i * kLanes, x);
            top = max(top, x);
        }
    const float m = reduce_max(top);
    const F base = set1(m == kMinusInfinity ? 0.0f : m);
    F sum = zero();
    for (int64_t i = 0; i < 2 * n; ++i) {
        F x = exp2<rounds(C)>(sub(load(s + i * kLanes), base));
        sum = add(sum, x);
        if constexpr (codec(C) == Codec::Int8)
            x = keep(seen[i / 2] >> (i % 2 * 16) & 0xffffu, mul(x, load(v_scale + i * kLanes)), zero());
        store_weights<C>(p, i * kLanes, x);
    }
    return {m, reduce_add(sum)};
}

// The same for R rows that see all slots, interleaved: the steps of one row depend on each other.
template <Math C, int R>
inline void softmax_whole(const float* s, int64_t n, uint8_t* p, float* m, float* l) {
    F top[R], base[R], sum[R];
    KVARN_UNROLL(4)
    for (int r = 0; r < R; ++r) top[r] = set1(kMinusInfinity), sum[r] = zero();
    for (int64_t i = 0; i < 2 * n * kLanes; i += kLanes) {
        KVARN_UNROLL(4)
        for (int r = 0; r < R; ++r) top[r] = max(top[r], load(s + r * kChunk + i));
    }
    KVARN_UNROLL(4)
    for (int r = 0; r < R; ++r) {
        m[r] = reduce_max(top[r]);
        base[r] = set1(m[r] == kMinusInfinity ? 0.0f : m[r]);
    }
    for (int64_t i = 0; i < 2 * n * kLanes; i += kLanes) {
        KVARN_UNROLL(4)
        for (int r = 0; r < R; ++r) {
            const F x = exp2<rounds(C)>(sub(load(s + r * kChunk + i), base[r]));
            sum[r] = add(sum[r], x);
            store_weights<C>(p + r * kChunk * a_bytes<C>(), i, x);
        }
    }
    KVARN_UNROLL(4)
    for (int r = 0; r < R; ++r) l[r] = reduce_add(sum[r]);
}

struct Totals {  // maximum and sum of some rows, and padding up to a whole register
    float m[kMaxRows + kLanes], l[kMaxRows + kLanes];
    explicit Totals(int64_t rows) {
        for (int64_t r = 0; r < rows + kLanes; ++r) m[r] = kMinusInfinity, l[r] = 0.0f;
    }
};

// Merges the next chunk into (m, l, o) of each row. The padding rows stay as they are.
inline void absorb(float* total_m, float* total_l, float* o, const Totals& chunk, const float* part,
                   int64_t part_stride, int64_t rows, int64_t width) {
    float a[kMaxRows + kLanes], b[kMaxRows + kLanes];
    for (int64_t r = 0; r < rows; r += kLanes) {
        const F old = load(total_m + r), fresh = load(chunk.m + r), m = max(fresh, old);  // m is not NaN
        const F base = where_below(m, set1(-__FLT_MAX__), zero(), m);
        const F x = exp2(sub(old, base)), y = exp2(sub(fresh, base));
        store(a + r, x), store(b + r, y);
        store(total_m + r, m);
        store(total_l + r, fma(load(total_l + r), x, mul(load(chunk.l + r), y)));
    }
    for (int64_t r = 0; r < rows; ++r) {
        const F x = set1(a[r]), y = set1(b[r]);
        for (int64_t d = 0; d < width; d += kLanes)
            store(o + r * width + d, fma(load(o + r * width + d), x, mul(load(part + r * part_stride + d), y)));
    }
}

inline void finish(float total, const float* o, int64_t dim, float* out) {
    int64_t d = 0;
    const float sum = total == 0.0f ? 1.0f : total;
    const F l = set1(sum);
    for (; d + kLanes <= dim; d += kLanes) store(out + d, div(load(o + d), l));
    for (; d < dim; ++d) out[d] = o[d] / sum;
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
