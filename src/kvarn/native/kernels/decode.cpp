// Decode: attention of one query position of a sequence, for some stored heads, over one chunk of
// keys. Scores first, then softmax and outputs: the first phase depends on the codec of K, the second
// on that of V. Cells are read tile by tile, and within a tile head by head, which is the order of
// memory.
#include <type_traits>

#include "attention.hpp"
#include "in_place.hpp"
#include "integer_outputs.hpp"
#include "products.hpp"
#include "softmax.hpp"
#include "stage.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr int64_t kPrefetchTiles = 4;  // of plain cells
constexpr int32_t kPrefetchAhead = 8;  // of integers; 6 to 16 are equally good on Zen 4

struct Job {  // what both phases of a work item read
    const AttentionArgs& a;
    const WorkItem& item;
    const StoreView& s;
    Scratch x;
    int64_t group, rows, width;
    Tile tiles[kChunk / kSlots], next[kChunk / kSlots];  // of the next chunk: as many as are prefetched
    uint32_t seen[kChunk / kSlots];
    int64_t n = 0;  // tiles that the query sees

    Job(const AttentionArgs& args, const WorkItem& work, uint8_t* memory)
        : a(args),
          item(work),
          s(args.store),
          x(carve<Carver>(memory, s.dim)),
          group(a.spec.n_heads / s.n_heads),
          rows(item.heads * group),
          width(s.width()) {
        const int64_t q_pos = a.table.kv_len[item.seq] - 1;
        Walk walk(a, item.seq, OwnTile::of_tail(a, item.seq, q_pos));
        for (int64_t pos = item.begin; pos < item.end; pos += kSlots) {
            seen[n] = a.spec.visible32(q_pos, q_pos, pos);
            if (!seen[n]) continue;
            tiles[n] = walk.tile(pos, item.head);
            ++n;
        }
        for (int64_t i = 0; i < n && i * item.heads < kPrefetchAhead; ++i)
            next[i] = walk.tile(item.begin + kChunk + i * kSlots, item.head);
    }

    int64_t bytes_read() const {
        int64_t bytes = 0;
        for (int64_t i = 0; i < n; ++i)
            bytes +=
                __builtin_popcount(seen[i]) * (tiles[i].k.view->row_bytes(s.dim) + tiles[i].v.view->row_bytes(s.dim));
        return bytes * item.heads;
    }

    // The cells that are read kPrefetchTiles after those of tile i and head h; values follow keys. Or
    // memory that is in the cache anyway, if cells are not to be prefetched.
    const uint8_t* next_cells(int64_t i, int64_t h, bool values) const {
        if (!a.prefetch) return x.k;
        const int64_t all = n * item.heads, j = i * item.heads + h + (values ? all : 0);
        const int64_t next = smaller(j + kPrefetchTiles, 2 * all - 1), head = next % item.heads;
        const Tile& t = tiles[next % all / item.heads];
        const auto at = [&](const TileCells& c) {
            return c.half[0] ? c.half[0] + head * c.view->strides.head * cell_bytes(c.view->codec) : x.k;
        };
        return next < all ? at(t.k) : at(t.v);
    }
};

// Prefetches the cells and scales that a phase reads kPrefetchAhead tiles and heads later: keys, then values,
// then keys of the next chunk, which is usually this thread's next item.
class Ahead {
  public:
    Ahead(const Job& job, bool values)
        : job_(job), values_(values), tile_(kPrefetchAhead / job.item.heads), head_(kPrefetchAhead % job.item.heads) {
        if (head_) find();
        t_.advance(head_);
    }

    KVARN_INLINE void prefetch() {
        if (!head_) find();
        if (t_.half[0]) {
            for (int64_t at = 0; at < cells_; at += 64) prefetch_l2(t_.half[0] + at);
            for (int64_t at = 0; at < scales_; at += 64) prefetch_l1(t_.scale[0] + at);
        }
        if (++head_ == job_.item.heads)
            head_ = 0, ++tile_;
        else
            t_.advance(1);
    }

  private:
    const Job& job_;
    bool values_;
    int64_t tile_, head_, cells_ = 0, scales_ = 0;  // bytes of a tile of one head
    TileCells t_{};

