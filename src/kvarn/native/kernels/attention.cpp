// Attention over Store and Table, compiled once per instruction set. Prefill and decode give a row
// the same bits:
//
//   tiles       Keys are in tiles of 32 slots at absolute positions, tiles in chunks of 256. A
//               chunk gives (m, l, O), and chunks are merged in ascending order by one formula.
//               A tile that no query sees is skipped: it would add exact zeros.
//   sums        Scores: lanes are slots, summed over dims. l: lanes are slots mod 16. O: lanes are
//               dims, summed over slots. Scores and O use one of the two orders of ../isa.hpp.
//   types       bf16 and int8 cells: q and p are rounded to bf16, products are bf16, sums are f32;
//               int8 scales multiply scores and p. f16 and f32 cells: everything is f32.
//   visibility  The cell of a slot that a query does not see may hold anything: its score becomes
//               -inf, its p 0, and its V is staged as 0.
#include "amx_attention.hpp"
#include "in_place.hpp"
#include "products.hpp"

namespace kvarn::KVARN_ISA {
namespace {

// -- staging

template <Math C>
void stage_query(const float* q, int64_t dim, float scale, uint8_t* out) {  // scales q, so that scores need no scaling
    const int64_t depth = depth_of<C>(dim);
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
            if constexpr (pairs(C)) {
                memcpy(out + d * 2, narrow, sizeof narrow);
                continue;
            }
            x = load_bf16(narrow);
        }
        store(reinterpret_cast<float*>(out) + d, x);
    }
}

template <Math C>
void stage_keys(const AttentionArgs& a, const Tile& t, uint32_t seen, int64_t index, const Scratch& x) {
    uint8_t* out = x.k + index * kSlots * depth_of<C>(a.store.dim) * a_bytes<C>();
#if defined(__AVX512BF16__)
    if constexpr (pairs(C))
        return pair_columns<C>(t.k, a.store.ks, a.store.dim, seen, reinterpret_cast<uint16_t*>(out), x.rows);
#endif
    widen_columns<C>(t.k, a.store.ks, a.store.dim, seen, reinterpret_cast<float*>(out), x.rows);
}

template <Math C>
void stage_values(const AttentionArgs& a, const Tile& t, uint32_t seen, int64_t index, const Scratch& x) {
    const int64_t width = up(a.store.dim, 16);
    uint8_t* out = x.v + index * kSlots * width * a_bytes<C>();
#if defined(__AVX512BF16__)
    if constexpr (pairs(C))
        return pair_rows<C>(t.v, a.store.vs, a.store.dim, seen, reinterpret_cast<uint16_t*>(out), x.rows);
#endif
    widen_rows<C>(t.v, a.store.vs, a.store.dim, seen, reinterpret_cast<float*>(out), width);
}

void stage_scales(const AttentionArgs& a, const Tile& t, uint32_t seen, int64_t index, float* k_scale, float* v_scale) {
    if (seen == ~0u && a.store.k_scales.slot == 1 && a.store.v_scales.slot == 1) {
        for (int h = 0; h < 2; ++h) {
            store(k_scale + index * kSlots + 16 * h, load(t.k_scale[h]));
            store(v_scale + index * kSlots + 16 * h, load(t.v_scale[h]));
        }
        return;
    }
    for (int s = 0; s < int(kSlots); ++s) {
        const bool there = (seen >> s) & 1u;
        k_scale[index * kSlots + s] = there ? t.k_scale[s / 16][(s % 16) * a.store.k_scales.slot] : 0.0f;
        v_scale[index * kSlots + s] = there ? t.v_scale[s / 16][(s % 16) * a.store.v_scales.slot] : 0.0f;
    }
}

