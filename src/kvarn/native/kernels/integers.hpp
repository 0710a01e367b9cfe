// Attention over cells of integers. Sums of integer products are exact, so no order of sums matters and
// every instruction set gives the same bits. In the instruction set's namespace.
//
// A span is what shares one factor: the whole row for int8, a block of 32 numbers for codecs with a
// tail. There the tiles of cells and those of int8 rows are multiplied alike, by blocks.
//
//   byte, factor   of a cell: its value is byte * factor (packed.hpp)
//   query   t = R(q) * (scale * log2(e) / 32); one step d = amax / 127 per head; codes = rint(t / d)
//   score   over spans ascending: s = fma(float(sum of codes * bytes), factor * d, s), from 0
//   p       exp2(score - m), as for other cells; l sums p itself. Per row, tile of 32 slots and span:
//           w = p * factor, m = the largest sum of two neighbours of w (slots 2i and 2i + 1), step d = m / 255 (0 if
//           m < 2^-118), codes = rint(w * (255 / m)). So two neighbours have at most kPairOfCodes together, and their
//           products with signed bytes fit 16 bits. Where one weight outweighs the others, m is that weight.
//   output  per tile and span: o = fma(float(sum of codes * bytes), d, o), tiles ascending; at the end
//           R(o / l) / 32
//
// A row of q is codes [depth], then QueryTail. A row of p has for each span codes [kChunk], a step per tile and the
// sum of the codes of each tile. A step that is 0 or NaN decides alone, whatever the codes: NaN reaches the result
// through it.
//
//   staged K   signed bytes, [depth / 4 words][32 slots], a word is 4 consecutive dims
//   staged V   signed bytes, [8 quads of slots][depth words], a word is one dim of 4 consecutive slots
#pragma once

#include <cstddef>

#include "packed.hpp"
#include "softmax.hpp"

