// Decode that reads cells in place, without staging: keys whose slots are contiguous ([dim][32]),
// values whose dims are contiguous ([slot][dim]). The order of sums is that of staged tiles, so the
// bits are the same. In the instruction set's namespace.
#pragma once

#include "stage.hpp"

namespace kvarn::KVARN_ISA {
namespace {

template <typename K>
bool keys_in_place(const StoreView& s, const Tile& t) {
    return s.k.strides.slot == 1 && s.dim % 2 == 0 && t.k.half[0] && t.k.half[1] == t.k.half[0] + 16 * K::bytes;
}

inline bool values_readable(const StoreView& s) { return s.v.strides.dim == 1 && s.dim % kLanes == 0; }

// Makes attention a fifth to a third faster on Sapphire Rapids and Zen 5, and a fifth slower on Zen 4, whose
// hardware prefetcher it disturbs (docs/journal.md). So the program finds out (fastest.hpp).
KVARN_INLINE void prefetch_cells(const uint8_t* p) { prefetch_l2(p); }

template <typename A>
constexpr bool kDotInPlace = kDotUnit && A::codec == Codec::BF16 && !A::tiled;

template <typename A>
inline F a_number(const void* a, int64_t i) {  // number i of q or p, in all lanes
    if constexpr (A::pairs) return set1(widen_bf16(static_cast<const uint16_t*>(a)[i]));
    return set1(static_cast<const float*>(a)[i]);
}

#if defined(__AVX512BF16__)
// Stores 32 numbers in order. unpacklo and unpackhi had paired up bf16 within each 128-bit lane.
inline void store_unpacked(float* out, F a, F b) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(a.v, first, b.v));
    _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(a.v, second, b.v));
}
#endif

template <typename A, int G>
inline void scores_in_place(const uint8_t* k, int64_t stride, int64_t dim, const uint8_t* q, int64_t depth, float* s,
                            const uint8_t* next_cells) {
    F acc[G][2];
    for (int r = 0; r < G; ++r) acc[r][0] = acc[r][1] = zero();
    const auto row = [&](int64_t r) { return q + r * depth * A::number_bytes; };
#if defined(__AVX512BF16__)
    if constexpr (kDotInPlace<A>) {
        const auto* p = reinterpret_cast<const uint16_t*>(k);
        for (int64_t d = 0; d < dim; d += 2) {
            prefetch_cells(next_cells + d * kSlots * 2);
            prefetch_cells(next_cells + (d + 1) * kSlots * 2);
            const __m512i x = _mm512_loadu_si512(p + d * stride), y = _mm512_loadu_si512(p + (d + 1) * stride);
            const auto lo = (__m512bh)_mm512_unpacklo_epi16(x, y), hi = (__m512bh)_mm512_unpackhi_epi16(x, y);
            for (int r = 0; r < G; ++r) {
                const __m512bh two = pair_at(reinterpret_cast<const uint16_t*>(row(r)) + d);
                acc[r][0].v = _mm512_dpbf16_ps(acc[r][0].v, lo, two);
                acc[r][1].v = _mm512_dpbf16_ps(acc[r][1].v, hi, two);
            }
        }
        for (int r = 0; r < G; ++r) store_unpacked(s + r * kChunk, acc[r][0], acc[r][1]);
        return;
    }
#endif
    constexpr bool kSplit = A::codec == Codec::BF16;  // even slots in one register, odd ones in the other
    in_turn<A::tiled>(acc, dim, [&](F(&sums)[G][2], int64_t d) {
        prefetch_cells(next_cells + d * kSlots * A::bytes);
        const uint8_t* p = k + d * stride * A::bytes;
        const auto* halves = reinterpret_cast<const uint16_t*>(p);
        const F b0 = kSplit ? even_bf16(halves) : load_cells<A>(p);
        const F b1 = kSplit ? odd_bf16(halves) : load_cells<A>(p + 16 * A::bytes);
        for (int r = 0; r < G; ++r) {
            const F x = a_number<A>(row(r), d);
            sums[r][0] = fma(b0, x, sums[r][0]);
            sums[r][1] = fma(b1, x, sums[r][1]);
        }
    });
    for (int r = 0; r < G; ++r) {
        store(s + r * kChunk, kSplit ? zip_low(acc[r][0], acc[r][1]) : acc[r][0]);
        store(s + r * kChunk + 16, kSplit ? zip_high(acc[r][0], acc[r][1]) : acc[r][1]);
    }
}

