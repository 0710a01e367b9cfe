// Staging: copies the cells of a tile, whatever their layout and codec, into the one arrangement
// that products read: K [dim][slot] and V [slot][dim], in f32, or as pairs of bf16 for VDPBF16PS and
// AMX. Queries are scaled and rounded on the way. In the instruction set's namespace.
#pragma once

#include "../scratch.hpp"
#include "tiles.hpp"

namespace kvarn::KVARN_ISA {
namespace {

template <typename A>
inline F load_cells(const uint8_t* p) {  // 16 cells
    if constexpr (A::codec == Codec::F32) return load(reinterpret_cast<const float*>(p));
    if constexpr (A::codec == Codec::F16) return load_f16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (A::codec == Codec::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
}

template <typename A>
inline float cell(const uint8_t* p) {
    if constexpr (A::codec == Codec::F32) return *reinterpret_cast<const float*>(p);
    if constexpr (A::codec == Codec::BF16) return widen_bf16(*reinterpret_cast<const uint16_t*>(p));
    if constexpr (A::codec == Codec::F16) {
        uint16_t sixteen[kLanes] = {*reinterpret_cast<const uint16_t*>(p)};
        float wide[kLanes];
        store(wide, load_f16(sixteen));
        return wide[0];
    }
}

// Transposes a matrix of 32-bit numbers; rows and cols are multiples of 8.
inline void transpose(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride, int rows, int cols) {
#if defined(__AVX2__)
    for (int r = 0; r < rows; r += 8)
        for (int c = 0; c < cols; c += 8) {
            __m256 x[8], y[8];
            for (int i = 0; i < 8; ++i)
                x[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(src + (r + i) * src_stride + c));
            for (int i = 0; i < 4; ++i) {
                y[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
                y[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
            }
            for (int i = 0; i < 2; ++i) {
                x[4 * i] = _mm256_shuffle_ps(y[4 * i], y[4 * i + 2], 0x44);
                x[4 * i + 1] = _mm256_shuffle_ps(y[4 * i], y[4 * i + 2], 0xee);
                x[4 * i + 2] = _mm256_shuffle_ps(y[4 * i + 1], y[4 * i + 3], 0x44);
                x[4 * i + 3] = _mm256_shuffle_ps(y[4 * i + 1], y[4 * i + 3], 0xee);
            }
            for (int i = 0; i < 4; ++i) {
                auto* low = reinterpret_cast<float*>(dst + (c + i) * dst_stride + r);
                auto* high = reinterpret_cast<float*>(dst + (c + i + 4) * dst_stride + r);
                _mm256_storeu_ps(low, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
                _mm256_storeu_ps(high, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
            }
        }
#else
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c) dst[c * dst_stride + r] = src[r * src_stride + c];
#endif
}

// Stages a tile in f32 with slots in rows, [32][width], width = up(dim, 16). Takes any layout.
// Slots outside `seen` become 0.
template <typename A>
void widen_rows(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, float* out, int64_t width) {
    constexpr int64_t kBytes = A::bytes;
    for (int s = 0; s < int(kSlots); ++s) {
        float* row = out + s * width;
        if (!((seen >> s) & 1u)) {
            memset(row, 0, size_t(width) * 4);
            continue;
        }
        const uint8_t* p = half[s / 16] + (s % 16) * st.slot * kBytes;
        int64_t d = 0;
        if (st.dim == 1)
            for (; d + kLanes <= dim; d += kLanes) store(row + d, load_cells<A>(p + d * kBytes));
        for (; d < dim; ++d) row[d] = cell<A>(p + d * st.dim * kBytes);
        for (; d < width; ++d) row[d] = 0.0f;
    }
}

// The same with slots in columns, [depth][32], depth = up(dim, 16). Columns of unseen slots may
// hold anything.
template <typename A>
void widen_columns(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, float* out, float* rows) {
    constexpr int64_t kBytes = A::bytes;
    const int64_t depth = up(dim, 16);
    if (st.slot == 1) {
        for (int64_t d = 0; d < depth; ++d)
            for (int h = 0; h < 2; ++h) {
                const bool there = d < dim && half[h];
                store(out + d * kSlots + 16 * h, there ? load_cells<A>(half[h] + d * st.dim * kBytes) : zero());
            }
        return;
    }
    widen_rows<A>(half, st, dim, seen, rows, depth);
    transpose(reinterpret_cast<const uint32_t*>(rows), depth, reinterpret_cast<uint32_t*>(out), kSlots, int(kSlots),
              int(depth));
}

#if defined(__AVX512BF16__)

// Tiles as pairs of bf16, for VDPBF16PS and AMX.
//   K   [depth / 2][32 slots][2 dims]
//   V   [16 pairs of slots][width dims][2 slots]
inline void zip_rows(const uint16_t* a, const uint16_t* b, uint16_t* out) {  // interleaves 32 elements of each
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    const __m512i lo = _mm512_unpacklo_epi16(x, y), hi = _mm512_unpackhi_epi16(x, y);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(lo, first, hi));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(lo, second, hi));
}

template <typename A>
void pair_columns(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, uint16_t* out,
                  float* rows) {
    const int64_t depth = A::depth(dim);
    if constexpr (A::codec == Codec::BF16) {
        const bool whole = half[0] && half[1];
        if (st.slot == 1 && whole && half[1] == half[0] + 32 && dim % 2 == 0 && dim == depth) {
            const auto* p = reinterpret_cast<const uint16_t*>(half[0]);
            for (int64_t d = 0; d < dim; d += 2) zip_rows(p + d * st.dim, p + (d + 1) * st.dim, out + d * kSlots);
            return;
        }
        if (st.dim == 1 && whole && seen == ~0u && dim == depth) {  // a pair of dims is 32 bits: transpose pairs
            for (int h = 0; h < 2; ++h) {
                const auto* p = reinterpret_cast<const uint32_t*>(half[h]);
                if (st.slot % 2 == 0)
                    transpose(p, st.slot / 2, reinterpret_cast<uint32_t*>(out) + 16 * h, kSlots, 16, int(depth / 2));
            }
            if (st.slot % 2 == 0) return;
        }
    }
    widen_rows<A>(half, st, dim, seen, rows, depth);
    uint16_t narrow[kSlots * kMaxHeadDim];
    for (int64_t i = 0; i < kSlots * depth; i += kLanes) store_bf16(narrow + i, load(rows + i));
    transpose(reinterpret_cast<const uint32_t*>(narrow), depth / 2, reinterpret_cast<uint32_t*>(out), kSlots,
              int(kSlots), int(depth / 2));
}

template <typename A>
void pair_rows(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, uint16_t* out, float* rows) {
    const int64_t width = up(dim, 16);
    if constexpr (A::codec == Codec::BF16) {
        const bool whole = half[0] && half[1] && seen == ~0u && dim % 32 == 0;
        if (whole && st.dim == 1) {
            for (int s = 0; s < int(kSlots); s += 2) {
                const auto* a = reinterpret_cast<const uint16_t*>(half[s / 16]) + (s % 16) * st.slot;
                for (int64_t d = 0; d < dim; d += 32) zip_rows(a + d, a + st.slot + d, out + (s / 2 * width + d) * 2);
            }
            return;
        }
        if (whole && st.slot == 1 && half[1] == half[0] + 32 && st.dim % 2 == 0) {
            transpose(reinterpret_cast<const uint32_t*>(half[0]), st.dim / 2, reinterpret_cast<uint32_t*>(out), width,
                      int(width), 16);
            return;
        }
    }
    widen_rows<A>(half, st, dim, seen, rows, width);
    for (int s = 0; s < int(kSlots); s += 2)
        for (int64_t d = 0; d < width; d += kLanes) {
            uint16_t a[kLanes], b[kLanes];
            store_bf16(a, load(rows + s * width + d));
            store_bf16(b, load(rows + (s + 1) * width + d));
            for (int i = 0; i < kLanes; ++i) {
                out[(s / 2 * width + d + i) * 2] = a[i];
                out[(s / 2 * width + d + i) * 2 + 1] = b[i];
            }
        }
}

#endif

template <typename K>
void stage_query(const float* q, int64_t dim, float scale, uint8_t* out) {  // scales q, so that scores need no scaling
    const int64_t depth = K::depth(dim);
    float padded[kLanes];
    for (int64_t d = 0; d < depth; d += kLanes) {
        F x;
        if (d + kLanes <= dim) {
            x = load(q + d);
        } else {
            for (int64_t i = 0; i < kLanes; ++i) padded[i] = d + i < dim ? q[d + i] : 0.0f;
            x = load(padded);
        }
        x = mul(x, set1(scale));
        if constexpr (K::rounds) {
            uint16_t narrow[kLanes];
            store_bf16(narrow, x);
            if constexpr (K::pairs) {
                memcpy(out + d * 2, narrow, sizeof narrow);
                continue;
            }
            x = load_bf16(narrow);
        }
        store(reinterpret_cast<float*>(out) + d, x);
    }
}

template <typename K>
void stage_keys(const StoreView& s, const Tile& t, uint32_t seen, int64_t index, const Scratch& x) {
    uint8_t* out = x.k + index * kSlots * K::depth(s.dim) * K::number_bytes;
#if defined(__AVX512BF16__)
    if constexpr (K::pairs)
        return pair_columns<K>(t.k.half, s.k.strides, s.dim, seen, reinterpret_cast<uint16_t*>(out), x.rows);
#endif
    widen_columns<K>(t.k.half, s.k.strides, s.dim, seen, reinterpret_cast<float*>(out), x.rows);
}

template <typename V>
void stage_values(const StoreView& s, const Tile& t, uint32_t seen, int64_t index, const Scratch& x) {
    const int64_t width = up(s.dim, 16);
    uint8_t* out = x.v + index * kSlots * width * V::number_bytes;
#if defined(__AVX512BF16__)
    if constexpr (V::pairs)
        return pair_rows<V>(t.v.half, s.v.strides, s.dim, seen, reinterpret_cast<uint16_t*>(out), x.rows);
#endif
    widen_rows<V>(t.v.half, s.v.strides, s.dim, seen, reinterpret_cast<float*>(out), width);
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
