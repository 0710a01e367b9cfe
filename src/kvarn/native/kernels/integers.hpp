// Attention over int8 cells in integers. Sums of integer products are exact, so no order of sums
// matters and every instruction set gives the same bits. In the instruction set's namespace.
//
//   query   t = R(q) * (scale * log2(e) / 32); one step d = amax / 127 per head; codes = rint(t / d)
//   score   float(sum of codes * cells) * (K scale * d)
//   p       exp2(score - m), as for other cells; per row and tile of 32 slots: w = p * V scale, one
//           step d = max(w) / 255, codes = rint(w / d). l sums p itself.
//   output  per tile: o = fma(float(sum of codes * cells), d, o), tiles ascending; at the end
//           R(o / l) / 32
//
// A row of q is codes [depth], then QueryTail. A row of p is codes [kChunk], then a step per tile.
// A step that is 0 or NaN has codes 0: NaN then reaches the result through the step.
//
//   staged K   [depth / 4 words][32 slots], a word is 4 consecutive dims: the form of `columns`
//   staged V   [8 quads of slots][depth / 32][32 words], a word is one dim of 4 consecutive slots;
//              dims in the order of `quads` (simd.hpp)
#pragma once

#include "rotation.hpp"
#include "softmax.hpp"
#include "stage.hpp"

namespace kvarn::KVARN_ISA {
namespace {

struct Int8Arithmetic {
    static constexpr bool amx = false;
    static constexpr int64_t rows_at_once = 30;
    static constexpr int64_t depth(int64_t dim) { return up(dim, kRotated); }
    static constexpr int64_t query_bytes(int64_t dim) { return depth(dim) + 16; }
    static constexpr int64_t weight_bytes = kChunk + kChunk / kSlots * 4;
};

struct QueryTail {
    float step;
    int32_t sum;  // of the codes
};

inline QueryTail tail_of(const uint8_t* q, int64_t depth) {
    QueryTail t;
    memcpy(&t, q + depth, sizeof t);
    return t;
}

inline void stage_int8_query(const float* q, int64_t dim, float scale, uint8_t* out) {
    const int64_t depth = Int8Arithmetic::depth(dim);
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
    QueryTail tail{top < 0x7f800000u ? bits_of<float>(top) / 127.0f : __builtin_nanf(""), 0};
    const F step = set1(tail.step);
    if (tail.step > 0.0f)
        for (int64_t i = 0; i < depth; i += kLanes)
            tail.sum += store_i8(reinterpret_cast<int8_t*>(out) + i, to_int(div(load(t + i), step)));
    else
        memset(out, 0, size_t(depth));
    memcpy(out + depth, &tail, sizeof tail);
}

inline void stage_int8_keys(const CellsView& k, const TileCells& t, int64_t depth, uint8_t* out) {
    for (int h = 0; h < 2; ++h) {
        auto* to = reinterpret_cast<uint32_t*>(out) + 16 * h;
        const auto* from = reinterpret_cast<const uint32_t*>(t.half[h]);
        if (from && k.strides.slot != 1) {
            transpose(from, k.strides.slot, to, kSlots, 16, int(depth / 4));
            continue;
        }
        for (int64_t w = 0; w < depth / 4; ++w, to += kSlots) {
            if (from)
                memcpy(to, from + w * k.strides.dim, 64);
            else
                memset(to, 0, 64);
        }
    }
}

// The four slots from `s` on of one tile, 32 dims from word `word` on: a word per dim, in the order
// of `quads`.
inline void gather_quads(const CellsView& v, const uint32_t* slots, int64_t word, uint8_t* out) {
    for (int64_t g = 0; g < 8; ++g)
        for (int64_t slot = 0; slot < 4; ++slot) {
            const uint32_t four = slots[(word + g) * v.strides.dim + slot * v.strides.slot];
            for (int64_t d = 0; d < 4; ++d) out[quad_place(4 * g + d) * 4 + slot] = uint8_t(four >> (8 * d));
        }
}

inline void stage_int8_values(const CellsView& v, const TileCells& t, int64_t depth, uint8_t* out) {
    for (int64_t s = 0; s < kSlots; s += 4) {
        const auto* slots = reinterpret_cast<const uint32_t*>(t.half[s / 16]) + (s % 16) * v.strides.slot;
        for (int64_t d = 0; d < depth; d += kRotated, out += 4 * kRotated) {
            if (!t.half[s / 16]) {
                memset(out, 0, 4 * kRotated);
            } else if (v.strides.dim == 1) {
                I a, b;
                quads(reinterpret_cast<const uint8_t*>(slots) + d, v.strides.slot * 4, a, b);
                store_words(out, a), store_words(out + 64, b);
            } else {
                gather_quads(v, slots, d / 4, out);
            }
        }
    }
}

// s[r][32]: scores of R query rows with one tile, words `stride` bytes apart.
template <int R>
inline void int8_scores(const uint8_t* q, int64_t depth, const uint8_t* tile, int64_t stride, const float* k_scale,
                        float* s) {
    constexpr int kAtOnce = kIntHalves;
    const int64_t row = depth + 16;
    for (int h = 0; h < 2; h += kAtOnce) {
        I acc[R][kAtOnce];
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < kAtOnce; ++i) acc[r][i] = first_key_sum(tail_of(q + r * row, depth).sum);
        const uint8_t* k = tile + 64 * h;
        for (int64_t d = 0; d < depth; d += 4, k += stride) {
            I word[kAtOnce];
            for (int i = 0; i < kAtOnce; ++i) word[i] = key_words(k + 64 * i);
            KVARN_UNROLL(16)
            for (int r = 0; r < R; ++r) {
                const I x = set_word(q + r * row + d);
                for (int i = 0; i < kAtOnce; ++i) acc[r][i] = add_keys(acc[r][i], word[i], x);
            }
        }
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r) {
            const F step = set1(tail_of(q + r * row, depth).step);
            for (int i = h; i < h + kAtOnce; ++i)
                store(s + r * kChunk + 16 * i, mul(to_float(acc[r][i - h]), mul(load(k_scale + 16 * i), step)));
        }
    }
}