// Calls fn<G>(row) for rows [first, first + rows), G rows at a time.
template <typename Fn>
inline void by_rows(int64_t first, int64_t rows, Fn&& fn) {
    int64_t r = first;
    const int64_t end = first + rows;
    for (; r + kInPlaceRows <= end; r += kInPlaceRows) fn.template operator()<kInPlaceRows>(r);
    if constexpr (kInPlaceRows > 3)
        if (r + 3 <= end) fn.template operator()<3>(r), r += 3;
    if constexpr (kInPlaceRows > 2)
        if (r + 2 <= end) fn.template operator()<2>(r), r += 2;
    for (; r < end; ++r) fn.template operator()<1>(r);
}

// Scores of rows [first, first + rows) of q with one tile, into column `column` of x.s.
template <typename A>
void score_in_place(const StoreView& st, const Tile& t, const Scratch& x, int64_t first, int64_t rows, int64_t column,
                    const uint8_t* next_cells) {
    const int64_t depth = A::depth(st.dim);
    by_rows(first, rows, [&]<int G>(int64_t r) {
        scores_in_place<A, G>(t.k.half[0], st.k.strides.dim, st.dim, x.q + r * depth * A::number_bytes, depth,
                              x.s + r * kChunk + column, next_cells);
    });
}

struct ValueTile {  // 32 slots of values, in two halves
    const uint8_t* half[2];
    int64_t stride;  // bytes from one slot to the next
};

// Whether a load of 32 dims gives two registers of 16 interleaved dims. `in_order` undoes that at
// the end.
template <typename A, int N>
constexpr bool kInterleaved = A::codec == Codec::BF16 && N % 2 == 0;

