// The attention operation of a program, in four phases: write the keys and values of prefill tokens;
// finish their tiles, if a codec has a tail; compute the work items; merge the partial results of
// decode. A phase without work is skipped.
#include <algorithm>
#include <cstring>

#include "base.hpp"
#include "program.hpp"

namespace kvarn {

namespace {

constexpr int64_t kPrefetchBytes = 3 << 20;  // of cells that a thread prefetches for one attention, about

}  // namespace

int64_t Program::compute(Step& step, const AttentionOp& op, size_t phase, int thread) {
    const LayerView& layer = step.cache.layers[size_t(op.layer)];
    const GroupView& group = step.cache.groups[size_t(layer.group)];
    const AttentionWork& work = work_[size_t(layer.group)];
    Counted& counted = step.counted[size_t(thread)];
    const Part part = parts_[phase];
    if (part.part == kWriteRows)
        return each(phase, thread, [&](int64_t i) { write_row(step, op, work, work.rows[size_t(i)], thread); });
    if (part.part == kFinishTiles)
        return each(phase, thread, [&](int64_t i) { counted.written += writer(step, op).finish_tile(work, i); });

    const Buffer &q = buffers_[size_t(op.q)], &out = buffers_[size_t(op.out)];
    Own& own = own_[size_t(thread)];
    const AttentionArgs many{layer.store, group.table,   group.spec,
                             op.scale,    q.data.data(), row(op.out, 0),
                             q.stride,    out.stride,    writer(step, op).fresh};
    if (part.part == kMerge)
        return each(phase, thread, [&](int64_t i) {
            kernels_.attention->merge(many, work.decode.data(), work.merges[size_t(i)], partials_.data());
        });

    AttentionArgs one = many;  // a decode item has its query in the thread's own row
    one.q = own.q.data(), one.q_stride = 0, one.prefetch = step.prefetch.attention;
    const auto n_prefill = int64_t(work.prefill.size());
    const WorkItem* last = nullptr;  // the decode item before this one
    int64_t start = now();
    const int64_t computed = each(phase, thread, [&](int64_t i) {
        if (i == 0) counted.prefill += n_prefill > 0, counted.decode += !work.decode.empty();
        if (i < n_prefill) {
            counted.read += kernels_.attention->prefill(many, work.prefill[size_t(i)], own.scratch.data());
            last = nullptr;  // it overwrites the scratch
        } else {
            const WorkItem& item = work.decode[size_t(i - n_prefill)];
            one.same_query = last && last->seq == item.seq && last->head == item.head;
            begin_decode(step, op, item, thread, one.same_query);
            last = &item;
            counted.read += kernels_.attention->decode(one, item, partials_.data(), own.scratch.data());
        }
        const int64_t stop = now();
        (i < n_prefill ? counted.prefill_ns : counted.decode_ns) += stop - start;
        start = stop;
    });
    queue_prefetch(step, size_t(op.layer) + 1, thread, phases_->threads(phase));
    return computed;
}

// Lists the cells that this thread will read in the next attention, up to a limit; products of many
// rows prefetch them. One span is a panel's cells of all heads. A layout without panels has no
// spans that small, and is not prefetched.
void Program::queue_prefetch(Step& step, size_t index, int thread, int threads) {
    Own& own = own_[size_t(thread)];
    own.prefetch_spans.clear(), own.prefetch = {};
    if (index >= step.cache.layers.size() || !step.prefetch.products) return;
    const LayerView& layer = step.cache.layers[index];
    const TableView& table = step.cache.groups[size_t(layer.group)].table;
    const std::vector<WorkItem>& items = work_[size_t(layer.group)].decode;
    const StoreView& s = layer.store;
    // Spans have one size: that of the smaller of K and V.
    const int64_t bytes = s.panel_size * s.n_heads * std::min(s.k.row_bytes(s.dim), s.v.row_bytes(s.dim));
    const int64_t n = s.panel_size > kChunk ? 0 : int64_t(items.size());
    for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; ++i) {
        const WorkItem& item = items[size_t(i)];
        if (item.head > 0) continue;  // the item at head 0 already prefetches the whole panel
        const int32_t* blocks = table.blocks + item.seq * table.max_blocks;
        const int32_t* first = table.first + item.seq * table.max_blocks;
        for (const CellsView* cells : {&s.k, &s.v})
            for (int64_t b = 0; b < table.n_blocks[item.seq]; ++b) {
                const int64_t end = std::min(item.end - first[b], s.block_size);
                for (int64_t p = std::max<int64_t>(item.begin - first[b], 0) / s.panel_size; p * s.panel_size < end;
                     ++p)
                    own.prefetch_spans.push_back(cells->at(blocks[b], p * s.panel_size));
            }
        if (int64_t(own.prefetch_spans.size()) * bytes >= kPrefetchBytes) break;
    }
    own.prefetch.spans = own.prefetch_spans.data(), own.prefetch.n_spans = int64_t(own.prefetch_spans.size()),
    own.prefetch.span_bytes = bytes;
}

