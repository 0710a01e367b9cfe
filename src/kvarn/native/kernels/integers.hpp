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
//           products with signed bytes fit 16 bits. Where one weight outweighs the others, m is nearly that weight.
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
constexpr int kPairOfCodes = 256;  // 255 before rounding, which adds at most 1/2 to each

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

// How many steps fit a run: a power of two. A step adds two products, which are at most `two` together.
constexpr int run_length(int two) { return 8 * two <= kRunLimit ? 8 : 4 * two <= kRunLimit ? 4 : 2; }

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
    alignas(32) float inverse[kChunk / kSlots];
    Eight top[kChunk / kSlots];

    KVARN_INLINE void add(int64_t tile, uint32_t seen, F a, F b, const float* factors) {
        const int64_t at = tile * kSlots;
        a = seen_only(seen, 0, mul(a, load(factors + at)));
        b = seen_only(seen, 1, mul(b, load(factors + at + kLanes)));
        store(w + at, a), store(w + at + kLanes, b);
        top[tile] = largest_pairs(a, b);
    }

    KVARN_INLINE void find_steps(int64_t n, uint8_t* out) {
        for (int64_t t = n; t < kChunk / kSlots; ++t) top[t] = no_lanes();
        weight_steps(top, reinterpret_cast<float*>(out + kStepsAt), inverse);
    }

    template <typename A>
    KVARN_INLINE void round(int64_t n, uint8_t* out) const {  // to codes and their sums
        CodeSums sums[kChunk / kSlots];
        for (int64_t t = n; t < kChunk / kSlots; ++t) sums[t] = no_sums();
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

// Softmax of R rows; factors [span][kChunk]. Writes rows of p. Each stage is done for all rows before the next one,
// whose operations on a row wait for each other.
template <typename A, int R>
inline void integer_softmax(float* s, const uint32_t* seen, int64_t n, const float* factors, int64_t spans, uint8_t* p,
                            int64_t row, MaxSum* out) {
    Weights weights[R][kMaxHeadDim / kRotated];
    F base[R], sum[R];
    for (int r = 0; r < R; ++r) {
        out[r].m = largest_score(s + r * kChunk, seen, n);
        base[r] = set1(out[r].m == kMinusInfinity ? 0.0f : out[r].m), sum[r] = zero();
    }
    for (int64_t t = 0; t < n; ++t) {
        for (int r = 0; r < R; ++r) {
            const float* x = s + r * kChunk + t * kSlots;
            const F a = exp2<true>(sub(load(x), base[r])), b = exp2<true>(sub(load(x + kLanes), base[r]));
            sum[r] = add(add(sum[r], a), b);
            for (int64_t g = 0; g < spans; ++g) weights[r][g].add(t, seen[t], a, b, factors + g * kChunk);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int64_t g = 0; g < spans; ++g) weights[r][g].find_steps(n, p + r * row + g * kSpanBytes);
    for (int r = 0; r < R; ++r) {
        for (int64_t g = 0; g < spans; ++g) weights[r][g].template round<A>(n, p + r * row + g * kSpanBytes);
        out[r].l = reduce_add(sum[r]);
    }
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