// s[row][32]: scores of some rows of q with one staged tile.
template <Math C, int kMost>
void score_rows(const uint8_t* q, int64_t rows, int64_t depth, const uint8_t* tile, float* s) {
    int64_t r = 0;
    const auto at = [&](int64_t row) { return q + row * depth * a_bytes<C>(); };
    for (; r + kMost <= rows; r += kMost) scores<C, kMost>(at(r), depth, tile, s + r * kChunk, kChunk);
    if constexpr (kMost > 4)
        for (; r + 4 <= rows; r += 4) scores<C, 4>(at(r), depth, tile, s + r * kChunk, kChunk);
    for (; r < rows; ++r) scores<C, 1>(at(r), depth, tile, s + r * kChunk, kChunk);
}

// out[row][width]: outputs of some rows of p with n staged tiles.
template <Math C>
void value_rows(const uint8_t* p, int64_t rows, const uint8_t* tiles, int64_t width, int64_t n, float* out) {
#if defined(KVARN_AMX)
    if constexpr (on_amx(C)) return amx_values(p, tiles, width, n, out);
#endif
    int64_t r = 0;
    const auto at = [&](int64_t row) { return p + row * kChunk * a_bytes<C>(); };
    for (; r + kValueRows <= rows; r += kValueRows)
        values_rows<C, kValueRows>(at(r), kChunk, tiles, width, n, out + r * width, width);
    if constexpr (kValueRows > 2)
        for (; r + 2 <= rows; r += 2) values_rows<C, 2>(at(r), kChunk, tiles, width, n, out + r * width, width);
    for (; r < rows; ++r) values_rows<C, 1>(at(r), kChunk, tiles, width, n, out + r * width, width);
}

int64_t count(uint32_t bits) { return __builtin_popcount(bits); }

void merge(const AttentionArgs& a, const WorkItem* items, const Merge& m, const float* partials) {
    const StoreView& s = a.store;
    const int64_t group = a.spec.n_heads / s.n_heads, width = up(s.dim, 16), stride = 2 + width;
    const WorkItem* item = items + m.first;
    float o[kMaxQueryGroup * kMaxHeadDim];
    float* out = a.out + a.table.q_start[m.seq] * a.out_stride + m.head * group * s.dim;
    Totals total(group), fresh(group);
    memset(o, 0, size_t(group * width) * 4);
    for (int64_t i = 0; i < m.n; ++i) {
        const float* part = partials + item[i].partial + (m.head - item[i].head) * group * stride;
        for (int64_t r = 0; r < group; ++r) fresh.m[r] = part[r * stride], fresh.l[r] = part[r * stride + 1];
        absorb(total.m, total.l, o, fresh, part + 2, stride, group, width);
    }
    for (int64_t r = 0; r < group; ++r) finish(total.l[r], o + r * width, s.dim, out + r * s.dim);
}

// -- decode: one position, some stored heads, one chunk

constexpr int64_t kPrefetchTiles = 4;

