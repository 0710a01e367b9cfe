// Tiles of keys: finds the blocks that hold a tile, and stages (copies) its cells. Staging converts
// any layout and codec to the one arrangement that products read: K [dim][slot] and V [slot][dim],
// in f32, or as pairs of bf16 for VDPBF16PS and AMX. Included by attention.cpp; in the instruction
// set's namespace.
#pragma once

#include "../base.hpp"
#include "../view.hpp"
#include "sum_order.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMinusInfinity = -__builtin_inff();

#if defined(__AVX512F__)
constexpr int kScoreRows = 10, kDecodeRows = 4, kValueRows = 6, kValueLanes = 4;
#elif defined(__AVX2__)
constexpr int kScoreRows = 2, kDecodeRows = 3, kValueRows = 2, kValueLanes = 2;
#else
constexpr int kScoreRows = 1, kDecodeRows = 1, kValueRows = 1, kValueLanes = 1;
#endif

// How cells are multiplied: in f32 (F32, F16); as bf16 in the order SumOrder::Pairs (BF16, Int8);
// as bf16 in the order SumOrder::Tiles, with vector instructions (Tiled*) or with AMX (Amx*).
enum class Math { F32, F16, BF16, Int8, TiledBF16, TiledInt8, AmxBF16, AmxInt8 };

constexpr Codec codec(Math m) {
    if (m == Math::F32) return Codec::F32;
    if (m == Math::F16) return Codec::F16;
    return m == Math::BF16 || m == Math::TiledBF16 || m == Math::AmxBF16 ? Codec::BF16 : Codec::Int8;
}
constexpr bool rounds(Math m) { return m != Math::F32 && m != Math::F16; }  // q and p are rounded to bf16
constexpr bool on_amx(Math m) { return m == Math::AmxBF16 || m == Math::AmxInt8; }
constexpr bool tiled(Math m) { return m == Math::TiledBF16 || m == Math::TiledInt8 || on_amx(m); }
constexpr bool pairs(Math m) { return tiled(m) ? on_amx(m) : kDotUnit && rounds(m); }  // q, p and tiles are bf16
template <Math C>
constexpr int64_t kRowsAtOnce = on_amx(C) ? 16 : 30;  // query rows of a prefill item that are computed together
template <Math C>
constexpr int64_t depth_of(int64_t dim) {  // dims that a score sums over, padded with zeros
    return up(dim, on_amx(C) ? 32 : 16);
}

// -- finding tiles

struct Tile {
    int64_t pos;
    const uint8_t *k[2], *v[2];  // the first slot of each half; null if no block holds it
    const float *k_scale[2], *v_scale[2];
};

inline Tile of_head(const StoreView& s, Tile t, int64_t heads) {  // the same slots of a head further on
    for (int h = 0; h < 2; ++h) {
        if (!t.k[h]) continue;
        t.k[h] += heads * s.ks.head * cell_bytes(s.codec);
        t.v[h] += heads * s.vs.head * cell_bytes(s.codec);
        if (s.k_scale) t.k_scale[h] += heads * s.k_scales.head, t.v_scale[h] += heads * s.v_scales.head;
    }
    return t;
}

struct Walk {  // finds blocks of one sequence by position
    const AttentionArgs& a;
    const int32_t *blocks, *first;
    int64_t n, at = 0;

    Walk(const AttentionArgs& args, int64_t seq)
        : a(args),
          blocks(args.table.blocks + seq * args.table.max_blocks),
          first(args.table.first + seq * args.table.max_blocks),
          n(args.table.n_blocks[seq]) {}

    int64_t find(int64_t pos) {  // the entry that holds pos, or -1; fast if positions ascend
        if (at >= n || first[at] > pos) at = 0;
        if (at + 1 < n && first[at + 1] <= pos) {
            int64_t low = at + 1, high = n;  // first[low] <= pos < first[high]
            while (high - low > 1) {
                const int64_t mid = (low + high) / 2;
                (first[mid] <= pos ? low : high) = mid;
            }
            at = low;
        }
        return at < n && first[at] <= pos && pos < first[at] + a.store.block_size ? at : -1;
    }

