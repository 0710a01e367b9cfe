// Prefill: attention of some query positions of a sequence, for one stored head, over all keys, chunk
// by chunk. The tiles of a chunk are staged once for all rows.
#include <type_traits>
#include <utility>

#include "amx_attention.hpp"
#include "attention.hpp"
#include "integer_outputs.hpp"
#include "products.hpp"
#include "softmax.hpp"
#include "stage.hpp"

namespace kvarn::KVARN_ISA {
namespace {

bool all_finite(const float* x, int64_t n) {
    F sum = zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        const F v = load(x + i);
        sum = add(sum, sub(v, v));
    }
    return reduce_add(sum) == 0.0f;
}

template <typename V>
bool finite_values(const uint8_t* v, int64_t n) {  // n staged numbers
    if constexpr (!V::pairs) return all_finite(reinterpret_cast<const float*>(v), n);
    const auto* p = reinterpret_cast<const uint16_t*>(v);
    F sum = zero();
    for (int64_t i = 0; i < n; i += 2 * kLanes) {
        const F e = even_bf16(p + i), o = odd_bf16(p + i);
        sum = add(sum, add(sub(e, e), sub(o, o)));
    }
    return reduce_add(sum) == 0.0f;
}

// x.s[row][n * 32]: scores of some rows of q with n staged tiles.
template <typename K>
void score_tiles(const uint8_t* q, int64_t rows, int64_t dim, int64_t n, const Scratch& x) {
    const int64_t depth = K::depth(dim);
#if defined(KVARN_AMX)
    if constexpr (K::amx) amx_scores(q, depth, x.k, n, x.s);
#endif
    for (int64_t i = 0; i < n && !K::amx; ++i)
        score_rows<K, kScoreRows>(q, rows, depth, x.k + i * kSlots * depth * K::number_bytes, x.s + i * kSlots);
}

// Softmax of rows that see all slots, several rows side by side. Returns how many of them it did.
template <typename V>
int64_t soften_whole(const Scratch& x, int64_t rows, int64_t n, Totals& out) {
    int64_t r = 0;
    for (constexpr int R = V::amx ? 4 : 3; r + R <= rows; r += R)
        softmax_whole<V, R>(x.s + r * kChunk, n, x.p + r * V::weight_bytes(0), out.m + r, out.l + r);
    return r;
}

template <typename V>
MaxSum soften(const Scratch& x, int64_t r, const uint32_t* seen, int64_t n, int64_t width) {
    return softmax<V>(x.s + r * kChunk, seen, n, x.p + r * V::weight_bytes(width));
}

// out[row][width]: outputs of some rows of p with n staged tiles.
template <typename V>
void output_rows(const uint8_t* p, int64_t rows, const uint8_t* tiles, int64_t width, int64_t n, float* out) {
#if defined(KVARN_AMX)
    if constexpr (V::amx) return amx_values(p, tiles, width, n, out);
#endif
    value_rows<V>(p, rows, tiles, width, n, out);
}

// -- the same for cells of integers

I as_signed(I u, int offset) { return add_bytes(words_left<1>(u), -offset); }

template <typename K>
void stage_integer_keys(const StoreView& s, const Tile& t, uint32_t seen, int64_t index, const Scratch& x) {
    const int64_t depth = K::depth(s.dim), spans = K::spans(depth);
    stage_factors(t.k, seen, spans, kSlots, x.k_scale + index * spans * kSlots);
    uint8_t* out = x.k + index * kSlots * depth;
    with_keys<K::blocks>(t.k, s.dim, reinterpret_cast<uint8_t*>(x.rows), [&](const auto& keys) {
        using Reader = std::remove_cvref_t<decltype(keys)>;
        for (int64_t g = 0; g < depth / kRotated; ++g)
            each_word([&]<int W>() {
                for (int h = 0; h < 2; ++h) {
                    I low, high;
                    keys.template read<W>(g, h, low, high);
                    if constexpr (Reader::offset != 0)
                        low = as_signed(low, Reader::offset - kKeyBias),
                        high = as_signed(high, Reader::offset - kKeyBias);
                    uint8_t* to = out + (g * kRotated + Reader::first * W) * kSlots + 64 * h;
                    store_words(to, low), store_words(to + Reader::second * kSlots, high);
                }
            });
    });
}

struct StagedKeys {
    static constexpr int offset = 0, first = 8, second = 4;
    const uint8_t* at;

