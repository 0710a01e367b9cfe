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

constexpr bool two_sums(Kind k) { return k == Kind::Q2_K || k == Kind::Q3_K || k == Kind::Q6_K || k == Kind::Table16; }

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

// How products read the codes of a block. Signed numbers need more than their bytes where sums go through 16 bits.
enum class Form {
    Codes,
    Magnitudes,  // the numbers, then |numbers|
    Words,       // numbers of 16 bits: of each vector of bytes the even columns, then the odd ones
};
#if defined(KVARN_PAIRS)
constexpr Form few_rows(Kind k) { return centred(k) ? Form::Magnitudes : Form::Codes; }
constexpr Form many_rows(Kind k) { return centred(k) ? Form::Words : Form::Codes; }
#else
constexpr Form few_rows(Kind) { return Form::Codes; }
constexpr Form many_rows(Kind) { return Form::Codes; }
#endif
constexpr int vectors(Form f) { return f == Form::Codes ? 8 : 16; }

template <Kind K, Form kForm = Form::Codes>
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
#if defined(KVARN_PAIRS)
    if constexpr (kForm == Form::Magnitudes)
        for (int g = 0; g < 8; ++g) w[g] = centre(w[g]), w[g + 8] = magnitude(w[g]);
    if constexpr (kForm == Form::Words)
        for (int g = 7; g >= 0; --g) {
            const Bytes numbers = centre(w[g]);
            w[2 * g] = even_words(numbers), w[2 * g + 1] = odd_words(numbers);
        }
#endif
}

template <bool kHas>
struct Minima {
    Floats m;  // times dx * sumx is added (Q4_1, Q5_1) or subtracted (K types)
};
template <>
struct Minima<false> {};
template <bool kHas>
struct Factors {
    Ints sc, sc2;  // of d, for the two halves of the block
};
template <>
struct Factors<false> {};
template <bool kHas>
struct MinimaFactors {
    Ints mn, mn2;  // of m, likewise
};
template <>
struct MinimaFactors<false> {};

// Scales of block b for kFloatLanes rows from `row` on.
template <Kind K>
struct Scales : Minima<scale_layout(K).minima>, Factors<two_sums(K)>, MinimaFactors<K == Kind::Q2_K> {
    Floats d;

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
            if constexpr (kLayout.minima) this->m = load_halves(record + kMin + row * 2);
            return;
        }
        const uint8_t* factors = record + kFactors + b % kBlocks * kFactorBytes;
        if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) {
            d = mul(load_halves(record + row * 2), to_float(load_unsigned(factors + row)));
            this->m = mul(load_halves(record + kMin + row * 2), to_float(load_unsigned(factors + kGroup + row)));
        } else if constexpr (K == Kind::Q2_K) {
            d = load_halves(record + row * 2);
            this->m = load_halves(record + kMin + row * 2);
            const Ints first = load_unsigned(factors + row), second = load_unsigned(factors + kGroup + row);
            this->sc = low_nibble(first), this->sc2 = low_nibble(second);
            this->mn = high_nibble(first), this->mn2 = high_nibble(second);
        } else if constexpr (K == Kind::Table32) {
            d = mul(load_floats(record + row * 4), to_float(load_signed(factors + row)));
        } else if constexpr (two_sums(K)) {  // Q3_K, Q6_K, Table16
            if constexpr (kLayout.d_bytes == 4)
                d = load_floats(record + row * 4);
            else
                d = load_halves(record + row * 2);
            this->sc = load_signed(factors + row);
            this->sc2 = load_signed(factors + kGroup + row);
        }
    }
};

// sums[r][i]: products of kN vectors of w[i] with R rows of x, from vector kFrom on, without offsets.
// Sums of integers are exact in any order.
template <Kind K, int kFrom, int kN, int R, int S>
inline void dots(const Bytes* const (&w)[S], const int8_t* x, Ints (&sums)[R][S]) {
#if defined(KVARN_PAIRS)  // as many pairs of products are added in 16 bits as fit there
    constexpr int kMost = centred(K) ? 128 : (1 << code_bits(K)) - 1, kFit = 32767 / (2 * 127 * kMost);
    constexpr int kRun = kFit >= 8 && kN == 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
    Pairs run[R][S];
#endif
    KVARN_UNROLL(8)
    for (int g = kFrom; g < kFrom + kN; ++g) {
        KVARN_UNROLL(4)
        for (int r = 0; r < R; ++r) {
            const auto four = broadcast_4(x + r * kBlock + 4 * g);
            KVARN_UNROLL(2)
            for (int i = 0; i < S; ++i) {
#if defined(KVARN_PAIRS)
                const Pairs next = centred(K) ? signed_pairs(w[i][g], w[i][g + 8], four) : pairs(w[i][g], four);
                run[r][i] = (g - kFrom) % kRun ? add_pairs(run[r][i], next) : next;
                in_order(run[r][i]);
                if ((g - kFrom) % kRun < kRun - 1) continue;
                sums[r][i] = g - kFrom < kRun ? widen(run[r][i]) : add(sums[r][i], widen(run[r][i]));
                in_order(sums[r][i]);
#else
                sums[r][i] = dot(g == kFrom ? set1_int(0) : sums[r][i], w[i][g], four);
#endif
            }
        }
    }
}