// s[row][32]: scores of some rows with one tile.
template <int kMost>
inline void int8_score_rows(const uint8_t* q, int64_t rows, int64_t depth, const uint8_t* tile, int64_t stride,
                            const float* k_scale, float* s) {
    int64_t r = 0;
    const auto at = [&](int64_t i) { return q + i * (depth + 16); };
    for (; r + kMost <= rows; r += kMost) int8_scores<kMost>(at(r), depth, tile, stride, k_scale, s + r * kChunk);
    if constexpr (kMost > 3)
        for (; r + 3 <= rows; r += 3) int8_scores<3>(at(r), depth, tile, stride, k_scale, s + r * kChunk);
    if constexpr (kMost > 2)
        for (; r + 2 <= rows; r += 2) int8_scores<2>(at(r), depth, tile, stride, k_scale, s + r * kChunk);
    for (; r < rows; ++r) int8_scores<1>(at(r), depth, tile, stride, k_scale, s + r * kChunk);
}

// Codes and step of one row's weights of one tile.
inline void round_weights(F x, F y, float* step, uint8_t* codes) {
    *step = bits_of<float>(largest_bits(x, y)) / 255.0f;  // no weight is negative; NaN is the largest
    if (!(*step > 0.0f)) {
        memset(codes, 0, kSlots);
        return;
    }
    const F d = set1(*step);
    store_u8(codes, to_int(div(x, d)));
    store_u8(codes + kLanes, to_int(div(y, d)));
}

// Softmax of one row: s has n tiles of 32 scores, in base 2. Writes a row of p.
inline MaxSum int8_softmax(float* s, const uint32_t* seen, int64_t n, const float* v_scale, uint8_t* p) {
    F top = set1(kMinusInfinity);
    for (int64_t i = 0; i < 2 * n; ++i) {
        F x = load(s + i * kLanes);
        if (seen[i / 2] != ~0u) {
            x = keep(seen[i / 2] >> (i % 2 * 16) & 0xffffu, x, set1(kMinusInfinity));
            store(s + i * kLanes, x);
        }
        top = max(top, x);
    }
    const float m = reduce_max(top);
    const F base = set1(m == kMinusInfinity ? 0.0f : m);
    F sum = zero();
    auto* steps = reinterpret_cast<float*>(p + kChunk);
    for (int64_t t = 0; t < n; ++t) {
        F w[2];
        for (int64_t h = 0; h < 2; ++h) {
            const int64_t at = t * kSlots + h * kLanes;
            const F x = exp2<true>(sub(load(s + at), base));
            sum = add(sum, x);
            w[h] = keep(seen[t] >> (h * 16) & 0xffffu, mul(x, load(v_scale + at)), zero());
        }
        round_weights(w[0], w[1], steps + t, p + t * kSlots);
    }
    return {m, reduce_add(sum)};
}

