// Softmax over one chunk of keys, and merging the results of chunks. In the instruction set's
// namespace.
#pragma once

#include "../scratch.hpp"
#include "axes.hpp"

namespace kvarn::KVARN_ISA {
namespace {

struct MaxSum {
    float m, l;
};

template <typename V>
inline void store_weights(void* p, int64_t at, F x) {  // 16 numbers of p, in the type that V is multiplied with
    if constexpr (V::pairs) {
        store_bf16(static_cast<uint16_t*>(p) + at, x);
    } else if constexpr (V::rounds) {
        uint16_t narrow[kLanes];
        store_bf16(narrow, x);
        store(static_cast<float*>(p) + at, load_bf16(narrow));
    } else {
        store(static_cast<float*>(p) + at, x);
    }
}

// Softmax of one row: s has n tiles of 32 scores, in base 2. Writes p. Returns the maximum and the
// sum of the chunk.
template <typename V>
MaxSum softmax(float* s, const uint32_t* seen, int64_t n, void* p) {
    F top = set1(kMinusInfinity);
    for (int64_t t = 0; t < n; ++t)
        for (int64_t i = 2 * t; i < 2 * t + 2; ++i) {
            F x = load(s + i * kLanes);
            if (seen[t] != ~0u) {
                x = keep(seen[t] >> (i % 2 * 16) & 0xffffu, x, set1(kMinusInfinity));
                store(s + i * kLanes, x);
            }
            top = max(top, x);
        }
    const float m = reduce_max(top);
    const F base = set1(m == kMinusInfinity ? 0.0f : m);
    F sum = zero();
    for (int64_t i = 0; i < 2 * n; ++i) {
        const F x = exp2<V::rounds>(sub(load(s + i * kLanes), base));
        sum = add(sum, x);
        store_weights<V>(p, i * kLanes, x);
    }
    return {m, reduce_add(sum)};
}

// The same for R rows that see all slots, interleaved: the steps of one row depend on each other.
template <typename V, int R>
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
            const F x = exp2<V::rounds>(sub(load(s + r * kChunk + i), base[r]));
            sum[r] = add(sum[r], x);
            store_weights<V>(p + r * kChunk * V::number_bytes, i, x);
        }
    }
    KVARN_UNROLL(4)
    for (int r = 0; r < R; ++r) l[r] = reduce_add(sum[r]);
}

inline void clear(float* sums, int64_t n) {  // n: whole registers. memset of some thousand bytes takes microseconds
    for (int64_t i = 0; i < n; i += kLanes) store(sums + i, zero());
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