    void find() {
        const bool later = tile_ >= job_.n;  // than this phase
        const int64_t i = later ? tile_ - job_.n : tile_;
        t_ = {};
        if (i >= job_.n) return;
        const Tile& whole = later && values_ ? job_.next[i] : job_.tiles[i];
        t_ = later == values_ ? whole.k : whole.v;
        const Codec codec = t_.view->codec;
        cells_ = kSlots * cells_of(codec, job_.s.dim) * cell_bytes(codec);
        scales_ = kSlots * scales_of(codec, job_.s.dim) * scale_bytes(codec);
    }
};

template <typename K>
void key_phase(const Job& job) {
    const StoreView& s = job.s;
    const Scratch& x = job.x;
    const int64_t group = job.group, depth = K::depth(s.dim);
    const float* q = job.a.q + job.a.table.q_start[job.item.seq] * job.a.q_stride + job.item.head * group * s.dim;
    for (int64_t r = 0; r < job.rows && !job.a.same_query; ++r)
        stage_query<K>(q + r * s.dim, s.dim, job.a.scale * kLog2e, x.q + r * depth * K::number_bytes);
    for (int64_t i = 0; i < job.n; ++i) {
        Tile t = job.tiles[i];
        for (int64_t h = 0; h < job.item.heads; ++h, t.k.advance(1)) {
            float* scores = x.s + h * group * kChunk + i * kSlots;
            if (keys_in_place<K>(s, t)) {
                score_in_place<K>(s, t, x, h * group, group, i * kSlots, job.next_cells(i, h, false));
            } else {
                stage_keys<K>(s, t, job.seen[i], 0, x);
                score_rows<K, kDecodeRows>(x.q + h * group * depth * K::number_bytes, group, depth, x.k, scores);
            }
        }
    }
}

// out: (m, l, O) of each row.
template <typename V>
void value_phase(const Job& job, float* out) {
    const Scratch& x = job.x;
    const int64_t group = job.group, width = job.width, stride = 2 + width;
    for (int64_t r = 0; r < job.rows; ++r) {
        const MaxSum chunk = softmax<V>(x.s + r * kChunk, job.seen, job.n, x.p + r * V::weight_bytes(width));
        out[r * stride] = chunk.m, out[r * stride + 1] = chunk.l;
    }
    if (values_readable(job.s)) {
        clear(x.part, job.rows * width);
        for (int64_t i = 0; i < job.n; ++i) {
            Tile t = job.tiles[i];
            for (int64_t h = 0; h < job.item.heads; ++h, t.v.advance(1))
                add_in_place<V>(job.s, t, job.seen[i], i, x, h * group, group, job.next_cells(i, h, true));
        }
        for (int64_t r = 0; r < job.rows; ++r) in_order<V>(x.part + r * width, job.s.dim, out + 2 + r * stride);
        return;
    }
    for (int64_t h = 0; h < job.item.heads; ++h) {
        for (int64_t i = 0; i < job.n; ++i) {
            Tile t = job.tiles[i];
            t.v.advance(h);
            stage_values<V>(job.s, t, job.seen[i], i, x);
        }
        value_rows<V>(x.p + h * group * kChunk * V::number_bytes, group, x.v, width, job.n, x.part + h * group * width);
    }
    for (int64_t r = 0; r < job.rows; ++r) memcpy(out + 2 + r * stride, x.part + r * width, size_t(width) * 4);
}

template <typename K>
    requires std::is_same_v<K, Integers<K::blocks>>
void key_phase(const Job& job) {
    const int64_t dim = job.s.dim, group = job.group, row = K::query_bytes(dim), spans = K::spans(K::depth(dim));
    const Scratch& x = job.x;
    const float* q = job.a.q + job.a.table.q_start[job.item.seq] * job.a.q_stride + job.item.head * group * dim;
    for (int64_t r = 0; r < job.rows && !job.a.same_query; ++r)
        stage_integer_query<K>(q + r * dim, dim, job.a.scale * kLog2e, x.q + r * row);
    Ahead ahead(job, false);
    for (int64_t i = 0; i < job.n; ++i) {
        TileCells t = job.tiles[i].k;
        for (int64_t h = 0; h < job.item.heads; ++h, t.advance(1)) {
            ahead.prefetch();
            stage_factors(t, job.seen[i], spans, kSlots, x.k_scale);
            with_keys<K::blocks>(t, dim, x.k, [&](const auto& keys) {
                integer_score_rows<K, kDecodeRows>(x.q + h * group * row, group, dim, keys, x.k_scale,
                                                   x.s + h * group * kChunk + i * kSlots);
            });
        }
    }
}