template <Math C>
int64_t decode(const AttentionArgs& a, const WorkItem& item, float* partials, uint8_t* memory) {
    const StoreView& s = a.store;
    const int64_t group = a.spec.n_heads / s.n_heads, rows = item.heads * group;
    const int64_t depth = depth_of<C>(s.dim), width = up(s.dim, 16);
    const int64_t q_pos = a.table.kv_len[item.seq] - 1;
    const Scratch x = carve<Carver>(memory, s.dim);
    const float* q = a.q + a.table.q_start[item.seq] * a.q_stride + item.head * group * s.dim;
    for (int64_t r = 0; r < rows; ++r)
        stage_query<C>(q + r * s.dim, s.dim, a.scale * kLog2e, x.q + r * depth * a_bytes<C>());

    Walk walk(a, item.seq);
    Tile tiles[kChunk / kSlots];
    uint32_t seen[kChunk / kSlots];
    int64_t n = 0, read = 0;
    for (int64_t pos = item.begin; pos < item.end; pos += kSlots) {
        const uint32_t bits = a.spec.visible32(q_pos, pos);
        if (!bits) continue;
        seen[n] = bits;
        read += count(bits);
        tiles[n++] = walk.tile(pos, item.head);
    }
    const auto next_cells = [&](int64_t j, bool values) {  // the cells that are read kPrefetchTiles after tile j
        const int64_t all = n * item.heads, next = smaller(j + kPrefetchTiles + (values ? all : 0), 2 * all - 1);
        const bool v = next >= all;
        const Tile& t = tiles[next % all / item.heads];
        const uint8_t* cells = v ? t.v[0] : t.k[0];
        return cells ? cells + next % item.heads * (v ? s.vs : s.ks).head * cell_bytes(s.codec) : x.k;
    };
    for (int64_t i = 0; i < n; ++i)
        for (int64_t h = 0; h < item.heads; ++h) {
            const Tile t = of_head(s, tiles[i], h);
            if constexpr (codec(C) == Codec::Int8)
                stage_scales(a, t, seen[i], i, x.k_scale + h * kChunk, x.v_scale + h * kChunk);
            if (keys_in_place<C>(s, t)) {
                decode_scores<C>(s, t, x, h * group, group, depth, i * kSlots, next_cells(i * item.heads + h, false));
            } else {
                stage_keys<C>(a, t, seen[i], 0, x);
                score_rows<C, kDecodeRows>(x.q + h * group * depth * a_bytes<C>(), group, depth, x.k,
                                           x.s + h * group * kChunk + i * kSlots);
            }
        }
    float* out = partials + item.partial;
    const int64_t stride = 2 + width;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t h = r / group * kChunk;
        const MaxSum chunk =
            softmax<C>(x.s + r * kChunk, seen, n, x.k_scale + h, x.v_scale + h, x.p + r * kChunk * a_bytes<C>());
        out[r * stride] = chunk.m, out[r * stride + 1] = chunk.l;
    }
    if (values_readable<C>(s)) {
        memset(x.part, 0, size_t(rows * width) * 4);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t h = 0; h < item.heads; ++h)
                decode_values<C>(a, of_head(s, tiles[i], h), seen[i], i, x, h * group, group, width,
                                 next_cells(i * item.heads + h, true));
        for (int64_t r = 0; r < rows; ++r) in_order<C>(x.part + r * width, s.dim, out + 2 + r * stride);
    } else {
        for (int64_t h = 0; h < item.heads; ++h) {
            for (int64_t i = 0; i < n; ++i) stage_values<C>(a, of_head(s, tiles[i], h), seen[i], i, x);
            value_rows<C>(x.p + h * group * kChunk * a_bytes<C>(), group, x.v, width, n, x.part + h * group * width);
        }
        for (int64_t r = 0; r < rows; ++r) memcpy(out + 2 + r * stride, x.part + r * width, size_t(width) * 4);
    }
    for (int64_t h = 0; h < item.heads && item.whole; ++h)
        merge(a, &item, {0, 1, item.seq, int32_t(item.head + h)}, partials);
    return read * item.heads * s.slot_bytes();
}

// -- prefill: some positions, one stored head, all keys

bool all_finite(const float* x, int64_t n) {
    F sum = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        const F v = load(x + i);
        sum = add(sum, sub(v, v));
    }
    return reduce_add(sum) == 0.0f;
}

template <Math C>
bool finite_values(const Scratch& x, int64_t n, int64_t width) {
    if constexpr (codec(C) == Codec::Int8) return true;
    if constexpr (!pairs(C)) return all_finite(reinterpret_cast<const float*>(x.v), n * kSlots * width);
    const auto* p = reinterpret_cast<const uint16_t*>(x.v);
    F sum = zero();
    for (int64_t i = 0; i < n * kSlots * width; i += 2 * kLanes) {
        const F e = even_bf16(p + i), o = odd_bf16(p + i);
        sum = add(sum, add(sub(e, e), sub(o, o)));
    }
    return reduce_add(sum) == 0.0f;
}

