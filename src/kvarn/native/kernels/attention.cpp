// Attention over Store and Table, compiled once per instruction set. Prefill and decode give a row the same bits:
//
// - Keys stand in tiles of 32 slots at absolute positions, tiles in chunks of 256. A chunk gives (m, l, O); chunks
// merge
//   in ascending order by one formula. Tiles are skipped by visibility only, and a skipped tile adds exact zeros.
// - Scores: lanes are slots, one FMA chain over dims, in pairs, the odd one first (what VDPBF16PS does, so that it and
//   plain FMAs agree). l: lanes are slots mod 16. O: lanes are dims, one chain over slots, in pairs, the odd one first.
// - bf16 and int8 cells: q and p are rounded to bf16, products are bf16 with f32 sums; int8 scales multiply scores and
//   fold into p. f16 and f32 cells: all in f32.
// - A lane of a slot that may not be seen can hold anything: its score becomes -inf, its p 0, and its V is staged as 0.
#include "in_place.hpp"
#include "products.hpp"

namespace kvarn::KVARN_ISA {
namespace {

// -- staging of one unit ----------------------------------------------------------------------------------------------

template <Codec C>
void stage_query(const float* q, int64_t dim, float scale, uint8_t* out) {  // scaled, so that scores need not be
    const int64_t depth = up(dim, 16);
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
        if constexpr (rounds(C)) {
            uint16_t narrow[kLanes];
            store_bf16(narrow, x);
            if constexpr (dots(C)) {
                memcpy(out + d * 2, narrow, sizeof narrow);
                continue;
            }
            x = load_bf16(narrow);
        }
        store(reinterpret_cast<float*>(out) + d, x);
    }
}

template <Codec C>
void stage_keys(const AttentionArgs& a, const Tile& t, uint32_t seen, const Scratch& x) {
#if defined(__AVX512BF16__)
    if constexpr (dots(C))
        return pair_columns<C>(t.k, a.store.ks, a.store.dim, seen, reinterpret_cast<uint16_t*>(x.k), x.rows);
#endif
    widen_columns<C>(t.k, a.store.ks, a.store.dim, seen, reinterpret_cast<float*>(x.k), x.rows);
}

template <Codec C>
void stage_values(const AttentionArgs& a, const Tile& t, uint32_t seen, int64_t index, const Scratch& x) {
    const int64_t width = up(a.store.dim, 16);
    uint8_t* out = x.v + index * kSlots * width * (dots(C) ? 2 : 4);
#if defined(__AVX512BF16__)
    if constexpr (dots(C))
        return pair_rows<C>(t.v, a.store.vs, a.store.dim, seen, reinterpret_cast<uint16_t*>(out), x.rows);
#endif
    widen_rows<C>(t.v, a.store.vs, a.store.dim, seen, reinterpret_cast<float*>(out), width);
}

void stage_scales(const AttentionArgs& a, const Tile& t, uint32_t seen, int64_t index, float* k_scale, float* v_scale) {
    for (int s = 0; s < int(kSlots); ++s) {
        const bool there = (seen >> s) & 1u;
        k_scale[index * kSlots + s] = there ? t.k_scale[s / 16][(s % 16) * a.store.k_scales.slot] : 0.0f;
        v_scale[index * kSlots + s] = there ? t.v_scale[s / 16][(s % 16) * a.store.v_scales.slot] : 0.0f;
    }
}

template <Codec C, int kMost>
void score_rows(const Scratch& x, int64_t first, int64_t rows, int64_t depth, int64_t column) {
    int64_t r = first;
    const int64_t end = first + rows;
    const auto at = [&](int64_t row) { return x.q + row * depth * a_bytes<C>(); };
    for (; r + kMost <= end; r += kMost) scores<C, kMost>(at(r), depth, x.k, x.s + r * kChunk + column, kChunk);
    if constexpr (kMost > 4)
        for (; r + 4 <= end; r += 4) scores<C, 4>(at(r), depth, x.k, x.s + r * kChunk + column, kChunk);
    for (; r < end; ++r) scores<C, 1>(at(r), depth, x.k, x.s + r * kChunk + column, kChunk);
}

template <Codec C>
void value_rows(const Scratch& x, int64_t first, int64_t rows, int64_t width, int64_t n) {
    int64_t r = first;
    const int64_t end = first + rows;
    const auto at = [&](int64_t row) { return x.p + row * kChunk * a_bytes<C>(); };
    for (; r + kValueRows <= end; r += kValueRows)
        values_rows<C, kValueRows>(at(r), kChunk, x.v, width, n, x.part + r * width, width);
    if constexpr (kValueRows > 2)
        for (; r + 2 <= end; r += 2) values_rows<C, 2>(at(r), kChunk, x.v, width, n, x.part + r * width, width);
    for (; r < end; ++r) values_rows<C, 1>(at(r), kChunk, x.v, width, n, x.part + r * width, width);
}

int64_t row_bytes(const StoreView& s) {  // K and V of one slot of one head
    return 2 * (s.dim * cell_bytes(s.codec) + (s.k_scale ? 4 : 0));
}

int64_t count(uint32_t bits) { return __builtin_popcount(bits); }

// -- decode: one position, some groups of query heads, one chunk ------------------------------------------------------

template <Codec C>
int64_t decode(const AttentionArgs& a, const Unit& u, float* partials, uint8_t* memory) {
    const StoreView& s = a.store;
    const int64_t group = a.spec.n_heads / s.n_heads, rows = u.heads * group, depth = up(s.dim, 16);
    const int64_t q_pos = a.table.kv_len[u.seq] - 1;
    const Scratch x = carve(memory, s.dim);
    const float* q = a.q + a.table.q_start[u.seq] * a.q_stride + u.head * group * s.dim;
    for (int64_t r = 0; r < rows; ++r)
        stage_query<C>(q + r * s.dim, s.dim, a.scale * kLog2e, x.q + r * depth * a_bytes<C>());

    Walk walk(a, u.seq);
    Tile tiles[kChunk / kSlots];
    uint32_t seen[kChunk / kSlots];
    int64_t n = 0, read = 0;
    for (int64_t pos = u.begin; pos < u.end; pos += kSlots) {
        const uint32_t bits = a.spec.visible32(q_pos, pos);
        if (!bits) continue;
        seen[n] = bits;
        read += count(bits);
        tiles[n++] = walk.tile(pos, u.head);
    }
    for (int64_t i = 0; i < n; ++i)
        for (int64_t h = 0; h < u.heads; ++h) {
            const Tile t = of_head(s, tiles[i], h);
            if constexpr (C == Codec::Int8)
                stage_scales(a, t, seen[i], i, x.k_scale + h * kChunk, x.v_scale + h * kChunk);
            if (keys_in_place<C>(s, t)) {
                decode_scores<C>(s, t, x, h * group, group, depth, i * kSlots);
            } else {
                stage_keys<C>(a, t, seen[i], x);
                score_rows<C, kDecodeRows>(x, h * group, group, depth, i * kSlots);
            }
        }
    float* out = partials + u.partial;
    const int64_t stride = 2 + depth;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t h = r / group * kChunk;
        const Piece piece =
            softmax<C>(x.s + r * kChunk, seen, n, x.k_scale + h, x.v_scale + h, x.p + r * kChunk * a_bytes<C>());
        out[r * stride] = piece.m, out[r * stride + 1] = piece.l;
    }
    if (values_readable<C>(s)) {
        memset(x.part, 0, size_t(rows * depth) * 4);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t h = 0; h < u.heads; ++h)
                decode_values<C>(a, of_head(s, tiles[i], h), seen[i], i, x, h * group, group, depth);
        for (int64_t r = 0; r < rows; ++r) in_order<C>(x.part + r * depth, s.dim, out + 2 + r * stride);
    } else {
        for (int64_t h = 0; h < u.heads; ++h) {
            for (int64_t i = 0; i < n; ++i) stage_values<C>(a, of_head(s, tiles[i], h), seen[i], i, x);
            value_rows<C>(x, h * group, group, depth, n);
        }
        for (int64_t r = 0; r < rows; ++r) memcpy(out + 2 + r * stride, x.part + r * depth, size_t(depth) * 4);
    }
    return read * u.heads * row_bytes(s);
}