namespace kvarn::KVARN_ISA {
namespace {

struct QueryTail {
    float step;
    int32_t sums[kMaxHeadDim / kRotated];  // of the codes of each span
};

template <bool kBlocks>  // spans are blocks of 32 numbers
struct Integers {
    static constexpr bool blocks = kBlocks;
    static constexpr bool amx = false;
    static constexpr int64_t rows_at_once = 30;
    static constexpr int64_t depth(int64_t dim) { return up(dim, kRotated); }
    static constexpr int64_t spans(int64_t depth) { return kBlocks ? depth / kRotated : 1; }
    static constexpr int64_t query_bytes(int64_t dim) { return up(depth(dim) + int64_t(sizeof(QueryTail)), 16); }
    static constexpr int64_t weight_bytes(int64_t depth) { return spans(depth) * kSpanBytes; }
};

constexpr int64_t kStepsAt = kChunk, kSumsAt = kStepsAt + kChunk / kSlots * 4;  // in a span of a row of p
static_assert(kSumsAt + kChunk / kSlots * 4 == kSpanBytes);
constexpr int kPairOfCodes = 256;  // 255, rounded up twice

inline int32_t sum_of_codes(const uint8_t* q, int64_t depth, int64_t span) {
    int32_t sum;
    memcpy(&sum, q + depth + offsetof(QueryTail, sums) + span * 4, 4);
    return sum;
}

template <typename A>
void stage_integer_query(const float* q, int64_t dim, float scale, uint8_t* out) {
    const int64_t depth = A::depth(dim);
    alignas(64) float t[kMaxHeadDim];
    memcpy(t, q, size_t(dim) * 4);
    memset(t + dim, 0, size_t(depth - dim) * 4);
    rotate_blocks(t, depth);
    const F factor = set1(scale * kUnrotate);
    uint32_t top = 0;
    for (int64_t i = 0; i < depth; i += 2 * kLanes) {
        const F a = mul(load(t + i), factor), b = mul(load(t + i + kLanes), factor);
        store(t + i, a), store(t + i + kLanes, b);
        top = larger(top, largest_bits(a, b));
    }
    QueryTail tail{top < 0x7f800000u ? bits_of<float>(top) / 127.0f : __builtin_nanf(""), {}};
    const F step = set1(tail.step);
    if (tail.step > 0.0f)
        for (int64_t i = 0; i < depth; i += kLanes)
            tail.sums[A::blocks ? i / kRotated : 0] +=
                store_i8(reinterpret_cast<int8_t*>(out) + i, to_int(div(load(t + i), step)));
    else
        memset(out, 0, size_t(depth));
    memcpy(out + depth, &tail, sizeof tail);
}

// -- scores

template <int W = 0, typename Fn>
KVARN_INLINE void each_word(Fn&& fn) {
    if constexpr (W < 4) {
        fn.template operator()<W>();
        each_word<W + 1>(fn);
    }
}

// How many steps fit a run. A step adds two products, which are at most `two` together.
constexpr int run_length(int two) { return smaller(8, kRunLimit / two); }

// s[r][32]: scores of R query rows with one tile; factors [span][32].
template <typename A, int R, typename Keys>
inline void integer_scores(const uint8_t* q, int64_t dim, const Keys& keys, const float* factors, float* s) {
    constexpr int kAtOnce = kIntHalves;
    const int64_t depth = A::depth(dim), row = A::query_bytes(dim);
    for (int h = 0; h < 2; h += kAtOnce) {
        I acc[R][kAtOnce], run[R][kAtOnce];
        F sum[R][kAtOnce];
        const auto begin = [&](int64_t span) {
            KVARN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                for (int i = 0; i < kAtOnce; ++i)
                    if constexpr (!Keys::offset) acc[r][i] = first_key_sum(sum_of_codes(q + r * row, depth, span));
            }
        };
        const auto end = [&](int64_t span) {
            KVARN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                float step;
                memcpy(&step, q + r * row + depth, 4);
                for (int i = 0; i < kAtOnce; ++i) {
                    const F factor = mul(load(factors + span * kSlots + 16 * (h + i)), set1(step));
                    I whole = acc[r][i];
                    if constexpr (Keys::offset != 0)
                        whole = add_words(whole, all_words(-Keys::offset * sum_of_codes(q + r * row, depth, span)));
                    const F x = to_float(whole);
                    sum[r][i] = span ? fma(x, factor, sum[r][i]) : mul(x, factor);
                }
            }
        };
        for (int64_t g = 0; g < depth / kRotated; ++g) {
            if (A::blocks || g == 0) begin(g);
            each_word([&]<int W>() {
                I low[kAtOnce], high[kAtOnce];
                for (int i = 0; i < kAtOnce; ++i) keys.template read<W>(g, h + i, low[i], high[i]);
                KVARN_UNROLL(16)
                for (int r = 0; r < R; ++r) {
                    const uint8_t* codes = q + r * row + g * kRotated + Keys::first * W;
                    const I x = set_word(codes), y = set_word(codes + Keys::second);
                    for (int i = 0; i < kAtOnce; ++i) {
                        if constexpr (Keys::offset) {
                            constexpr int kRun = run_length(2 * 127 * Keys::most), kAt = 2 * W % kRun;
                            run[r][i] = add_run(kAt ? add_run(run[r][i], low[i], x) : first_run(low[i], x), high[i], y);
                            if constexpr (kAt + 2 == kRun)
                                acc[r][i] =
                                    W < kRun / 2 ? twice_run(run[r][i]) : add_words(acc[r][i], twice_run(run[r][i]));
                        } else {
                            acc[r][i] = add_keys(add_keys(acc[r][i], low[i], x), high[i], y);
                        }
                    }
                }
            });
            if (A::blocks) end(g);
        }
        if (!A::blocks) end(0);
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < kAtOnce; ++i) store(s + r * kChunk + 16 * (h + i), sum[r][i]);
    }
}

// s[row][32]: scores of some rows with one tile.
template <typename A, int kMost, typename Keys>
inline void integer_score_rows(const uint8_t* q, int64_t rows, int64_t dim, const Keys& keys, const float* factors,
                               float* s) {
    int64_t r = 0;
    const auto with = [&]<int R>() {
        for (; r + R <= rows; r += R)
            integer_scores<A, R>(q + r * A::query_bytes(dim), dim, keys, factors, s + r * kChunk);
    };
    with.template operator()<kMost>();
    if constexpr (kMost > 3) with.template operator()<3>();
    if constexpr (kMost > 2) with.template operator()<2>();
    if constexpr (kMost > 1) with.template operator()<1>();
}

// -- softmax

// The weights of one row in n tiles, for one span, and their maxima.
struct Weights {
    alignas(64) float w[kChunk];
    Eight top[kChunk / kSlots];

    KVARN_INLINE void add(int64_t tile, uint32_t seen, F a, F b, const float* factors) {
        const int64_t at = tile * kSlots;
        a = seen_only(seen, 0, mul(a, load(factors + at)));
        b = seen_only(seen, 1, mul(b, load(factors + at + kLanes)));
        store(w + at, a), store(w + at + kLanes, b);
        top[tile] = largest_pairs(a, b);
    }