template <Math C>
int64_t prefill(const AttentionArgs& a, const WorkItem& item, uint8_t* memory) {
    const StoreView& s = a.store;
    const int64_t group = a.spec.n_heads / s.n_heads, depth = depth_of<C>(s.dim), width = up(s.dim, 16);
    const int64_t positions = item.end - item.begin, rows = positions * group;
    const int64_t first = a.table.kv_len[item.seq] - (a.table.q_start[item.seq + 1] - a.table.q_start[item.seq]);
    const int64_t row0 = a.table.q_start[item.seq] + item.begin - first;
    const Scratch x = carve<Carver>(memory, s.dim);
    for (int64_t i = 0; i < rows; ++i)  // row i: position i / group, head i % group
        stage_query<C>(a.q + (row0 + i / group) * a.q_stride + (item.head * group + i % group) * s.dim, s.dim,
                       a.scale * kLog2e, x.q + i * depth * a_bytes<C>());
    Totals total(rows);
    memset(x.o, 0, size_t(rows * width) * 4);

    Walk walk(a, item.seq);
    int64_t read = 0;
    for (int64_t chunk = 0; chunk < item.end; chunk += kChunk) {
        Tile tiles[kChunk / kSlots];
        uint32_t any[kChunk / kSlots], seen[kChunk / kSlots];
        int64_t n = 0;
        bool ragged = false;  // a slot is visible to some rows only
        for (int64_t pos = chunk; pos < smaller(chunk + kChunk, item.end); pos += kSlots) {
            const uint32_t bits = a.spec.visible32(item.begin, item.end - 1, pos);
            if (!bits) continue;
            // The queries that see a slot are an interval, so all see what the first and the last
            // see.
            seen[n] = a.spec.visible32(item.begin, pos) & a.spec.visible32(item.end - 1, pos);
            ragged |= bits != seen[n];
            any[n] = bits;
            tiles[n++] = walk.tile(pos, item.head);
            // A key is counted as read once: in the first item, or in the item of its own position.
            read += count(item.begin == first ? bits : bits & ~SpecView::below(item.begin - pos));
        }
        if (!n) continue;
        for (int64_t i = 0; i < n; ++i) {
            stage_keys<C>(a, tiles[i], any[i], i, x);
            stage_values<C>(a, tiles[i], any[i], i, x);
            if constexpr (codec(C) == Codec::Int8) stage_scales(a, tiles[i], any[i], i, x.k_scale, x.v_scale);
        }
        bool whole = !ragged;  // all rows see all slots
        for (int64_t i = 0; i < n; ++i) whole = whole && seen[i] == ~0u;
        const bool row_by_row = ragged && !finite_values<C>(x, n, width);
        // Few enough rows at a time for their scores to stay in the cache.
        for (int64_t from = 0; from < rows; from += kRowsAtOnce<C>) {
            const int64_t some = smaller(rows - from, kRowsAtOnce<C>);
            const int64_t first_pos = item.begin + from / group, last_pos = item.begin + (from + some - 1) / group;
            // Tiles up to the last one that some of these rows see; the others would add exact zeros.
            int64_t reach = n;
            while (ragged && reach > 0 && !a.spec.visible32(first_pos, last_pos, tiles[reach - 1].pos)) --reach;
            if (!reach) continue;
            const uint8_t* q = x.q + from * depth * a_bytes<C>();
#if defined(KVARN_AMX)
            if constexpr (on_amx(C)) amx_scores(q, depth, x.k, reach, x.s);
#endif
            if constexpr (!on_amx(C))
                for (int64_t i = 0; i < reach; ++i)
                    score_rows<C, kScoreRows>(q, some, depth, x.k + i * kSlots * depth * a_bytes<C>(),
                                              x.s + i * kSlots);
            Totals fresh(some);
            int64_t r = 0;
            if constexpr (codec(C) != Codec::Int8)
                for (constexpr int R = on_amx(C) ? 4 : 3; whole && r + R <= some; r += R)
                    softmax_whole<C, R>(x.s + r * kChunk, reach, x.p + r * kChunk * a_bytes<C>(), fresh.m + r,
                                        fresh.l + r);
            for (; r < some; ++r) {
                if (ragged)
                    for (int64_t i = 0; i < reach; ++i)
                        seen[i] = a.spec.visible32(item.begin + (from + r) / group, tiles[i].pos);
                const MaxSum one =
                    softmax<C>(x.s + r * kChunk, seen, reach, x.k_scale, x.v_scale, x.p + r * kChunk * a_bytes<C>());
                fresh.m[r] = one.m, fresh.l[r] = one.l;
            }
            if (!row_by_row) value_rows<C>(x.p, some, x.v, width, reach, x.part);
            for (r = 0; row_by_row && r < some; ++r) {
                // 0 * NaN is NaN: a value that is not finite must only reach the rows that see it.
                for (int64_t i = 0; i < reach; ++i)
                    stage_values<C>(a, tiles[i], a.spec.visible32(item.begin + (from + r) / group, tiles[i].pos), i, x);
                value_rows<C>(x.p + r * kChunk * a_bytes<C>(), 1, x.v, width, reach, x.part + r * width);
            }
            absorb(total.m + from, total.l + from, x.o + from * width, fresh, x.part, width, some, width);
        }
    }
    for (int64_t i = 0; i < rows; ++i)
        finish(total.l[i], x.o + i * width, s.dim,
               a.out + (row0 + i / group) * a.out_stride + (item.head * group + i % group) * s.dim);
    return read * s.slot_bytes();
}

