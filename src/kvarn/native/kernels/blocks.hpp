// Packed weights block by block: 32 columns of 16 rows as vectors of codes, their scales, and what a block adds to an
// output. Included by linear.cpp; lives in the instruction set's namespace.
#pragma once

#include "../linear.hpp"
#include "bytes.hpp"
#include "order.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr bool has_min(Kind k) { return k == Kind::Q4_1 || k == Kind::Q5_1 || k == Kind::Q4_K || k == Kind::Q5_K; }
constexpr bool eight_bits(Kind k) { return k == Kind::Q8_0 || (k >= Kind::Whole32 && k <= Kind::Whole16Min); }
constexpr int bits_of_kind(Kind k) {
    return eight_bits(k) ? 8 : k == Kind::Q6_K ? 6 : k == Kind::Q5_0 || k == Kind::Q5_1 || k == Kind::Q5_K ? 5 : 4;
}
constexpr int offset_of(Kind k) {
    return eight_bits(k) ? (kSigned ? 0 : 128) : k == Kind::Q4_0 ? 8 : k == Kind::Q5_0 ? 16 : k == Kind::Q6_K ? 32 : 0;
}
constexpr int block_bytes(Kind k) {
    return bits_of_kind(k) == 4 ? 256 : bits_of_kind(k) == 5 ? 320 : bits_of_kind(k) == 6 ? 384 : 512;
}

template <int kBits>
inline void unpack(const uint8_t* p, Bytes* w) {  // p: the block's codes, moved to the slice of rows
    if constexpr (kBits == 8) {
        for (int g = 0; g < 8; ++g) w[g] = load_bytes(p + g * 64);
        return;
    }
    const uint8_t* nibbles = p + (kBits == 5 ? 64 : kBits == 6 ? 128 : 0);
    for (int g = 0; g < 4; ++g) {
        const Bytes both = load_bytes(nibbles + g * 64);
        w[g] = low_nibbles(both);
        w[g + 4] = high_nibbles(both);
    }
    if constexpr (kBits == 5) {
        const Bytes plane = load_bytes(p);
        w[0] = with_top<1, 0>(w[0], plane), w[1] = with_top<1, 1>(w[1], plane);
        w[2] = with_top<1, 2>(w[2], plane), w[3] = with_top<1, 3>(w[3], plane);
        w[4] = with_top<1, 4>(w[4], plane), w[5] = with_top<1, 5>(w[5], plane);
        w[6] = with_top<1, 6>(w[6], plane), w[7] = with_top<1, 7>(w[7], plane);
    } else if constexpr (kBits == 6) {
        const Bytes first = load_bytes(p), second = load_bytes(p + 64);
        w[0] = with_top<2, 0>(w[0], first), w[1] = with_top<2, 2>(w[1], first);
        w[2] = with_top<2, 4>(w[2], first), w[3] = with_top<2, 6>(w[3], first);
        w[4] = with_top<2, 0>(w[4], second), w[5] = with_top<2, 2>(w[5], second);
        w[6] = with_top<2, 4>(w[6], second), w[7] = with_top<2, 6>(w[7], second);
    }
}

// Scales of block b for the slice of rows that begins at `row`.
template <Kind K>
struct Scales {
    Floats d, m;    // m: what is added (Q4_1) or subtracted (K types) per unit of dx * sumx
    Floats d2, m2;  // of the second 16 columns, where those have their own
    Ints sc, sc2;

    inline Scales(const uint8_t* s, int64_t b, int row) {
        if constexpr (K == Kind::Q4_0 || K == Kind::Q5_0 || K == Kind::Q8_0) {
            d = halves(s + b * 32 + row * 2);
        } else if constexpr (K == Kind::Q4_1 || K == Kind::Q5_1) {
            d = halves(s + b * 64 + row * 2);
            m = halves(s + b * 64 + 32 + row * 2);
        } else if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) {
            const uint8_t *super = s + b / 8 * 320, *sub = super + 64 + b % 8 * 32;
            d = product(halves(super + row * 2), floats(unsigned_bytes(sub + row)));
            m = product(halves(super + 32 + row * 2), floats(unsigned_bytes(sub + 16 + row)));
        } else if constexpr (K == Kind::Q6_K) {
            const uint8_t *super = s + b / 8 * 288, *sub = super + 32 + b % 8 * 32;
            d = halves(super + row * 2);
            sc = signed_bytes(sub + row);
            sc2 = signed_bytes(sub + 16 + row);
        } else if constexpr (K == Kind::Whole32) {
            d = singles(s + b * 64 + row * 4);
        } else {
            const uint8_t* at = s + b * (K == Kind::Whole16 ? 128 : 256) + row * 4;
            d = singles(at), d2 = singles(at + 64);
            if constexpr (K == Kind::Whole16Min) m = singles(at + 128), m2 = singles(at + 192);
        }
    }
};