    template <typename A>
    void round(int64_t n, uint8_t* out) {  // to codes, steps and sums
        alignas(32) float inverse[kChunk / kSlots];
        CodeSums sums[kChunk / kSlots];
        for (int64_t t = n; t < kChunk / kSlots; ++t) top[t] = no_lanes(), sums[t] = no_sums();
        weight_steps(top, reinterpret_cast<float*>(out + kStepsAt), inverse);
        for (int64_t t = 0; t < n; ++t) {
            const int64_t at = t * kSlots;
            const F r = set1(inverse[t]);
            const Codes codes = to_codes(to_int(mul(load(w + at), r)), to_int(mul(load(w + at + kLanes), r)));
            sums[t] = sums_of(codes);
            store_codes(out + at, codes);
        }
        if constexpr (A::blocks) store_sums(reinterpret_cast<int32_t*>(out + kSumsAt), sums);
    }
};

// The maximum of one row: s has n tiles of 32 scores, in base 2. Those that are not seen become -inf.
inline float largest_score(float* s, const uint32_t* seen, int64_t n) {
    F top = set1(kMinusInfinity);
    for (int64_t i = 0; i < 2 * n; ++i) {
        F x = load(s + i * kLanes);
        if (seen[i / 2] != ~0u) {
            x = keep(seen[i / 2] >> (i % 2 * 16) & 0xffffu, x, set1(kMinusInfinity));
            store(s + i * kLanes, x);
        }
        top = max(top, x);
    }
    return reduce_max(top);
}

// Softmax of this row; factors [span][kChunk]. Writes a row of p and returns the sum.
template <typename A>
inline float integer_softmax(const float* s, float m, const uint32_t* seen, int64_t n, const float* factors,
                             int64_t spans, uint8_t* p) {
    const F base = set1(m == kMinusInfinity ? 0.0f : m);
    Weights weights[kMaxHeadDim / kRotated];
    F sum = zero();
    for (int64_t t = 0; t < n; ++t) {
        const F a = exp2<true>(sub(load(s + t * kSlots), base));
        const F b = exp2<true>(sub(load(s + t * kSlots + kLanes), base));
        sum = add(add(sum, a), b);
        for (int64_t g = 0; g < spans; ++g) weights[g].add(t, seen[t], a, b, factors + g * kChunk);
    }
    for (int64_t g = 0; g < spans; ++g) weights[g].template round<A>(n, p + g * kSpanBytes);
    return reduce_add(sum);
}

// -- outputs

// The sums of one tile: of codes of p from `p` on, in rows that are `row` bytes apart, and kN registers of values from
// kFrom on. Two functions: unsigned values are added in runs, signed ones in words.

template <int R, int kN, typename Values>
inline void sum_runs(const uint8_t* p, int64_t row, const Values& values, int64_t d, I (&sums)[R][kN]) {
    static_assert(Values::N == kN && kN == 2, "one span");
    constexpr int kRun = run_length(kPairOfCodes * Values::most);
    for (int64_t first = 0; first < kSlots / 4; first += kRun) {
        I run[R][kN];
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < kN; ++i) run[r][i] = zero_words();
        for (int64_t quad = first; quad < first + kRun; ++quad) {
            I v[kN];
            values.read(d, quad, v);
            KVARN_UNROLL(16)
            for (int i = 0; i < kN; ++i) {
                KVARN_UNROLL(16)
                for (int r = 0; r < R; ++r) run[r][i] = add_run(run[r][i], set_word(p + r * row + 4 * quad), v[i]);
            }
        }
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < kN; ++i)
                sums[r][i] = first ? add_words(sums[r][i], twice_run(run[r][i])) : twice_run(run[r][i]);
    }
}

template <typename A, int R, int kFrom, int kN, typename Values>
inline void sum_values(const uint8_t* p, int64_t row, const Values& values, int64_t d, I (&sums)[R][kN]) {
    constexpr int kEach = A::blocks ? 2 : Values::N;  // registers of a span
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < kN; ++i) sums[r][i] = zero_words();
    for (int64_t quad = 0; quad < kSlots / 4; ++quad) {
        I v[Values::N];
        values.read(d, quad, v);
        KVARN_UNROLL(16)
        for (int i = 0; i < kN; ++i) {
            KVARN_UNROLL(16)
            for (int r = 0; r < R; ++r)
                sums[r][i] = add_values(sums[r][i], set_word(p + r * row + (kFrom + i) / kEach * kSpanBytes + 4 * quad),
                                        v[kFrom + i]);
        }
    }
}