    template <int W>
    void read(int64_t g, int half, I& low, I& high) const {
        const uint8_t* from = at + (g * kRotated + first * W) * kSlots + 64 * half;
        low = load_words(from), high = load_words(from + second * kSlots);
    }
};

template <typename V>
void stage_integer_values(const StoreView& s, const Tile& t, uint32_t seen, int64_t index, const Scratch& x) {
    const int64_t width = V::depth(s.dim);
    stage_factors(t.v, seen, V::spans(width), kChunk, x.v_scale + index * kSlots);
    uint8_t* out = x.v + index * kSlots * width;
    with_values_of<V, false>(t.v, s.dim, width, reinterpret_cast<uint8_t*>(x.rows), [&](const auto& values) {
        using Reader = std::remove_cvref_t<decltype(values)>;
        constexpr int N = Reader::N;
        for (int64_t quad = 0; quad < kSlots / 4; ++quad)
            for (int64_t d = 0; d < width; d += N * kLanes) {
                I v[N];
                values.read(d, quad, v);
                for (int i = 0; i < N; ++i)
                    store_words(out + (quad * width + d + i * kLanes) * 4,
                                Reader::offset ? as_signed(v[i], Reader::offset) : v[i]);
            }
    });
}

template <typename K>
void score_integer_tiles(const uint8_t* q, int64_t rows, int64_t dim, int64_t n, const Scratch& x) {
    constexpr int kMost = K::blocks ? (kIntScoreRows + 1) / 2 : kIntScoreRows;  // sums of blocks need registers, too
    const int64_t depth = K::depth(dim), spans = K::spans(depth);
    for (int64_t i = 0; i < n; ++i)
        integer_score_rows<K, kMost>(q, rows, dim, StagedKeys{x.k + i * kSlots * depth}, x.k_scale + i * spans * kSlots,
                                     x.s + i * kSlots);
}

bool finite_integers(const uint8_t*, int64_t) { return true; }  // a factor that is not finite is the row's own

int64_t soften_none(const Scratch&, int64_t, int64_t, Totals&) { return 0; }

template <typename V>
MaxSum soften_integers(const Scratch& x, int64_t r, const uint32_t* seen, int64_t n, int64_t width) {
    MaxSum found;
    integer_softmax<V, 1>(x.s + r * kChunk, seen, n, x.v_scale, V::spans(width), x.p + r * V::weight_bytes(width), 0,
                          &found);
    return found;
}

template <typename V>
void output_integers(const uint8_t* p, int64_t rows, const uint8_t* tiles, int64_t width, int64_t n, float* out) {
    memset(out, 0, size_t(rows * width) * 4);
    for (int64_t i = 0; i < n; ++i) {
        const uint8_t* tile = tiles + i * kSlots * width;
        if (in_wide_order<V>(width))
            integer_add_rows<V>(p, rows, i, StagedQuads<kWide>{tile, width}, out, width);
        else
            integer_add_rows<V>(p, rows, i, StagedQuads<2>{tile, width}, out, width);
    }
    for (int64_t r = 0; r < rows; ++r) integer_in_order<V>(out + r * width, width, out + r * width);
}

// -- the kernels of each codec

struct Keys {  // of K
    bool amx;
    int64_t rows_at_once;
    int64_t (*query_bytes)(int64_t dim);
    void (*query)(const float* q, int64_t dim, float scale, uint8_t* out);
    void (*stage)(const StoreView&, const Tile&, uint32_t seen, int64_t index, const Scratch&);
    void (*score)(const uint8_t* q, int64_t rows, int64_t dim, int64_t n, const Scratch&);
};

struct Values {  // of V
    bool amx;
    int64_t rows_at_once;
    int64_t (*weight_bytes)(int64_t width);
    void (*stage)(const StoreView&, const Tile&, uint32_t seen, int64_t index, const Scratch&);
    bool (*finite)(const uint8_t* v, int64_t n);
    int64_t (*soften_whole)(const Scratch&, int64_t rows, int64_t n, Totals& out);
    MaxSum (*soften)(const Scratch&, int64_t row, const uint32_t* seen, int64_t n, int64_t width);
    void (*output)(const uint8_t* p, int64_t rows, const uint8_t* tiles, int64_t width, int64_t n, float* out);
};

template <typename K>
constexpr Keys kKeys{K::amx, K::rows_at_once, K::query_bytes, stage_query<K>, stage_keys<K>, score_tiles<K>};
template <bool B>
constexpr Keys kKeys<Integers<B>>{false,
                                  Integers<B>::rows_at_once,
                                  Integers<B>::query_bytes,
                                  stage_integer_query<Integers<B>>,
                                  stage_integer_keys<Integers<B>>,
                                  score_integer_tiles<Integers<B>>};
template <typename V>
constexpr Values kValues{V::amx,           V::rows_at_once, V::weight_bytes, stage_values<V>,
                         finite_values<V>, soften_whole<V>, soften<V>,       output_rows<V>};
template <bool B>
constexpr Values kValues<Integers<B>>{false,
                                      Integers<B>::rows_at_once,
                                      Integers<B>::weight_bytes,
                                      stage_integer_values<Integers<B>>,
                                      finite_integers,
                                      soften_none,
                                      soften_integers<Integers<B>>,
                                      output_integers<Integers<B>>};

#if defined(KVARN_AMX)
constexpr Engine kEngine = Engine::Amx;
#else
constexpr Engine kEngine = Engine::Vector;
#endif

template <SumOrder O>
constexpr Keys kKeysOf[] = {kKeys<Arithmetic<Codec::F32, O, kEngine>>,
                            kKeys<Arithmetic<Codec::F16, O, kEngine>>,
                            kKeys<Arithmetic<Codec::BF16, O, kEngine>>,
                            kKeys<Integers<false>>,
                            kKeys<Integers<true>>,
                            kKeys<Integers<true>>};
template <SumOrder O>
constexpr Values kValuesOf[] = {kValues<Arithmetic<Codec::F32, O, kEngine>>,
                                kValues<Arithmetic<Codec::F16, O, kEngine>>,
                                kValues<Arithmetic<Codec::BF16, O, kEngine>>,
                                kValues<Integers<false>>,
                                kValues<Integers<true>>,
                                kValues<Integers<true>>};

struct Chunk {  // the tiles of 256 keys that some row sees
    Tile tiles[kChunk / kSlots];
    uint32_t any[kChunk / kSlots];  // slots that some row sees
    uint32_t all[kChunk / kSlots];  // slots that every row sees
    int64_t n = 0;
    bool ragged = false;      // a slot is visible to some rows only
    bool whole = true;        // all rows see all slots
    bool row_by_row = false;  // a value that is not finite must only reach the rows that see it
};

class Prefill {
  public:
    Prefill(const AttentionArgs& args, const WorkItem& work, const Keys& k, const Values& v, uint8_t* memory)
        : a(args),
          item(work),
          keys(k),
          values(v),
          x(carve<Carver>(memory, args.store.dim)),
          group(a.spec.n_heads / a.store.n_heads),
          width(a.store.width()),
          rows((item.end - item.begin) * group),
          first(a.table.kv_len[item.seq] - (a.table.q_start[item.seq + 1] - a.table.q_start[item.seq])),
          row0(a.table.q_start[item.seq] + item.begin - first),
          walk(a, item.seq, OwnTile::of_step(a, item.seq, item.begin, first)),
          total(rows) {}