// The integer sum over half a block's columns. Two short chains are quicker than one: the products wait for each other.
template <Kind K>
inline Ints half_sum(const Bytes* w, const int8_t* x, const BlockMeta& meta, int half) {
    constexpr int kOffset = offset_of(K);
    Ints sum = ints(0);
    KVARN_UNROLL(4)
    for (int g = 4 * half; g < 4 * half + 4; ++g) {
        if constexpr (eight_bits(K))
            sum = dot8(sum, w[g], x + 4 * g);
        else
            sum = dot(sum, w[g], x + 4 * g);
    }
    if constexpr (kOffset != 0) sum = minus(sum, shifted<__builtin_ctz(kOffset)>(ints(meta.sum[half])));
    return sum;
}

constexpr bool two_sums(Kind k) { return k == Kind::Q6_K || k == Kind::Whole16 || k == Kind::Whole16Min; }

// acc and one block's part of it: `a` and `b` are the block's integer sums, in one or, by halves, in two.
template <Kind K>
inline Floats scaled(Floats acc, const Scales<K>& s, const BlockMeta& meta, Ints a, Ints b) {
    const Floats dx = same(meta.d);
    if constexpr (K == Kind::Q6_K) {  // both halves as one integer below 2^24
        return fmadd(product(s.d, dx), floats(plus(times(s.sc, a), times(s.sc2, b))), acc);
    } else if constexpr (two_sums(K)) {
        acc = fmadd(product(s.d, dx), floats(a), acc);
        acc = fmadd(product(s.d2, dx), floats(b), acc);
        if constexpr (K == Kind::Whole16Min) {
            acc = fnmadd(s.m, same(meta.d * float(meta.sum[0])), acc);
            acc = fnmadd(s.m2, same(meta.d * float(meta.sum[1])), acc);
        }
        return acc;
    } else {
        acc = fmadd(product(s.d, dx), floats(a), acc);
        if constexpr (K == Kind::Q4_1 || K == Kind::Q5_1) acc = fmadd(s.m, same(meta.s), acc);
        if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) acc = fnmadd(s.m, same(meta.s), acc);
        return acc;
    }
}

template <Kind K>
inline Floats accumulate(Floats acc, const Bytes* w, const Scales<K>& s, const int8_t* x, const BlockMeta& meta) {
    const Ints a = half_sum<K>(w, x, meta, 0), b = half_sum<K>(w, x, meta, 1);
    if constexpr (two_sums(K)) return scaled<K>(acc, s, meta, a, b);
    const Ints sum = plus(a, b);
    return scaled<K>(acc, s, meta, sum, sum);
}

constexpr int64_t kAhead = 8192;  // bytes of weights to expect ahead, when they come from memory

// Some lines of what is coming, beside a block of rows: so many that memory keeps up, and the block hardly waits.
template <int kLines>
inline void bring(Coming& c) {
    if (c.piece == c.n) return;
    const uint8_t* p = c.pieces[c.piece] + c.at;
    for (int line = 0; line < kLines; ++line) expect(p + line * 64);
    if ((c.at += kLines * 64) >= c.bytes) c.at = 0, ++c.piece;
}

inline void write_row(const Output& y, int64_t row, int64_t column, Floats acc) {
    float* p = y.data + row * y.stride + column;
    if (y.bias) acc = sum(acc, singles(reinterpret_cast<const uint8_t*>(y.bias + column)));
    if (y.add) acc = sum(acc, singles(reinterpret_cast<const uint8_t*>(p)));
    put(p, acc);
}

inline void write_lanes(const Output& y, int64_t row, int64_t column, F acc) {
    float* p = y.data + row * y.stride + column;
    if (y.bias) acc = add(acc, load(y.bias + column));
    if (y.add) acc = add(acc, load(p));
    store(p, acc);
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