#if defined(KVARN_PAIRS)
// Activations of one row and block in words, as Form::Words has the weights: of four columns 0 and 2, and 1 and 3.
struct Words {
    alignas(32) int16_t even[kBlock / 2], odd[kBlock / 2];

    void read(const int8_t* codes) {
        const Bytes row = load_bytes(reinterpret_cast<const uint8_t*>(codes));
        store_bytes(even, even_words(row)), store_bytes(odd, odd_words(row));
    }
};

// `dots` of words: two multiplications for four columns, where pairs of bytes need three.
template <int kFrom, int kN, int R, int S>
inline void word_dots(const Bytes* const (&w)[S], const Words* x, Ints (&sums)[R][S]) {
    KVARN_UNROLL(16)
    for (int g = 2 * kFrom; g < 2 * (kFrom + kN); ++g) {
        Bytes numbers[S];  // in registers: GCC would read them again for each row
        KVARN_UNROLL(2)
        for (int i = 0; i < S; ++i) numbers[i] = w[i][g], in_order(numbers[i]);
        KVARN_UNROLL(4)
        for (int r = 0; r < R; ++r) {
            const int16_t* row = g % 2 ? x[r].odd : x[r].even;
            const Bytes two = broadcast_4(reinterpret_cast<const int8_t*>(row + g / 2 * 2));
            KVARN_UNROLL(2)
            for (int i = 0; i < S; ++i) {
                const Ints next = word_pairs(numbers[i], two);
                sums[r][i] = g == 2 * kFrom ? next : add(sums[r][i], next);
                in_order(sums[r][i]);
            }
        }
    }
}
#endif

template <Kind K>
inline Ints without_offset(Ints sum, int32_t codes) {  // codes: the sum of the activation codes
    constexpr int kOffset = offset_of(K);
    if constexpr (kOffset != 0) sum = sub(sum, shift_left<__builtin_ctz(kOffset)>(set1_int(codes)));
    return sum;
}

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

// The integer sums of one block: of its halves if two_sums, else only a.
template <Kind K, int R, int S>
struct Sums {
    Ints a[R][S], b[R][S];

    inline void compute(const Bytes* const (&w)[S], const int8_t* x) {
        if constexpr (two_sums(K)) {
            dots<K, 0, 4>(w, x, a);
            dots<K, 4, 4>(w, x, b);
        } else if constexpr (R * S == 1) {  // two short chains: in a long one, each product waits for the one before
            dots<K, 0, 4>(w, x, a);
            dots<K, 4, 4>(w, x, b);
            a[0][0] = add(a[0][0], b[0][0]);
        } else {
            dots<K, 0, 8>(w, x, a);
        }
    }

#if defined(KVARN_PAIRS)
    inline void compute(const Bytes* const (&w)[S], const Words* x) {
        word_dots<0, two_sums(K) ? 4 : 8>(w, x, a);
        if constexpr (two_sums(K)) word_dots<4, 4>(w, x, b);
    }
#endif

    // Adds the block to acc[r][i].
    inline void apply(Floats (*acc)[S], const Scales<K>* const (&s)[S], const BlockMeta* meta) const {
        KVARN_UNROLL(4)
        for (int r = 0; r < R; ++r) {
            KVARN_UNROLL(2)
            for (int i = 0; i < S; ++i) {
                if constexpr (two_sums(K)) {
                    const Ints first = without_offset<K>(a[r][i], meta[r].sum[0]);
                    acc[r][i] = scaled<K>(acc[r][i], *s[i], meta[r], first, without_offset<K>(b[r][i], meta[r].sum[1]));
                } else {
                    const Ints sum = without_offset<K>(a[r][i], meta[r].sum[0] + meta[r].sum[1]);
                    acc[r][i] = scaled<K>(acc[r][i], *s[i], meta[r], sum, sum);
                }
            }
        }
    }
};

template <Kind K>
inline Floats accumulate(Floats acc, const Bytes* w, const Scales<K>& s, const int8_t* x, const BlockMeta& meta) {
    Floats one[1][1] = {{acc}};
    Sums<K, 1, 1> sums;
    sums.compute({w}, x);
    sums.apply(one, {&s}, &meta);
    return one[0][0];
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
