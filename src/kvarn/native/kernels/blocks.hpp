// Reads packed weights block by block. A block has 32 columns of 16 rows: vectors of codes, and
// their scales. Also computes what a block adds to an output. Included by linear.cpp; in the
// instruction set's namespace.
#pragma once

#include "../linear.hpp"
#include "bytes.hpp"
#include "sum_order.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr bool from_table(Kind k) { return k == Kind::Table16 || k == Kind::Table32 || k == Kind::Table; }
constexpr bool centred(Kind k) { return k == Kind::Q8_0 || from_table(k); }  // a byte is the number + 128
constexpr int offset_of(Kind k) {
    if (centred(k)) return kSigned ? 0 : 128;
    return k == Kind::Q3_K ? 4 : k == Kind::Q4_0 ? 8 : k == Kind::Q5_0 ? 16 : k == Kind::Q6_K ? 32 : 0;
}

// Insert bits kTo.. of all codes: pairs of bits from two planes, or single bits from one.
template <int kTo>
inline void add_pairs(const uint8_t* planes, Bytes* w) {
    const Bytes first = load_bytes(planes), second = load_bytes(planes + 64);
    w[0] = insert_bits<2, 0, kTo>(w[0], first), w[1] = insert_bits<2, 2, kTo>(w[1], first);
    w[2] = insert_bits<2, 4, kTo>(w[2], first), w[3] = insert_bits<2, 6, kTo>(w[3], first);
    w[4] = insert_bits<2, 0, kTo>(w[4], second), w[5] = insert_bits<2, 2, kTo>(w[5], second);
    w[6] = insert_bits<2, 4, kTo>(w[6], second), w[7] = insert_bits<2, 6, kTo>(w[7], second);
}
template <int kTo>
inline void add_singles(const uint8_t* p, Bytes* w) {
    const Bytes plane = load_bytes(p);
    w[0] = insert_bits<1, 0, kTo>(w[0], plane), w[1] = insert_bits<1, 1, kTo>(w[1], plane);
    w[2] = insert_bits<1, 2, kTo>(w[2], plane), w[3] = insert_bits<1, 3, kTo>(w[3], plane);
    w[4] = insert_bits<1, 4, kTo>(w[4], plane), w[5] = insert_bits<1, 5, kTo>(w[5], plane);
    w[6] = insert_bits<1, 6, kTo>(w[6], plane), w[7] = insert_bits<1, 7, kTo>(w[7], plane);
}
inline void take_nibbles(const uint8_t* p, Bytes* w) {
    for (int g = 0; g < 4; ++g) {
        const Bytes both = load_bytes(p + g * 64);
        w[g] = low_nibbles(both);
        w[g + 4] = high_nibbles(both);
    }
}

template <Kind K>
inline void unpack(const uint8_t* p, Bytes table, Bytes* w) {  // p: the block's codes, from the first row of the slice
    constexpr int kBits = int(code_bits(K));
    if constexpr (kBits == 8) {
        for (int g = 0; g < 8; ++g) w[g] = load_bytes(p + g * 64);
    } else if constexpr (kBits < 4) {
        for (int g = 0; g < 8; ++g) w[g] = zero_bytes();
        add_pairs<0>(p, w);
        if constexpr (kBits == 3) add_singles<2>(p + 128, w);
    } else {
        take_nibbles(p + (kBits - 4) * 64, w);
        if constexpr (kBits == 5) add_singles<4>(p, w);
        if constexpr (kBits == 6) add_pairs<4>(p, w);
        if constexpr (from_table(K))
            for (int g = 0; g < 8; ++g) w[g] = lookup(table, w[g]);
    }
}

// Scales of block b for kFloatLanes rows from `row` on.
template <Kind K>
struct Scales {
    Floats d, m;   // m times dx * sumx is added (Q4_1, Q5_1) or subtracted (K types)
    Ints sc, sc2;  // factors of d for both halves of the block, if they differ
    Ints mn, mn2;  // factors of m, likewise