template <Math C>
int64_t prefill_item(const AttentionArgs& a, const WorkItem& item, uint8_t* scratch) {
#if defined(KVARN_AMX)
    if constexpr (on_amx(C)) {
        const UseTiles tiles(kWhole);
        return prefill<C>(a, item, scratch);
    }
#endif
    return prefill<C>(a, item, scratch);
}

#if defined(KVARN_AMX)
constexpr Math kManyRows[] = {Math::AmxBF16, Math::AmxInt8};
#else
constexpr Math kManyRows[] = {Math::TiledBF16, Math::TiledInt8};
#endif

template <SumOrder O, bool kMany, typename Fn>
int64_t with_math(Codec c, Fn&& fn) {
    constexpr bool kTiled = O == SumOrder::Tiles;
    constexpr Math kBF16 = !kTiled ? Math::BF16 : kMany ? kManyRows[0] : Math::TiledBF16;
    constexpr Math kInt8 = !kTiled ? Math::Int8 : kMany ? kManyRows[1] : Math::TiledInt8;
    switch (c) {
        case Codec::F32:
            return fn.template operator()<Math::F32>();
        case Codec::F16:
            return fn.template operator()<Math::F16>();
        case Codec::BF16:
            return fn.template operator()<kBF16>();
        case Codec::Int8:
            return fn.template operator()<kInt8>();
    }
    return 0;
}

template <SumOrder O>
int64_t decode_any(const AttentionArgs& a, const WorkItem& item, float* partials, uint8_t* scratch) {
    return with_math<O, false>(a.store.codec, [&]<Math C>() { return decode<C>(a, item, partials, scratch); });
}

template <SumOrder O>
int64_t prefill_any(const AttentionArgs& a, const WorkItem& item, uint8_t* scratch) {
    return with_math<O, true>(a.store.codec, [&]<Math C>() { return prefill_item<C>(a, item, scratch); });
}

}  // namespace

extern const Attention attention[2];
const Attention attention[2] = {{decode_any<SumOrder::Pairs>, merge, prefill_any<SumOrder::Pairs>},
                                {decode_any<SumOrder::Tiles>, merge, prefill_any<SumOrder::Tiles>}};

}  // namespace kvarn::KVARN_ISA