void merge(const AttentionArgs& a, const Unit* units, const Merge& m, const float* partials) {
    const StoreView& s = a.store;
    const int64_t group = a.spec.n_heads / s.n_heads, depth = up(s.dim, 16), stride = 2 + depth;
    const Unit* u = units + m.first;
    float o[16 * 256];
    float* out = a.out + a.table.q_start[m.seq] * a.out_stride + m.head * group * s.dim;
    Totals total(group), piece(group);
    memset(o, 0, size_t(group * depth) * 4);
    for (int64_t i = 0; i < m.n; ++i) {
        const float* part = partials + u[i].partial + (m.head - u[i].head) * group * stride;
        for (int64_t r = 0; r < group; ++r) piece.m[r] = part[r * stride], piece.l[r] = part[r * stride + 1];
        absorb(total, o, piece, part + 2, stride, group, depth);
    }
    for (int64_t r = 0; r < group; ++r) finish(total.l[r], o + r * depth, s.dim, out + r * s.dim);
}

// -- prefill: some positions, one group of query heads, all their keys ------------------------------------------------

bool all_finite(const float* x, int64_t n) {
    F sum = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        const F v = load(x + i);
        sum = add(sum, sub(v, v));
    }
    return reduce_add(sum) == 0.0f;
}

template <Codec C>
bool finite_values(const Scratch& x, int64_t n, int64_t width) {
    if constexpr (C == Codec::Int8) return true;
    if constexpr (!dots(C)) return all_finite(reinterpret_cast<const float*>(x.v), n * kSlots * width);
    const auto* p = reinterpret_cast<const uint16_t*>(x.v);
    F sum = zero();
    for (int64_t i = 0; i < n * kSlots * width; i += 2 * kLanes) {
        const F e = even_bf16(p + i), o = odd_bf16(p + i);
        sum = add(sum, add(sub(e, e), sub(o, o)));
    }
    return reduce_add(sum) == 0.0f;
}