    inline Scales(const uint8_t* s, int64_t b, int row) {
        constexpr ScaleLayout kLayout = scale_layout(K);
        constexpr int64_t kBlocks = kLayout.blocks, kRecord = kLayout.record_bytes(), kMin = kLayout.min_offset();
        constexpr int64_t kFactors = kLayout.factor_offset(), kFactorBytes = kLayout.factors * kGroup;
        const uint8_t* record = s + b / kBlocks * kRecord;
        if constexpr (kLayout.factors == 0) {
            if constexpr (kLayout.d_bytes == 4)
                d = load_floats(record + row * 4);
            else
                d = load_halves(record + row * 2);
            if constexpr (kLayout.minima) m = load_halves(record + kMin + row * 2);
            return;
        }
        const uint8_t* factors = record + kFactors + b % kBlocks * kFactorBytes;
        if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) {
            d = mul(load_halves(record + row * 2), to_float(load_unsigned(factors + row)));
            m = mul(load_halves(record + kMin + row * 2), to_float(load_unsigned(factors + kGroup + row)));
        } else if constexpr (K == Kind::Q2_K) {
            d = load_halves(record + row * 2);
            m = load_halves(record + kMin + row * 2);
            const Ints first = load_unsigned(factors + row), second = load_unsigned(factors + kGroup + row);
            sc = low_nibble(first), sc2 = low_nibble(second);
            mn = high_nibble(first), mn2 = high_nibble(second);
        } else if constexpr (K == Kind::Table32) {
            d = mul(load_floats(record + row * 4), to_float(load_signed(factors + row)));
        } else {  // Q3_K, Q6_K, Table16
            if constexpr (kLayout.d_bytes == 4)
                d = load_floats(record + row * 4);
            else
                d = load_halves(record + row * 2);
            sc = load_signed(factors + row);
            sc2 = load_signed(factors + kGroup + row);
        }
    }
};

// The integer sum over half a block's columns. Two short chains are faster than one long chain, in
// which each product waits for the one before.
template <Kind K>
inline Ints half_sum(const Bytes* w, const int8_t* x, const BlockMeta& meta, int half) {
    constexpr int kOffset = offset_of(K);
    Ints sum = set1_int(0);
    KVARN_UNROLL(4)
    for (int g = 4 * half; g < 4 * half + 4; ++g) {
        if constexpr (centred(K))
            sum = dot8(sum, w[g], x + 4 * g);
        else
            sum = dot(sum, w[g], x + 4 * g);
    }
    if constexpr (kOffset != 0) sum = sub(sum, shift_left<__builtin_ctz(kOffset)>(set1_int(meta.sum[half])));
    return sum;
}

constexpr bool two_sums(Kind k) { return k == Kind::Q2_K || k == Kind::Q3_K || k == Kind::Q6_K || k == Kind::Table16; }

// Adds one block to acc. `a` and `b` are the integer sums of its halves if two_sums, else both are
// the sum of the block.
template <Kind K>
inline Floats scaled(Floats acc, const Scales<K>& s, const BlockMeta& meta, Ints a, Ints b) {
    const Floats dx = set1_float(meta.d);
    if constexpr (two_sums(K)) {  // the two halves become one integer below 2^24, exact in f32
        acc = fma(mul(s.d, dx), to_float(add(mul(s.sc, a), mul(s.sc2, b))), acc);
        if constexpr (K == Kind::Q2_K) {
            const Ints sums = add(mul(s.mn, set1_int(meta.sum[0])), mul(s.mn2, set1_int(meta.sum[1])));
            acc = fnma(mul(s.m, dx), to_float(sums), acc);
        }
        return acc;
    } else {
        acc = fma(mul(s.d, dx), to_float(a), acc);
        if constexpr (K == Kind::Q4_1 || K == Kind::Q5_1) acc = fma(s.m, set1_float(meta.s), acc);
        if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) acc = fnma(s.m, set1_float(meta.s), acc);
        return acc;
    }
}

template <Kind K>
inline Floats accumulate(Floats acc, const Bytes* w, const Scales<K>& s, const int8_t* x, const BlockMeta& meta) {
    const Ints a = half_sum<K>(w, x, meta, 0), b = half_sum<K>(w, x, meta, 1);
    if constexpr (two_sums(K)) return scaled<K>(acc, s, meta, a, b);
    const Ints sum = add(a, b);
    return scaled<K>(acc, s, meta, sum, sum);
}

constexpr int64_t kPrefetchDistance = 8192;  // bytes between the weights that are read and those that are prefetched

// Prefetches some cache lines of the queue. Called once per block of a product: this many lines
// keep memory busy and hardly slow the product down.
inline void prefetch_next(PrefetchQueue& queue) {
    if (queue.next == queue.n_spans) return;
    const uint8_t* p = queue.spans[queue.next] + queue.done;
    constexpr int kLines = 8;
    for (int line = 0; line < kLines; ++line) prefetch_l2(p + line * 64);
    if ((queue.done += kLines * 64) >= queue.span_bytes) queue.done = 0, ++queue.next;
}

inline void write_row(const Output& y, int64_t row, int64_t column, Floats acc) {
    float* p = y.data + row * y.stride + column;
    if (y.bias) acc = add(acc, load_floats(reinterpret_cast<const uint8_t*>(y.bias + column)));
    if (y.add) acc = add(acc, load_floats(reinterpret_cast<const uint8_t*>(p)));
    store(p, acc);
}

inline void write_lanes(const Output& y, int64_t row, int64_t column, F acc) {
    float* p = y.data + row * y.stride + column;
    if (y.bias) acc = add(acc, load(y.bias + column));
    if (y.add) acc = add(acc, load(p));
    store(p, acc);
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