// Adds one tile to the sums of R rows, for kN of the Values::N * 16 dims from d on. p: the codes of the first span.
template <typename A, int R, int kFrom, int kN, typename Values>
inline void integer_add_tile(const uint8_t* p, int64_t row, int64_t tile, const Values& values, int64_t d, float* sums,
                             int64_t width) {
    constexpr int kEach = A::blocks ? 2 : Values::N;  // registers of a span
    I whole[R][kN];
    if constexpr (Values::offset)
        sum_runs<R, kN>(p + tile * kSlots, row, values, d, whole);
    else
        sum_values<A, R, kFrom, kN>(p + tile * kSlots, row, values, d, whole);
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) {
        for (int i = kFrom; i < kFrom + kN; ++i) {
            const uint8_t* span = p + r * row + i / kEach * kSpanBytes;
            float step;
            memcpy(&step, span + kStepsAt + tile * 4, 4);
            if constexpr (Values::offset) {
                int32_t codes;
                memcpy(&codes, span + kSumsAt + tile * 4, 4);
                whole[r][i - kFrom] = add_words(whole[r][i - kFrom], all_words(-Values::offset * codes));
            }
            float* sum = sums + r * width + d + i * kLanes;
            const F x = to_float(whole[r][i - kFrom]);
            store(sum, fma(Values::eightfold ? mul(x, set1(0.125f)) : x, set1(step), load(sum)));
        }
    }
}

// Adds one tile to the outputs of some rows.
template <typename A, typename Values>
inline void integer_add_rows(const uint8_t* p, int64_t rows, int64_t tile, const Values& values, float* sums,
                             int64_t width) {
    constexpr bool kHalves = kIntValueRows == 3 && Values::N == 2 && !Values::offset;  // then registers suffice
    constexpr int kMost = Values::eightfold ? 4 : Values::N > 2 ? kIntValueRows * 2 / Values::N : kIntValueRows;
    const int64_t row = A::weight_bytes(width);
    for (int64_t d = 0; d < width; d += Values::N * kLanes) {
        const uint8_t* codes = p + (A::blocks ? d / kRotated * kSpanBytes : 0);
        const auto some = [&]<int kFrom, int kN>() {
            int64_t r = 0;
            const auto with = [&]<int R>() {
                for (; r + R <= rows; r += R)
                    integer_add_tile<A, R, kFrom, kN>(codes + r * row, row, tile, values, d, sums + r * width, width);
            };
            with.template operator()<kMost>();
            if constexpr (kMost > 3) with.template operator()<3>();
            if constexpr (kMost > 2) with.template operator()<2>();
            if constexpr (kMost > 1) with.template operator()<1>();
        };
        if constexpr (kHalves)
            some.template operator()<0, 1>(), some.template operator()<1, 1>();
        else
            some.template operator()<0, Values::N>();
    }
}

// Whether outputs are summed in the order of wide_quads: rows of one span whose depth allows it.
template <typename A>
bool in_wide_order(int64_t width) {
    return !A::blocks && width % (kWide * kLanes) == 0;
}

template <typename A>
void integer_in_order(const float* sums, int64_t width, float* out) {
    if (!in_wide_order<A>(width)) {
        if (out != sums) memcpy(out, sums, size_t(width) * 4);
        return;
    }
    for (int64_t d = 0; d < width; d += kWide * kLanes) {
        F x[kWide];
        for (int i = 0; i < kWide; ++i) x[i] = load(sums + d + i * kLanes);
        in_dim_order(x);
        for (int i = 0; i < kWide; ++i) store(out + d + i * kLanes, x[i]);
    }
}

// Calls fn with a reader of the tile's values, in the order that outputs of A are summed in.
template <typename A, bool eightfold, typename Fn>
inline void with_values_of(const TileCells& t, int64_t dim, int64_t width, uint8_t* room, Fn&& fn) {
    if constexpr (A::blocks)
        return with_values<eightfold>(t, dim, room, fn);
    else if (in_wide_order<A>(width))
        return fn(ValueBytes{value_rows_of(t, cells_of(t.view->codec, dim), room)});
    with_values<eightfold>(t, dim, room, fn);
}

// The output of a row: o / l, rotated back.
inline void finish_rotated(float total, const float* o, int64_t dim, float* out) {
    const int64_t depth = up(dim, kRotated);
    alignas(64) float x[kMaxHeadDim];
    const F l = set1(total == 0.0f ? 1.0f : total), back = set1(kUnrotate);
    for (int64_t d = 0; d < depth; d += kRotated) {
        F a = div(load(o + d), l), b = div(load(o + d + kLanes), l);
        rotate_block(a, b);
        store(x + d, mul(a, back)), store(x + d + kLanes, mul(b, back));
    }
    memcpy(out, x, size_t(dim) * 4);
}

inline void finish_row(const StoreView& s, float total, const float* o, float* out) {
    if (rotated(s.v.codec))
        finish_rotated(total, o, s.dim, out);
    else
        finish(total, o, s.dim, out);
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