// Norms and rotates heads of token t in place.
void Program::finish_heads(const AttentionOp& op, int64_t t, int64_t heads, const Vector& norm, float* x) const {
    const RopeTable* rope = op.rope < 0 ? nullptr : &ropes_[size_t(op.rope)];
    for (int64_t h = 0; h < heads; ++h, x += op.head_dim) {
        if (norm) kernels_.rows->norm(x, norm->data(), op.head_dim, op.eps, x);
        if (!rope) continue;
        const auto half = int64_t(rope->frequencies.size());
        kernels_.rows->rotate(x, &rope->cos[size_t(t * half)], &rope->sin[size_t(t * half)], half);
    }
}

// Finishes heads of k of token t, from head `first` on, and subtracts the centre of the layer's keys.
void Program::finish_keys(const AttentionOp& op, int64_t t, int64_t first, int64_t heads, float* x) const {
    finish_heads(op, t, heads, op.k_norm, x);
    if (!op.centre) return;
    const float* centre = op.centre->data() + first * op.head_dim;
    for (int64_t i = 0; i < heads * op.head_dim; ++i) x[i] -= centre[i];
}

// Prefill: finishes q and k of a whole row, then writes k and v into the cell of the table.
void Program::write_row(Step& step, const AttentionOp& op, const AttentionWork& work, const FreshToken& fresh,
                        int thread) {
    const LayerView& layer = step.cache.layers[size_t(op.layer)];
    const HeadRange all{0, layer.store.n_heads};
    const int64_t t = fresh.token, cell = step.cache.groups[size_t(layer.group)].table.cells[t];
    prefetch_write(layer.store, cell, all);
    finish_heads(op, t, op.heads, op.q_norm, row(op.q, t));
    finish_keys(op, t, 0, op.kv_heads, row(op.k, t));
    if (cell >= 0)
        step.counted[size_t(thread)].written += writer(step, op).write_row(work, fresh, row(op.k, t), row(op.v, t));
}

Writer Program::writer(const Step& step, const AttentionOp& op) {
    const LayerView& layer = step.cache.layers[size_t(op.layer)];
    const TableView& table = step.cache.groups[size_t(layer.group)].table;
    return {layer.store, table, *kernels_.encoders, op.kv_heads,
            fresh_rows(fresh_.data(), layer.store, work_[size_t(layer.group)], op.kv_heads)};
}

// Decode: an item finishes its own heads of q in its thread's row, if the item before has not. The item that holds the
// new token also finishes k and writes k and v. No other item reads these cells, so no phase is needed.
void Program::begin_decode(Step& step, const AttentionOp& op, const WorkItem& item, int thread, bool same_query) {
    const LayerView& layer = step.cache.layers[size_t(op.layer)];
    const TableView& table = step.cache.groups[size_t(layer.group)].table;
    const int64_t t = table.q_start[item.seq], dim = op.head_dim, cell = table.cells[t];
    const int64_t group = op.heads / layer.store.n_heads, copies = layer.store.n_heads / op.kv_heads;
    const HeadRange heads{item.head, item.head + item.heads};
    const bool writes = item.end == table.kv_len[item.seq] && cell >= 0;
    Own& own = own_[size_t(thread)];
    if (writes) prefetch_write(layer.store, cell, heads);
    const auto copied = [&](int buffer, float* to, int64_t first, int64_t n) {
        memcpy(to + first * dim, row(buffer, t) + first * dim, size_t(n * dim) * 4);
        return to + first * dim;
    };
    if (!same_query)
        finish_heads(op, t, item.heads * group, op.q_norm,
                     copied(op.q, own.q.data(), heads.begin * group, item.heads * group));
    if (!writes) return;
    const int64_t from = heads.begin / copies, n = (heads.end + copies - 1) / copies - from;
    finish_keys(op, t, from, n, copied(op.k, own.k.data(), from, n));
    step.counted[size_t(thread)].written += writer(step, op).write_token(item.seq, heads, own.k.data(), row(op.v, t));
}

}  // namespace kvarn