// Adds one tile to the sums of G rows, for N * 16 dims from `d` on. p has kChunk numbers a row.
template <typename A, int G, int N>
inline void values_in_place(const ValueTile& tile, int64_t d, const uint8_t* p, float* sums, int64_t width,
                            const uint8_t* next_cells) {
    constexpr int64_t kBytes = A::bytes;
    F acc[G][N];
    for (int r = 0; r < G; ++r)
        for (int i = 0; i < N; ++i) acc[r][i] = load(sums + r * width + d + i * kLanes);
    const auto row = [&](int64_t r) { return p + r * kChunk * A::number_bytes; };
    next_cells += d * kSlots * kBytes;
    const auto cells_of = [&](int64_t s) { return tile.half[s / 16] + (s % 16) * tile.stride + d * kBytes; };
    if constexpr (kDotInPlace<A> && kInterleaved<A, N>) {
#if defined(__AVX512BF16__)
        for (int64_t s = 0; s < kSlots; s += 2) {
            for (int i = 0; i < N; ++i) prefetch_cells(next_cells + (s * N + 2 * i) * kLanes * kBytes);
            const uint8_t *even = cells_of(s), *odd = even + tile.stride;
            __m512bh b[N];
            for (int i = 0; i < N; i += 2) {
                const __m512i x = _mm512_loadu_si512(even + i * 32), y = _mm512_loadu_si512(odd + i * 32);
                b[i] = (__m512bh)_mm512_unpacklo_epi16(x, y);
                b[i + 1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
            }
            for (int r = 0; r < G; ++r) {
                const __m512bh two = pair_at(reinterpret_cast<const uint16_t*>(row(r)) + s);
                for (int i = 0; i < N; ++i) acc[r][i].v = _mm512_dpbf16_ps(acc[r][i].v, b[i], two);
            }
        }
#endif
    } else {
        in_turn<A::tiled>(acc, kSlots, [&](F(&chain)[G][N], int64_t s) {
            const uint8_t* cells = cells_of(s);
            for (int i = 0; i < N; i += 2) prefetch_cells(next_cells + (s * N + i) * kLanes * kBytes);
            F b[N];
            if constexpr (kInterleaved<A, N>) {
                for (int i = 0; i < N; i += 2) {
                    b[i] = even_bf16(reinterpret_cast<const uint16_t*>(cells) + i * kLanes);
                    b[i + 1] = odd_bf16(reinterpret_cast<const uint16_t*>(cells) + i * kLanes);
                }
            } else {
                for (int i = 0; i < N; ++i) b[i] = load_cells<A>(cells + i * kLanes * kBytes);
            }
            for (int r = 0; r < G; ++r) {
                const F x = a_number<A>(row(r), s);
                for (int i = 0; i < N; ++i) chain[r][i] = fma(b[i], x, chain[r][i]);
            }
        });
    }
    for (int r = 0; r < G; ++r)
        for (int i = 0; i < N; ++i) store(sums + r * width + d + i * kLanes, acc[r][i]);
}

// Calls fn<N>(d) for blocks of N * 16 dims.
template <typename Fn>
inline void by_dims(int64_t dim, Fn&& fn) {
    constexpr int kWide = kInPlaceRows == 4 ? 4 : 2;
    int64_t d = 0;
    for (; d + kWide * kLanes <= dim; d += kWide * kLanes) fn.template operator()<kWide>(d);
    if constexpr (kWide > 2)
        for (; d + 2 * kLanes <= dim; d += 2 * kLanes) fn.template operator()<2>(d);
    for (; d < dim; d += kLanes) fn.template operator()<1>(d);
}

// Adds the values of tile `index` to the outputs x.part of rows [first, first + rows).
template <typename A>
void add_in_place(const StoreView& st, const Tile& t, uint32_t seen, int64_t index, const Scratch& x, int64_t first,
                  int64_t rows, const uint8_t* next_cells) {
    const int64_t step = st.v.strides.slot * A::bytes, row = st.dim * A::bytes, width = up(st.dim, 16);
    ValueTile v{{t.v.half[0], t.v.half[1]}, step};
    if (seen != ~0u) {  // a tile at the edge: copy it, with zeros for slots that are not visible
        for (int64_t s = 0; s < kSlots; ++s) {
            if ((seen >> s) & 1u)
                memcpy(x.v + s * row, t.v.half[s / 16] + (s % 16) * step, size_t(row));
            else
                memset(x.v + s * row, 0, size_t(row));
        }
        v = {{x.v, x.v + 16 * row}, row};
    }
    by_rows(first, rows, [&]<int G>(int64_t r) {
        const uint8_t* p = x.p + (r * kChunk + index * kSlots) * A::number_bytes;
        by_dims(st.dim,
                [&]<int N>(int64_t d) { values_in_place<A, G, N>(v, d, p, x.part + r * width, width, next_cells); });
    });
}

// Copies the sums of values_in_place with their dims in order.
template <typename A>
void in_order(const float* sums, int64_t dim, float* out) {
    by_dims(dim, [&]<int N>(int64_t d) {
        for (int i = 0; i < N; ++i) {
            if constexpr (!kInterleaved<A, N>) {
                store(out + d + i * kLanes, load(sums + d + i * kLanes));
            } else if (i % 2 == 0) {
                const F a = load(sums + d + i * kLanes), b = load(sums + d + (i + 1) * kLanes);
                if constexpr (kDotInPlace<A>) {
#if defined(__AVX512BF16__)
                    store_unpacked(out + d + i * kLanes, a, b);
#endif
                } else {
                    store(out + d + i * kLanes, zip_low(a, b));
                    store(out + d + (i + 1) * kLanes, zip_high(a, b));
                }
            }
        }
    });
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