    int64_t run() {
        const int64_t dim = a.store.dim;
        for (int64_t i = 0; i < rows; ++i)
            keys.query(a.q + (row0 + i / group) * a.q_stride + (item.head * group + i % group) * dim, dim,
                       a.scale * kLog2e, x.q + i * keys.query_bytes(dim));
        memset(x.o, 0, size_t(rows * width) * 4);
        for (int64_t pos = 0; pos < item.end; pos += kChunk) attend_chunk(pos);
        for (int64_t i = 0; i < rows; ++i)
            finish_row(a.store, total.l[i], x.o + i * width,
                       a.out + (row0 + i / group) * a.out_stride + (item.head * group + i % group) * dim);
        return bytes_read();
    }

  private:
    // Where a codec has a tail, tiles before the last are read as cells, and those of the queries as int8
    // rows. The first item counts them.
    int64_t bytes_read() const {
        int64_t bytes = 0;
        const int64_t end = a.table.kv_len[item.seq], dim = a.store.dim;
        const Seen seen = a.spec.seen(first, end - 1);
        for (const auto& [cells, rows] : {std::pair{&a.store.k, &a.fresh.k}, std::pair{&a.store.v, &a.fresh.v}}) {
            if (!has_tail(cells->codec))
                bytes += read * cells->row_bytes(dim);
            else if (item.begin == first)
                bytes += seen.before((end - 1) / kSlots * kSlots) * cells->row_bytes(dim) +
                         (seen.before(end) - seen.before(first / kSlots * kSlots)) * rows->row_bytes(dim);
        }
        return bytes;
    }

