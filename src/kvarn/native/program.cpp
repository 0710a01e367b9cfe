#include "program.hpp"

#include <chrono>
#include <cmath>
#include <cstring>

#include "elementary.hpp"

namespace kvarn {

namespace {

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

constexpr int64_t kTilesAtOnce = 8;          // activation tiles that stay in L2 while weights pass by
constexpr int64_t kManyRows = 9;             // from so many on products wait for arithmetic, not for memory
constexpr int64_t kPrefetchBytes = 3 << 20;  // of cells that a thread has brought nearer before it reads them

}  // namespace

// -- program ----------------------------------------------------------------------------------------------------------

struct Program::Step {
    const CacheView& cache;
    const int64_t* tokens;
    const int32_t* positions;
    int64_t n_tokens;
    const int64_t* rows;
    int64_t n_rows;
    float* logits;
    std::vector<Counted> counted;  // per thread

    int64_t rows_of(const Op& op) const { return op.wanted_rows_only ? n_rows : n_tokens; }
    bool per_thread(const Op& op) const { return op.per_thread && rows_of(op) == 1; }
};

// A single row is made ready by every thread for itself, which is quicker than waiting for one that does it for all,
// unless the product behind it writes what some thread may still be reading.
void Program::add_op(Op op) {
    if ((op.kind == Op::Kind::Linear || op.kind == Op::Kind::Logits) && !ops_.empty()) {
        Op& before = ops_.back();
        before.per_thread = before.kind == Op::Kind::NormRound || before.kind == Op::Kind::Gated;
        for (const Segment& s : op.segments)
            before.per_thread = before.per_thread && (s.out < 0 || (s.out != before.in && s.out != before.in2));
    }
    ops_.push_back(std::move(op));
}

int Program::add_buffer(int64_t width) {
    Buffer buffer;
    buffer.width = width;
    buffer.stride = up(width, kBlock);
    buffers_.push_back(std::move(buffer));
    widest_ = std::max(widest_, up(width, kBlock));
    return int(buffers_.size()) - 1;
}

int Program::add_rope(std::vector<double> frequencies, float magnitude) {
    ropes_.push_back({std::move(frequencies), magnitude, {}, {}});
    return int(ropes_.size()) - 1;
}

int64_t Program::vocabulary() const {
    return ops_.empty() || ops_.back().segments.empty() ? 0 : ops_.back().segments[0].weight.rows;
}

int64_t Program::workspace_bytes() const {
    int64_t total = int64_t(codes_.size() + meta_.size() * sizeof(BlockMeta) + bf16_.size() * 2 + partials_.size() * 4);
    for (const Buffer& b : buffers_) total += int64_t(b.data.size() * 4);
    for (const Own& o : own_)
        total += int64_t((o.row.size() + o.q.size() + o.k.size()) * 4 + o.codes.size() +
                         o.meta.size() * sizeof(BlockMeta) + o.bf16.size() * 2 + o.scratch.size());
    return total;
}

void Program::grow(int64_t tokens, int64_t rows) {
    const int64_t most = std::max(tokens, rows);
    if (most <= capacity_) return;
    capacity_ = most;
    for (Buffer& b : buffers_) b.data.assign(size_t(most * b.stride), 0.0f);
    const int64_t padded = up(most, kTile);
    codes_.assign(size_t(padded * widest_), 0);
    meta_.assign(size_t(padded * widest_ / kBlock), BlockMeta{});
    bf16_.assign(size_t(padded * widest_), 0);
    for (Own& own : own_) {
        own.x = {};  // it points into what moves here
        for (Lines<float>* row : {&own.row, &own.q, &own.k}) row->assign(size_t(widest_), 0.0f);
        own.codes.assign(size_t(widest_), 0);
        own.meta.assign(size_t(widest_ / kBlock), BlockMeta{});
        own.bf16.assign(size_t(widest_), 0);
    }
    for (RopeTable& r : ropes_) {
        r.cos.resize(size_t(most) * r.frequencies.size());
        r.sin.resize(r.cos.size());
    }
}

Counted Program::run(const CacheView& cache, const int64_t* tokens, const int32_t* positions, int64_t n_tokens,
                     const int64_t* rows, int64_t n_rows, float* logits) {
    grow(n_tokens, n_rows);
    for (shares_.reserve(ops_.size()); shares_.size() < ops_.size();) {
        std::vector<Shares>& phases = shares_.emplace_back();
        for (int phase = 0; phase < 3; ++phase) phases.emplace_back(pool_->size());
    }
    work_.resize(cache.groups.size());
    int64_t floats = 0, scratch = 0;
    for (size_t g = 0; g < cache.groups.size(); ++g) {
        const auto layer = [&]() -> const LayerView& {
            for (const LayerView& l : cache.layers)
                if (l.group == int64_t(g)) return l;
            return cache.layers[0];
        }();
        work_[g].make(cache.groups[g].table, cache.groups[g].spec, layer.store, pool_->size());
        floats = std::max(floats, work_[g].partial_floats);
        scratch = std::max(scratch, scratch_bytes(layer.store.dim));
    }
    if (int64_t(partials_.size()) < floats) partials_.resize(size_t(floats));
    for (Own& own : own_)
        if (int64_t(own.scratch.size()) < scratch) own.scratch.resize(size_t(scratch));

    Step step{cache, tokens, positions, n_tokens, rows, n_rows, logits, {}};
    step.counted.resize(size_t(pool_->size()));
    for (size_t i = 0; i < ops_.size(); ++i) {
        const Op& op = ops_[i];
        const int64_t n = step.rows_of(op);
        if (op.kind == Op::Kind::Linear || op.kind == Op::Kind::Logits) {
            int64_t groups = 0;
            for (const Segment& s : op.segments) groups += s.weight.groups;
            const int64_t tiles = (n + kTile - 1) / kTile;
            shares_[i][0].reset(groups * ((tiles + kTilesAtOnce - 1) / kTilesAtOnce));
        } else {
            shares_[i][0].reset(n);
        }
        if (op.kind == Op::Kind::Attention) {
            const AttentionWork& work = work_[size_t(cache.layers[size_t(op.layer)].group)];
            shares_[i][0].reset(int64_t(work.rows.size()));
            shares_[i][1].reset(int64_t(work.prefill.size() + work.decode.size()));
            shares_[i][2].reset(int64_t(work.merges.size()));
        }
    }
    pool_->run([&](int thread) { walk(step, thread); });
    Counted total;
    for (const Counted& c : step.counted) total += c;
    return total;
}

void Program::walk(Step& step, int thread) {
    const FlushDenormals flush;
    for (RopeTable& table : ropes_) {  // each thread its part of the tokens
        const int64_t half = int64_t(table.frequencies.size()), threads = pool_->size();
        for (int64_t t = step.n_tokens * thread / threads; t < step.n_tokens * (thread + 1) / threads; ++t)
            for (int64_t i = 0; i < half; ++i) {
                const double angle = double(step.positions[t]) * table.frequencies[size_t(i)];
                const SinCos both = sin_cos(angle);
                table.cos[size_t(t * half + i)] = float(double(table.magnitude) * both.cos);
                table.sin[size_t(t * half + i)] = float(double(table.magnitude) * both.sin);
            }
    }
    queue_prefetch(step, 0, thread);
    for (size_t i = 0; i < ops_.size(); ++i) {
        const int64_t begin = tracing_ && thread == 0 ? now() : 0;
        run_op(step, ops_[i], i, thread);
        if (!step.per_thread(ops_[i])) pool_->barrier(thread);
        if (tracing_ && thread == 0) timings_.push_back({int32_t(i), begin, now()});
    }
}

void Program::run_op(Step& step, const Op& op, size_t index, int thread) {
    Shares& shares = shares_[index][0];
    int64_t begin, end;
    switch (op.kind) {
        case Op::Kind::Embed:
            return embed(step, op, shares, thread);
        case Op::Kind::NormRound:
        case Op::Kind::Gated:
            return make_linear_input(step, op, shares, thread);
        case Op::Kind::Linear:
        case Op::Kind::Logits:
            return linear(step, op, shares, thread);
        case Op::Kind::Attention:
            return attention(step, op, index, thread);
        case Op::Kind::NormAdd:
            while (shares.take(thread, 1, begin, end)) {
                const int64_t n = buffers_[size_t(op.in)].width;
                float* h = row(op.in, begin);
                kernels_.rows->norm(h, op.weight->data(), n, op.eps, h);
                kernels_.rows->add(row(op.out, begin), h, n);
            }
            return;
        case Op::Kind::Add:
            while (shares.take(thread, 1, begin, end))
                kernels_.rows->add(row(op.out, begin), row(op.in, begin), buffers_[size_t(op.in)].width);
            return;
        case Op::Kind::Select:
            while (shares.take(thread, 1, begin, end))
                memcpy(row(op.out, begin), row(op.in, step.rows[begin]), size_t(buffers_[size_t(op.in)].stride) * 4);
            return;
    }
}

void Program::embed(Step& step, const Op& op, Shares& shares, int thread) {
    int64_t t, end;
    while (shares.take(thread, 1, t, end)) {
        float* out = row(op.out, t);
        unpack_row(op.matrix, step.tokens[t], out);
        if (op.scale != 1.0f) kernels_.rows->scale(out, buffers_[size_t(op.out)].width, op.scale);
    }
}

// Rows in f32, then in the forms that the next product reads; rows past the last of a short tile are zeros.
void Program::make_linear_input(Step& step, const Op& op, Shares& shares, int thread) {
    const Buffer& out = buffers_[size_t(op.out)];
    const bool per_thread = step.per_thread(op);
    Own& own = own_[size_t(thread)];
    Activations& x = own.x;
    x.rows = step.rows_of(op), x.cols = out.width, x.blocks = out.stride / kBlock;
    x.height = kTile;
    while (x.height > 1 && x.height / 2 >= x.rows) x.height /= 2;
    x.codes = per_thread ? own.codes.data() : codes_.data();
    x.meta = per_thread ? own.meta.data() : meta_.data();
    x.bf16 = per_thread ? own.bf16.data() : bf16_.data();
    x.f32 = out.data.data(), x.stride = out.stride;
    const auto make = [&](int64_t r, float* y) {
        if (op.kind == Op::Kind::Gated)
            kernels_.rows->gate(row(op.in, r), row(op.in2, r), out.width, op.gate, y);
        else if (op.weight)
            kernels_.rows->norm(row(op.in, r), op.weight->data(), out.width, op.eps, y);
        else
            y = row(op.in, r);
        if (op.needs_int8) kernels_.linear->quantize(y, x, r);
        if (op.needs_bf16) kernels_.linear->round(y, x, r);
    };
    if (per_thread) {
        if (op.kind == Op::Kind::Gated || op.weight) x.f32 = own.row.data();
        return make(0, own.row.data());
    }
    int64_t r, end;
    while (shares.take(thread, 1, r, end)) make(r, row(op.out, r));
    if (op.needs_int8 && thread == 0)  // no thread reads these rows before the barrier
        for (int64_t surplus = x.rows; surplus < up(x.rows, x.height); ++surplus) {
            const int64_t t = surplus / kTile, in = surplus % kTile;
            for (int64_t b = 0; b < x.blocks; ++b) {
                memset(x.codes + ((t * x.blocks + b) * x.height + in) * kBlock, 0, size_t(kBlock));
                x.meta[(t * x.blocks + b) * x.height + in] = BlockMeta{};
            }
        }
}

void Program::linear(Step& step, const Op& op, Shares& shares, int thread) {
    const int64_t n = step.rows_of(op), tiles = (n + kTile - 1) / kTile;
    if (!n) return;
    int64_t groups = 0;
    for (const Segment& s : op.segments) groups += s.weight.groups;
    const int64_t grain = std::max<int64_t>(1, groups / (8 * pool_->size()));
    int64_t begin, end;
    while (shares.take(thread, grain, begin, end))
        while (begin < end) {  // items are groups, all of them once per block of tiles
            const int64_t block = begin / groups, stop = std::min(end, (block + 1) * groups);
            int64_t at = block * groups;
            for (const Segment& s : op.segments) {
                const int64_t low = std::max(begin, at) - at, high = std::min(stop, at + s.weight.groups) - at;
                at += s.weight.groups;
                if (low >= high) continue;
                Output y;
                if (op.kind == Op::Kind::Logits) {
                    y.data = step.logits, y.stride = up(s.weight.rows, kGroup);
                } else {
                    y.data = row(s.out, 0), y.stride = buffers_[size_t(s.out)].stride;
                }
                y.bias = s.bias ? s.bias->data() : nullptr;
                y.add = s.add;
                const Range range{low, high, block * kTilesAtOnce, std::min(tiles, (block + 1) * kTilesAtOnce)};
                kernels_.linear->multiply(s.weight, own_[size_t(thread)].x, y, range, own_[size_t(thread)].prefetch);
            }
            begin = stop;
        }
}

void Program::attention(Step& step, const Op& op, size_t index, int thread) {
    const LayerView& layer = step.cache.layers[size_t(op.layer)];
    const GroupView& group = step.cache.groups[size_t(layer.group)];
    const AttentionWork& work = work_[size_t(layer.group)];
    Counted& counted = step.counted[size_t(thread)];
    if (!work.rows.empty()) {
        write_rows(step, op, work, shares_[index][0], thread);
        pool_->barrier(thread);
    }

    const Buffer &q = buffers_[size_t(op.in)], &out = buffers_[size_t(op.out)];
    Own& own = own_[size_t(thread)];
    const AttentionArgs many{layer.store,   group.table,    group.spec, op.scale,
                             q.data.data(), row(op.out, 0), q.stride,   out.stride};
    AttentionArgs one = many;  // a unit of decode has its query in the thread's own row
    one.q = own.q.data(), one.q_stride = 0;
    int64_t i, end;
    const auto n_prefill = int64_t(work.prefill.size());
    for (int64_t start = now(), stop; shares_[index][1].take(thread, 1, i, end); start = stop) {
        if (i < n_prefill) {
            counted.read += kernels_.attention->prefill(many, work.prefill[size_t(i)], own.scratch.data());
        } else {
            const WorkItem& item = work.decode[size_t(i - n_prefill)];
            begin_decode(step, op, item, thread);
            counted.read += kernels_.attention->decode(one, item, partials_.data(), own.scratch.data());
        }
        stop = now();
        (i < n_prefill ? counted.prefill_ns : counted.decode_ns) += stop - start;
    }
    queue_prefetch(step, size_t(op.layer) + 1, thread);
    if (thread == 0) counted.prefill += n_prefill > 0, counted.decode += !work.decode.empty();
    if (work.merges.empty()) return;
    pool_->barrier(thread);
    while (shares_[index][2].take(thread, 1, i, end))
        kernels_.attention->merge(many, work.decode.data(), work.merges[size_t(i)], partials_.data());
}

// The cells that this thread will read in the next attention, so far as caches hold them: products of many rows bring
// them nearer meanwhile. A panel's cells of all heads are one piece; a slab without panels has none so small.
void Program::queue_prefetch(Step& step, size_t index, int thread) {
    Own& own = own_[size_t(thread)];
    own.prefetch_spans.clear(), own.prefetch = {};
    if (index >= step.cache.layers.size() || step.n_tokens < kManyRows) return;
    const LayerView& layer = step.cache.layers[index];
    const TableView& table = step.cache.groups[size_t(layer.group)].table;
    const std::vector<WorkItem>& items = work_[size_t(layer.group)].decode;
    const StoreView& s = layer.store;
    const int64_t cell_size = cell_bytes(s.codec), bytes = s.panel_size * s.n_heads * s.dim * cell_size;
    const int64_t n = s.panel_size > kChunk ? 0 : int64_t(items.size()), threads = pool_->size();
    for (int64_t i = n * thread / threads; i < n * (thread + 1) / threads; ++i) {
        const WorkItem& item = items[size_t(i)];
        if (item.head > 0) continue;  // its panels are another unit's too
        const int32_t* blocks = table.blocks + item.seq * table.max_blocks;
        const int32_t* first = table.first + item.seq * table.max_blocks;
        for (const auto& [cells, strides] : {std::pair{s.k, &s.ks}, {s.v, &s.vs}})
            for (int64_t b = 0; b < table.n_blocks[item.seq]; ++b) {
                const int64_t end = std::min(item.end - first[b], s.block_size);
                for (int64_t p = std::max<int64_t>(item.begin - first[b], 0) / s.panel_size; p * s.panel_size < end;
                     ++p)
                    own.prefetch_spans.push_back(cells + (blocks[b] * strides->block + p * strides->panel) * cell_size);
            }
        if (int64_t(own.prefetch_spans.size()) * bytes >= kPrefetchBytes) break;
    }
    own.prefetch.spans = own.prefetch_spans.data(), own.prefetch.n_spans = int64_t(own.prefetch_spans.size()),
    own.prefetch.span_bytes = bytes;
}

// Norm and rotate heads of token t where they stand.
void Program::finish_heads(const Op& op, int64_t t, int64_t heads, const Vector& norm, float* x) const {
    const RopeTable* rope = op.rope < 0 ? nullptr : &ropes_[size_t(op.rope)];
    for (int64_t h = 0; h < heads; ++h, x += op.head_dim) {
        if (norm) kernels_.rows->norm(x, norm->data(), op.head_dim, op.eps, x);
        if (!rope) continue;
        const auto half = int64_t(rope->frequencies.size());
        kernels_.rows->rotate(x, &rope->cos[size_t(t * half)], &rope->sin[size_t(t * half)], half);
    }
}

// Prefill: q and k of whole rows, then k and v into the cells that the table names.
void Program::write_rows(Step& step, const Op& op, const AttentionWork& work, Shares& shares, int thread) {
    const LayerView& layer = step.cache.layers[size_t(op.layer)];
    const TableView& table = step.cache.groups[size_t(layer.group)].table;
    const HeadRange all{0, layer.store.n_heads};
    int64_t i, end;
    while (shares.take(thread, 1, i, end)) {
        const int64_t t = work.rows[size_t(i)], cell = table.cells[t];
        prefetch_write(layer.store, cell, all);
        finish_heads(op, t, op.heads, op.weight, row(op.in, t));
        finish_heads(op, t, op.kv_heads, op.weight2, row(op.in2, t));
        if (cell >= 0)
            step.counted[size_t(thread)].written +=
                write_heads(layer.store, *kernels_.encoders, cell, all, row(op.in2, t), row(op.in3, t), op.kv_heads);
    }
}

// Decode: a unit makes its own heads of q ready, in a row of its thread's, and the unit that holds the token itself
// also writes those of k and v. No other unit reads these cells, so nobody has to wait.
void Program::begin_decode(Step& step, const Op& op, const WorkItem& item, int thread) {
    const LayerView& layer = step.cache.layers[size_t(op.layer)];
    const TableView& table = step.cache.groups[size_t(layer.group)].table;
    const int64_t t = table.q_start[item.seq], dim = op.head_dim, cell = table.cells[t];
    const int64_t group = op.heads / layer.store.n_heads, copies = layer.store.n_heads / op.kv_heads;
    const HeadRange heads{item.head, item.head + item.heads};
    const bool writes = item.end == table.kv_len[item.seq] && cell >= 0;
    Own& own = own_[size_t(thread)];
    if (writes) prefetch_write(layer.store, cell, heads);
    const auto ready = [&](int buffer, float* to, int64_t first, int64_t n, const Vector& norm) {
        memcpy(to + first * dim, row(buffer, t) + first * dim, size_t(n * dim) * 4);
        finish_heads(op, t, n, norm, to + first * dim);
    };
    ready(op.in, own.q.data(), heads.begin * group, item.heads * group, op.weight);
    if (!writes) return;
    const int64_t from = heads.begin / copies, to = (heads.end + copies - 1) / copies;
    ready(op.in2, own.k.data(), from, to - from, op.weight2);
    step.counted[size_t(thread)].written +=
        write_heads(layer.store, *kernels_.encoders, cell, heads, own.k.data(), row(op.in3, t), op.kv_heads);
}

}  // namespace kvarn