template <typename V>
    requires std::is_same_v<V, Integers<V::blocks>>
void value_phase(const Job& job, float* out) {
    const Scratch& x = job.x;
    const int64_t width = job.width, stride = 2 + width, group = job.group, spans = V::spans(width);
    for (int64_t h = 0; h < job.item.heads; ++h) {
        for (int64_t i = 0; i < job.n; ++i) {
            TileCells t = job.tiles[i].v;
            t.advance(h);
            stage_factors(t, job.seen[i], spans, kChunk, x.v_scale + i * kSlots);
        }
        int64_t r = h * group;
        const int64_t end = r + group, row = V::weight_bytes(width);
        const auto soften = [&]<int R>() {
            for (MaxSum found[R]; r + R <= end; r += R) {
                integer_softmax<V, R>(x.s + r * kChunk, job.seen, job.n, x.v_scale, spans, x.p + r * row, row, found);
                for (int i = 0; i < R; ++i) out[(r + i) * stride] = found[i].m, out[(r + i) * stride + 1] = found[i].l;
            }
        };
        soften.template operator()<3>(), soften.template operator()<2>(), soften.template operator()<1>();
    }
    clear(x.part, job.rows * width);
    Ahead ahead(job, true);
    for (int64_t i = 0; i < job.n; ++i) {
        TileCells t = job.tiles[i].v;
        for (int64_t h = 0; h < job.item.heads; ++h, t.advance(1)) {
            ahead.prefetch();
            with_values_of<V, true>(t, job.s.dim, width, x.v, [&](const auto& values) {
                integer_add_rows<V>(x.p + h * group * V::weight_bytes(width), group, i, values,
                                    x.part + h * group * width, width);
            });
        }
    }
    for (int64_t r = 0; r < job.rows; ++r) integer_in_order<V>(x.part + r * width, width, out + 2 + r * stride);
}

template <SumOrder O, typename Fn>
void with_codec(Codec codec, Fn&& fn) {  // decode is limited by memory, so it does not use AMX
    switch (codec) {
        case Codec::F32:
            return fn(Arithmetic<Codec::F32, O, Engine::Vector>());
        case Codec::F16:
            return fn(Arithmetic<Codec::F16, O, Engine::Vector>());
        case Codec::BF16:
            return fn(Arithmetic<Codec::BF16, O, Engine::Vector>());
        case Codec::Int8:
            return fn(Integers<false>());
        case Codec::Int4:
        case Codec::Int6:
            return fn(Integers<true>());
    }
}

}  // namespace

void merge(const AttentionArgs& a, const WorkItem* items, const Merge& m, const float* partials) {
    const StoreView& s = a.store;
    const int64_t group = a.spec.n_heads / s.n_heads, width = s.width(), stride = 2 + width;
    const WorkItem* item = items + m.first;
    float o[kMaxQueryGroup * kMaxHeadDim];
    float* out = a.out + a.table.q_start[m.seq] * a.out_stride + m.head * group * s.dim;
    Totals total(group), fresh(group);
    clear(o, group * width);
    for (int64_t i = 0; i < m.n; ++i) {
        const float* part = partials + item[i].partial + (m.head - item[i].head) * group * stride;
        for (int64_t r = 0; r < group; ++r) fresh.m[r] = part[r * stride], fresh.l[r] = part[r * stride + 1];
        absorb(total.m, total.l, o, fresh, part + 2, stride, group, width);
    }
    for (int64_t r = 0; r < group; ++r) finish_row(s, total.l[r], o + r * width, out + r * s.dim);
}

template <SumOrder O>
int64_t decode(const AttentionArgs& a, const WorkItem& item, float* partials, uint8_t* memory) {
    const Job job(a, item, memory);
    with_codec<O>(a.store.k.codec, [&](auto k) { key_phase<decltype(k)>(job); });
    with_codec<O>(a.store.v.codec, [&](auto v) { value_phase<decltype(v)>(job, partials + item.partial); });
    for (int64_t h = 0; h < item.heads && item.whole; ++h)
        merge(a, &item, {0, 1, item.seq, int32_t(item.head + h)}, partials);
    return job.bytes_read();
}

template int64_t decode<SumOrder::Pairs>(const AttentionArgs&, const WorkItem&, float*, uint8_t*);
template int64_t decode<SumOrder::Tiles>(const AttentionArgs&, const WorkItem&, float*, uint8_t*);

}  // namespace kvarn::KVARN_ISA