    int64_t pos_of(int64_t row) const { return item.begin + row / group; }  // row i: position i / group, head i % group

    Chunk find_tiles(int64_t begin) {
        Chunk c;
        for (int64_t pos = begin; pos < smaller(begin + kChunk, item.end); pos += kSlots) {
            const uint32_t any = a.spec.visible32(item.begin, item.end - 1, pos);
            if (!any) continue;
            // The queries that see a slot are an interval, so all see what the first and the last
            // see.
            const uint32_t all = a.spec.visible32(item.begin, pos) & a.spec.visible32(item.end - 1, pos);
            c.ragged |= any != all;
            c.whole &= all == ~0u;
            c.any[c.n] = any, c.all[c.n] = all;
            c.tiles[c.n++] = walk.tile(pos, item.head);
            // A key is counted as read once: in the first item, or in the item of its own position.
            read += __builtin_popcount(item.begin == first ? any : any & ~SpecView::below(item.begin - pos));
        }
        c.whole &= !c.ragged;
        return c;
    }

    void attend_chunk(int64_t begin) {
        Chunk c = find_tiles(begin);
        if (!c.n) return;
        for (int64_t i = 0; i < c.n; ++i) {
            keys.stage(a.store, c.tiles[i], c.any[i], i, x);
            values.stage(a.store, c.tiles[i], c.any[i], i, x);
        }
        c.row_by_row = c.ragged && !values.finite(x.v, c.n * kSlots * width);
        const int64_t most = smaller(keys.rows_at_once, values.rows_at_once);
        for (int64_t from = 0; from < rows; from += most) attend_rows(c, from, smaller(rows - from, most));
    }

    // Few enough rows for their scores to stay in the cache.
    void attend_rows(const Chunk& c, int64_t from, int64_t some) {
        // Tiles up to the last one that some of these rows see; the others would add exact zeros.
        int64_t n = c.n;
        while (c.ragged && n > 0 && !a.spec.visible32(pos_of(from), pos_of(from + some - 1), c.tiles[n - 1].pos)) --n;
        if (!n) return;
        keys.score(x.q + from * keys.query_bytes(a.store.dim), some, a.store.dim, n, x);
        Totals fresh(some);
        uint32_t seen[kChunk / kSlots];
        for (int64_t r = c.whole ? values.soften_whole(x, some, n, fresh) : 0; r < some; ++r) {
            for (int64_t i = 0; i < n; ++i)
                seen[i] = c.ragged ? a.spec.visible32(pos_of(from + r), c.tiles[i].pos) : c.all[i];
            const MaxSum one = values.soften(x, r, seen, n, width);
            fresh.m[r] = one.m, fresh.l[r] = one.l;
        }
        if (!c.row_by_row) values.output(x.p, some, x.v, width, n, x.part);
        for (int64_t r = 0; c.row_by_row && r < some; ++r) {
            for (int64_t i = 0; i < n; ++i)  // 0 * NaN is NaN
                values.stage(a.store, c.tiles[i], a.spec.visible32(pos_of(from + r), c.tiles[i].pos), i, x);
            values.output(x.p + r * values.weight_bytes(width), 1, x.v, width, n, x.part + r * width);
        }
        absorb(total.m + from, total.l + from, x.o + from * width, fresh, x.part, width, some, width);
    }

    const AttentionArgs& a;
    const WorkItem& item;
    const Keys& keys;
    const Values& values;
    const Scratch x;
    const int64_t group, width, rows;
    const int64_t first, row0;  // position of the sequence's first query; row of the item's first query
    Walk walk;
    Totals total;
    int64_t read = 0;
};

}  // namespace

template <SumOrder O>
int64_t prefill(const AttentionArgs& a, const WorkItem& item, uint8_t* scratch) {
    const Keys& keys = kKeysOf<O>[int(a.store.k.codec)];
    const Values& values = kValuesOf<O>[int(a.store.v.codec)];
#if defined(KVARN_AMX)
    if (keys.amx || values.amx) {
        const UseTiles tiles(kWhole);
        return Prefill(a, item, keys, values, scratch).run();
    }
#endif
    return Prefill(a, item, keys, values, scratch).run();
}

template int64_t prefill<SumOrder::Pairs>(const AttentionArgs&, const WorkItem&, uint8_t*);
template int64_t prefill<SumOrder::Tiles>(const AttentionArgs&, const WorkItem&, uint8_t*);

}  // namespace kvarn::KVARN_ISA