// The same for R rows that see all slots, interleaved: the steps of one row depend on each other.
template <int R>
inline void int8_softmax_whole(const float* s, int64_t n, const float* v_scale, uint8_t* p, float* m, float* l) {
    F top[R], base[R], sum[R];
    KVARN_UNROLL(4)
    for (int r = 0; r < R; ++r) top[r] = set1(kMinusInfinity), sum[r] = zero();
    for (int64_t i = 0; i < n * kSlots; i += kLanes) {
        KVARN_UNROLL(4)
        for (int r = 0; r < R; ++r) top[r] = max(top[r], load(s + r * kChunk + i));
    }
    KVARN_UNROLL(4)
    for (int r = 0; r < R; ++r) {
        m[r] = reduce_max(top[r]);
        base[r] = set1(m[r] == kMinusInfinity ? 0.0f : m[r]);
    }
    for (int64_t t = 0; t < n; ++t) {
        const F a = load(v_scale + t * kSlots), b = load(v_scale + t * kSlots + kLanes);
        KVARN_UNROLL(4)
        for (int r = 0; r < R; ++r) {
            const float* at = s + r * kChunk + t * kSlots;
            const F x = exp2<true>(sub(load(at), base[r])), y = exp2<true>(sub(load(at + kLanes), base[r]));
            sum[r] = add(add(sum[r], x), y);
            uint8_t* row = p + r * Int8Arithmetic::weight_bytes;
            round_weights(mul(x, a), mul(y, b), reinterpret_cast<float*>(row + kChunk) + t, row + t * kSlots);
        }
    }
    KVARN_UNROLL(4)
    for (int r = 0; r < R; ++r) l[r] = reduce_add(sum[r]);
}

// Adds one tile to the sums of R rows, for 32 dims. at(quad, a, b) gives the words of four slots.
// The sums are in the order of `quads` until `int8_in_order`.
template <int R, typename At>
inline void int8_add_tile(const uint8_t* p, int64_t tile, At&& at, float* sums, int64_t width) {
    I acc[R][2];
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero_words();
    for (int64_t quad = 0; quad < kSlots / 4; ++quad) {
        I a, b;
        at(quad, a, b);
        KVARN_UNROLL(16)
        for (int r = 0; r < R; ++r) {
            const I x = set_word(p + r * Int8Arithmetic::weight_bytes + tile * kSlots + 4 * quad);
            acc[r][0] = add_values(acc[r][0], x, a);
            acc[r][1] = add_values(acc[r][1], x, b);
        }
    }
    KVARN_UNROLL(16)
    for (int r = 0; r < R; ++r) {
        const auto* steps = reinterpret_cast<const float*>(p + r * Int8Arithmetic::weight_bytes + kChunk);
        const F step = set1(steps[tile]);
        for (int i = 0; i < 2; ++i) {
            float* sum = sums + r * width + i * kLanes;
            store(sum, fma(to_float(acc[r][i]), step, load(sum)));
        }
    }
}

// Adds one tile to the outputs of some rows. at(d, quad, a, b): the words of four slots at dim d.
template <typename At>
inline void int8_add_rows(const uint8_t* p, int64_t rows, int64_t tile, At&& at, float* sums, int64_t width) {
    for (int64_t d = 0; d < width; d += kRotated) {
        const auto here = [&](int64_t quad, I& a, I& b) { at(d, quad, a, b); };
        int64_t r = 0;
        const auto with = [&]<int R>() {
            for (; r + R <= rows; r += R)
                int8_add_tile<R>(p + r * Int8Arithmetic::weight_bytes, tile, here, sums + r * width + d, width);
        };
        with.template operator()<kIntValueRows>();
        if constexpr (kIntValueRows > 3) with.template operator()<3>();
        if constexpr (kIntValueRows > 2) with.template operator()<2>();
        if constexpr (kIntValueRows > 1) with.template operator()<1>();
    }
}

inline void int8_in_order(const float* sums, int64_t width, float* out) {
    for (int64_t d = 0; d < width; d += kRotated) {
        const F a = load(sums + d), b = load(sums + d + kLanes);
        store(out + d, low_dims(a, b));
        store(out + d + kLanes, high_dims(a, b));
    }
}

struct StagedQuads {  // words of a staged tile
    const uint8_t* tile;
    int64_t depth;

    void operator()(int64_t d, int64_t quad, I& a, I& b) const {
        const uint8_t* at = tile + (quad * depth + d) * 4;
        a = load_words(at), b = load_words(at + 64);
    }
};

// The output of a row: o / l, rotated back.
inline void finish_rotated(float total, const float* o, int64_t dim, float* out) {
    const int64_t depth = Int8Arithmetic::depth(dim);
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