    Tile tile(int64_t pos, int64_t head) {
        const StoreView& s = a.store;
        Tile t{};
        t.pos = pos;
        for (int h = 0; h < 2; ++h) {
            const int64_t entry = find(pos + 16 * h);
            if (entry < 0) continue;
            const int64_t in = pos + 16 * h - first[entry], panel = in / s.panel_size, slot = in % s.panel_size;
            const auto at_cell = [&](const Strides& st) {
                return blocks[entry] * st.block + panel * st.panel + head * st.head + slot * st.slot;
            };
            const int64_t bytes = cell_bytes(s.codec);
            t.k[h] = s.k + at_cell(s.ks) * bytes;
            t.v[h] = s.v + at_cell(s.vs) * bytes;
            if (s.k_scale) {
                t.k_scale[h] = s.k_scale + at_cell(s.k_scales);
                t.v_scale[h] = s.v_scale + at_cell(s.v_scales);
            }
        }
        return t;
    }
};

template <Math C>
inline F load_cells(const uint8_t* p) {  // 16 cells
    if constexpr (codec(C) == Codec::F32) return load(reinterpret_cast<const float*>(p));
    if constexpr (codec(C) == Codec::F16) return load_f16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (codec(C) == Codec::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
    if constexpr (codec(C) == Codec::Int8) return load_i8(reinterpret_cast<const int8_t*>(p));
}

template <Math C>
inline float cell(const uint8_t* p) {
    if constexpr (codec(C) == Codec::F32) return *reinterpret_cast<const float*>(p);
    if constexpr (codec(C) == Codec::BF16) return widen_bf16(*reinterpret_cast<const uint16_t*>(p));
    if constexpr (codec(C) == Codec::Int8) return float(*reinterpret_cast<const int8_t*>(p));
    if constexpr (codec(C) == Codec::F16) {
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
template <Math C>
void widen_rows(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, float* out, int64_t width) {
    constexpr int64_t kBytes = cell_bytes(codec(C));
    for (int s = 0; s < int(kSlots); ++s) {
        float* row = out + s * width;
        if (!((seen >> s) & 1u)) {
            memset(row, 0, size_t(width) * 4);
            continue;
        }
        const uint8_t* p = half[s / 16] + (s % 16) * st.slot * kBytes;
        int64_t d = 0;
        if (st.dim == 1)
            for (; d + kLanes <= dim; d += kLanes) store(row + d, load_cells<C>(p + d * kBytes));
        for (; d < dim; ++d) row[d] = cell<C>(p + d * st.dim * kBytes);
        for (; d < width; ++d) row[d] = 0.0f;
    }
}

// The same with slots in columns, [depth][32], depth = up(dim, 16). Columns of unseen slots may
// hold anything.
template <Math C>
void widen_columns(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, float* out, float* rows) {
    constexpr int64_t kBytes = cell_bytes(codec(C));
    const int64_t depth = up(dim, 16);
    if (st.slot == 1) {
        for (int64_t d = 0; d < depth; ++d)
            for (int h = 0; h < 2; ++h) {
                const bool there = d < dim && half[h];
                store(out + d * kSlots + 16 * h, there ? load_cells<C>(half[h] + d * st.dim * kBytes) : zero());
            }
        return;
    }
    widen_rows<C>(half, st, dim, seen, rows, depth);
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

template <Math C>
void pair_columns(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, uint16_t* out,
                  float* rows) {
    const int64_t depth = depth_of<C>(dim);
    if constexpr (codec(C) == Codec::BF16) {
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
    widen_rows<C>(half, st, dim, seen, rows, depth);
    uint16_t narrow[kSlots * kMaxHeadDim];
    for (int64_t i = 0; i < kSlots * depth; i += kLanes) store_bf16(narrow + i, load(rows + i));
    transpose(reinterpret_cast<const uint32_t*>(narrow), depth / 2, reinterpret_cast<uint32_t*>(out), kSlots,
              int(kSlots), int(depth / 2));
}

template <Math C>
void pair_rows(const uint8_t* const* half, const Strides& st, int64_t dim, uint32_t seen, uint16_t* out, float* rows) {
    const int64_t width = up(dim, 16);
    if constexpr (codec(C) == Codec::BF16) {
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
    widen_rows<C>(half, st, dim, seen, rows, width);
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

}  // namespace
}  // namespace kvarn::KVARN_ISA
