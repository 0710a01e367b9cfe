// Attention over cells of integers: weights times values, and the end of a row (integers.hpp). In the instruction set's
// namespace.
#pragma once

#include <utility>

#include "integers.hpp"

namespace kvarn::KVARN_ISA {
namespace {

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
    static_assert(A::blocks || !Values::offset, "only blocks have the sums of their codes");
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

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same for int4, two blocks at a time. Registers suffice for eight bytes of each: kUpper says which.
template <int R, bool kUpper>
inline void add_eights(const uint8_t* p, int64_t row, int64_t tile, const TwoNibbles& values, int64_t d,
                       const F (&twice)[R], const F (&less)[R], float* sums, int64_t width) {
    static_assert(kSlots / 2 * kPairOfCodes * 15 < 1 << 16, "sums of a tile fit 16 bits");
    BlockSums sum[R][2];
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = {};
    for (int h = 0; h < 2; ++h) {
        BlockCodes codes[R];
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r) {
            const uint8_t* at = p + r * row + tile * kSlots + 16 * h;
            codes[r] = load_block_codes(at, at + kSpanBytes);
        }
        const uint8_t* from = values.v.half[h] + d / 2;
        const auto step = [&]<int kStep>() {
            const BlockBytes both = load_blocks<kUpper>(from, values.v.stride);
            from += kStepSlots * values.v.stride;
            KVARN_UNROLL(2)
            for (int n = 0; n < 2; ++n) {
                const BlockBytes v = n == 0 ? low_nibbles(both) : high_nibbles(both);
                KVARN_UNROLL(16)
                for (int r = 0; r < R; ++r) sum[r][n] = add_blocks(sum[r][n], codes_of_step<kStep>(codes[r]), v);
            }
        };
        [&]<size_t... kSteps>(std::index_sequence<kSteps...>) {
            (step.template operator()<int(kSteps)>(), ...);
        }(std::make_index_sequence<16 / kStepSlots>());
    }
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) {
        KVARN_UNROLL(2)
        for (int n = 0; n < 2; ++n) {
            float* out = sums + r * width + d + 16 * n + 8 * kUpper;
            const F half = sub(to_float(words_of(sum[r][n])), less[r]);
            store_halves(out, out + kRotated, fma(half, twice[r], load_halves(out, out + kRotated)));
        }
    }
}

// A sum of codes times 2u - 15 is twice that of codes times u, less 15 times the sum of codes. Here it is half of that,
// and the step twice as large, which gives the same product.
template <int R>
inline void add_two_blocks(const uint8_t* p, int64_t row, int64_t tile, const TwoNibbles& values, int64_t d,
                           float* sums, int64_t width) {
    F twice[R], less[R];
    for (int r = 0; r < R; ++r) {
        float step[2];
        int32_t codes[2];
        for (int block = 0; block < 2; ++block) {
            const uint8_t* span = p + r * row + block * kSpanBytes;
            memcpy(step + block, span + kStepsAt + tile * 4, 4), memcpy(codes + block, span + kSumsAt + tile * 4, 4);
        }
        twice[r] = set_halves(2.0f * step[0], 2.0f * step[1]);
        less[r] = set_halves(7.5f * float(codes[0]), 7.5f * float(codes[1]));
    }
    add_eights<R, false>(p, row, tile, values, d, twice, less, sums, width);
    add_eights<R, true>(p, row, tile, values, d, twice, less, sums, width);
}

template <typename A>
inline void integer_add_rows(const uint8_t* p, int64_t rows, int64_t tile, const TwoNibbles& values, float* sums,
                             int64_t width) {
    const int64_t row = A::weight_bytes(width);
    for (int64_t d = 0; d < width; d += 2 * kRotated) {
        const uint8_t* codes = p + d / kRotated * kSpanBytes;
        int64_t r = 0;
        const auto with = [&]<int R>() {
            for (; r + R <= rows; r += R)
                add_two_blocks<R>(codes + r * row, row, tile, values, d, sums + r * width, width);
        };
        with.template operator()<4>(), with.template operator()<3>();
        with.template operator()<2>(), with.template operator()<1>();
    }
}
#endif

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
template <typename A, bool wide, typename Fn>
inline void with_values_of(const TileCells& t, int64_t dim, int64_t width, uint8_t* room, Fn&& fn) {
    if constexpr (A::blocks) {
        with_values<wide>(t, dim, room, fn);
    } else {
        const ValueRows v = value_rows_of(t, cells_of(t.view->codec, dim), room);
        in_wide_order<A>(width) ? fn(ValueBytes{v}) : fn(PlainBytes{v});
    }
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