template <Codec C>
int64_t prefill(const AttentionArgs& a, const Unit& u, uint8_t* memory) {
    const StoreView& s = a.store;
    const int64_t group = a.spec.n_heads / s.n_heads, depth = up(s.dim, 16);
    const int64_t positions = u.end - u.begin, rows = positions * group;
    const int64_t first = a.table.kv_len[u.seq] - (a.table.q_start[u.seq + 1] - a.table.q_start[u.seq]);
    const int64_t row0 = a.table.q_start[u.seq] + u.begin - first;
    const Scratch x = carve(memory, s.dim);
    for (int64_t i = 0; i < rows; ++i)  // row i: position i / group, head i % group
        stage_query<C>(a.q + (row0 + i / group) * a.q_stride + (u.head * group + i % group) * s.dim, s.dim,
                       a.scale * kLog2e, x.q + i * depth * a_bytes<C>());
    Totals total(rows), piece(rows);
    memset(x.o, 0, size_t(rows * depth) * 4);

    Walk walk(a, u.seq);
    int64_t read = 0;
    for (int64_t chunk = 0; chunk < u.end; chunk += kChunk) {
        Tile tiles[kChunk / kSlots];
        uint32_t any[kChunk / kSlots];
        int64_t n = 0;
        bool ragged = false;  // some row does not see some slot that another sees
        for (int64_t pos = chunk; pos < smaller(chunk + kChunk, u.end); pos += kSlots) {
            uint32_t bits = 0, common = ~0u;
            for (int64_t p = 0; p < positions; ++p) {
                const uint32_t seen = a.spec.visible32(u.begin + p, pos);
                bits |= seen, common &= seen;
            }
            if (!bits) continue;
            ragged |= bits != common;
            any[n] = bits;
            tiles[n++] = walk.tile(pos, u.head);
            // A key counts as read where it is first seen: by the first unit, or by the unit at its own position.
            for (uint32_t left = bits; left; left &= left - 1)
                read += u.begin == first || pos + __builtin_ctz(left) >= u.begin;
        }
        if (!n) continue;
        for (int64_t i = 0; i < n; ++i) {
            stage_keys<C>(a, tiles[i], any[i], x);
            score_rows<C, kScoreRows>(x, 0, rows, depth, i * kSlots);
            stage_values<C>(a, tiles[i], any[i], i, x);
            if constexpr (C == Codec::Int8) stage_scales(a, tiles[i], any[i], i, x.k_scale, x.v_scale);
        }
        uint32_t seen[kChunk / kSlots];
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t i = 0; i < n; ++i) seen[i] = a.spec.visible32(u.begin + r / group, tiles[i].pos);
            const Piece one =
                softmax<C>(x.s + r * kChunk, seen, n, x.k_scale, x.v_scale, x.p + r * kChunk * a_bytes<C>());
            piece.m[r] = one.m, piece.l[r] = one.l;
        }
        if (!ragged || finite_values<C>(x, n, depth)) {
            value_rows<C>(x, 0, rows, depth, n);
        } else {  // 0 x NaN is NaN: a value that is not finite reaches only the rows that see it
            for (int64_t r = 0; r < rows; ++r) {
                for (int64_t i = 0; i < n; ++i)
                    stage_values<C>(a, tiles[i], a.spec.visible32(u.begin + r / group, tiles[i].pos), i, x);
                value_rows<C>(x, r, 1, depth, n);
            }
        }
        absorb(total, x.o, piece, x.part, depth, rows, depth);
    }
    for (int64_t i = 0; i < rows; ++i)
        finish(total.l[i], x.o + i * depth, s.dim,
               a.out + (row0 + i / group) * a.out_stride + (u.head * group + i % group) * s.dim);
    return read * row_bytes(s);
}

int64_t decode_any(const AttentionArgs& a, const Unit& u, float* partials, uint8_t* scratch) {
    switch (a.store.codec) {
        case Codec::F32:
            return decode<Codec::F32>(a, u, partials, scratch);
        case Codec::F16:
            return decode<Codec::F16>(a, u, partials, scratch);
        case Codec::BF16:
            return decode<Codec::BF16>(a, u, partials, scratch);
        case Codec::Int8:
            return decode<Codec::Int8>(a, u, partials, scratch);
    }
    return 0;
}

int64_t prefill_any(const AttentionArgs& a, const Unit& u, uint8_t* scratch) {
    switch (a.store.codec) {
        case Codec::F32:
            return prefill<Codec::F32>(a, u, scratch);
        case Codec::F16:
            return prefill<Codec::F16>(a, u, scratch);
        case Codec::BF16:
            return prefill<Codec::BF16>(a, u, scratch);
        case Codec::Int8:
            return prefill<Codec::Int8>(a, u, scratch);
    }
    return 0;
}

}  // namespace

extern const Attention attention;
const Attention attention = {decode_any, merge, prefill_any};

}  // namespace kvarn::KVARN_ISA
