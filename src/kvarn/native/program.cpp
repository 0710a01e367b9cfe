#include "program.hpp"

#include <cmath>
#include <cstring>

#include "base.hpp"
#include "elementary.hpp"
#include "scratch.hpp"

namespace kvarn {

namespace {

constexpr int64_t kGrainsPerThread = 8;  // shares of a linear per thread, to balance the threads
constexpr int64_t kTilesAtOnce = 8;      // activation tiles that stay in L2 while weights are read

bool reads(const Op& op, int buffer) {  // of what makes rows for a linear
    if (const auto* gated = op.as<GatedOp>()) return gated->gate == buffer || gated->up == buffer;
    return std::get<NormRoundOp>(op.what).in == buffer;
}

int64_t keys_of(const CacheView& cache) {  // in the caches of all sequences
    int64_t keys = 0;
    for (const GroupView& group : cache.groups)
        for (int64_t s = 0; s < group.table.n_seqs; ++s) keys += group.table.kv_len[s];
    return keys;
}

}  // namespace

// If there is only one row, every thread computes it for itself, which is faster than a phase. That
// is not allowed if the linear writes a buffer that another thread may still be reading, and if
// another linear reads the row too: a thread that skips the first one has no copy. A thread that is
// late can read a buffer that a later phase writes. Then its copy is wrong, but no item is left.
void Program::add_op(Op op) {
    if (const auto* embed = op.as<EmbedOp>()) loaded_ = loaded_ && embed->matrix.data;
    if (auto* linear = std::get_if<LinearOp>(&op.what)) {
        linear->input = int(ops_.size()) - 1;
        while (linear->input >= 0 && !ops_[size_t(linear->input)].makes()) --linear->input;
        if (linear->input >= 0) {
            Op& before = ops_[size_t(linear->input)];
            bool& per_thread = before.makes()->per_thread;
            per_thread = linear->input == int(ops_.size()) - 1;
            for (const Segment& s : linear->segments) per_thread = per_thread && (s.out < 0 || !reads(before, s.out));
        }
        for (const Segment& s : linear->segments) loaded_ = loaded_ && s.weight.data;
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
    const auto* last = ops_.empty() ? nullptr : ops_.back().as<LinearOp>();
    return !last || last->segments.empty() ? 0 : last->segments[0].weight.rows;
}

int64_t Program::workspace_bytes() const {
    int64_t total = int64_t(codes_.size() + meta_.size() * sizeof(BlockMeta) + bf16_.size() * 2 + partials_.size() * 4 +
                            fresh_.size());
    for (const Buffer& b : buffers_) total += int64_t(b.data.size() * 4);
    for (const RopeTable& r : ropes_) total += int64_t((r.cos.size() + r.sin.size()) * 4);
    for (const Own& o : own_)
        total += int64_t((o.row.size() + o.q.size() + o.k.size()) * 4 + o.codes.size() +
                         o.meta.size() * sizeof(BlockMeta) + o.bf16.size() * 2 + o.scratch.size());
    return total;
}

int64_t Program::workspace_for(int64_t tokens, int64_t sequences, int64_t keys, int64_t block, int64_t tails) const {
    const int64_t rounded = widest_ * (1 + 2) + widest_ / kBlock * int64_t(sizeof(BlockMeta));  // codes, bf16, meta
    int64_t total = up(tokens, kTile) * rounded, scratch = 0, partials = 0, fresh = 0;
    for (const Buffer& b : buffers_) total += tokens * b.stride * 4;
    for (const RopeTable& r : ropes_) total += tokens * int64_t(r.frequencies.size()) * 2 * 4;
    for (const Op& any : ops_) {
        const auto* op = any.as<AttentionOp>();
        if (!op) continue;
        scratch = std::max(scratch, scratch_bytes(op->head_dim));
        const int64_t width = up(op->head_dim, std::max<int64_t>(block, 16));  // StoreView::width
        partials = std::max(partials, sequences * ceil_div(keys, kChunk) * op->heads * (2 + width) * 4);
        fresh = std::max(fresh, tails * fresh_bytes(most_tiles(tokens, sequences), op->kv_heads, op->head_dim));
    }
    return total + partials + fresh + int64_t(own_.size()) * (widest_ * 3 * 4 + rounded + scratch);
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
        own.x = {};  // it points into arrays that are reallocated here
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
    const int64_t begin = now(), keys = keys_of(cache);
    const int threads = thread_counts_[threads_.next(n_tokens, keys)];
    const Prefetch prefetch = choose_prefetch(cache, n_tokens, keys);
    make_work(cache, threads);
    Step step{cache, tokens, positions, n_tokens, rows, n_rows, logits, threads, prefetch, {}};
    step.counted.resize(size_t(threads));
    make_phases(step);
    pool_->run([&](int thread) { walk(step, thread); }, phases_->begin());
    took(now() - begin);
    Counted total;
    for (const Counted& c : step.counted) total += c;
    return total;
}

Prefetch Program::choose_prefetch(const CacheView& cache, int64_t n_tokens, int64_t keys) {
    if (cache.layers.empty()) return prefetch_.next(false, false, n_tokens, keys);
    const StoreView& store = cache.layers[0].store;
    const bool codes = rotated(store.k.codec) && rotated(store.v.codec);
    return prefetch_.next(codes, n_tokens == cache.groups[0].table.n_seqs, n_tokens, keys);
}

// Only one thing is tried at a time.
void Program::took(int64_t ns) {
    if (prefetch_.trying()) return prefetch_.took(ns);
    threads_.took(ns);
    if (!threads_.trying()) prefetch_.took(ns);
}

void Program::make_work(const CacheView& cache, int threads) {
    work_.resize(cache.groups.size());
    int64_t floats = 0, scratch = 0, fresh = 0;
    for (size_t g = 0; g < cache.groups.size(); ++g) {
        const auto layer = [&]() -> const LayerView& {
            for (const LayerView& l : cache.layers)
                if (l.group == int64_t(g)) return l;
            return cache.layers[0];
        }();
        work_[g].make(cache.groups[g].table, cache.groups[g].spec, layer.store, threads);
        floats = std::max(floats, work_[g].partial_floats);
        scratch = std::max(scratch, scratch_bytes(layer.store.dim));
        const int64_t tiles = most_tiles(capacity_, cache.groups[g].table.n_seqs);
        fresh = std::max(fresh, fresh_bytes(layer.store, tiles, cache.groups[g].spec.n_kv_heads));
    }
    if (int64_t(fresh_.size()) < fresh) fresh_.resize(size_t(fresh));
    if (int64_t(partials_.size()) < floats) partials_.resize(size_t(floats));
    for (Own& own : own_)
        if (int64_t(own.scratch.size()) < scratch) own.scratch.resize(size_t(scratch));
}

void Program::make_phases(const Step& step) {
    if (!phases_) {
        parts_.push_back({-1, 0});
        for (size_t i = 0; i < ops_.size(); ++i)
            for (int part = 0; part < (ops_[i].as<AttentionOp>() ? kAttentionParts : 1); ++part)
                parts_.push_back({int(i), part});
        phases_ = std::make_unique<Phases>(*pool_, parts_.size());
    }
    phases_->limit(step.threads);
    for (size_t i = 0; i < parts_.size(); ++i) phases_->reset(i, items_of(step, parts_[i]));
}

int64_t Program::items_of(const Step& step, const Part& part) const {
    if (part.op < 0) return ropes_.empty() ? 0 : step.n_tokens;
    const Op& op = ops_[size_t(part.op)];
    const int64_t n = step.rows_of(op);
    if (const auto* linear = op.as<LinearOp>())  // an item is one group with one block of tiles
        return linear->groups() * ceil_div(ceil_div(n, kTile), kTilesAtOnce);
    if (const auto* attention = op.as<AttentionOp>()) {
        const AttentionWork& work = work_[size_t(step.cache.layers[size_t(attention->layer)].group)];
        if (part.part == kWriteRows) return int64_t(work.rows.size());
        if (part.part == kFinishTiles) return int64_t(work.tiles.size());
        return int64_t(part.part == kCompute ? work.prefill.size() + work.decode.size() : work.merges.size());
    }
    return step.per_thread(op) ? 0 : n;
}

// Adds the phases [from, to) to the trace. Those that other threads finished take no time of this one. The
// phases of one operation are one entry.
void Program::note(size_t from, size_t to, int64_t begin, int64_t end) {
    for (size_t i = from; i < to; ++i) {
        const auto op = int32_t(parts_[i].op);
        if (op < 0 || phases_->items(i) == 0) continue;
        if (!timings_.empty() && timings_.back().op == op)
            timings_.back().end = end;
        else
            timings_.push_back({op, begin, end});
    }
}

void Program::walk(Step& step, int thread) {
    const FlushDenormals flush;
    own_[size_t(thread)].made = -1;
    queue_prefetch(step, 0, thread, step.threads);
    const bool traced = tracing_ && thread == 0;
    size_t at = phases_->first(thread);
    if (traced) note(0, at, now(), now());
    while (at < phases_->size()) {
        const int64_t begin = traced ? now() : 0;
        const int64_t computed = run_phase(step, at, thread);
        const size_t next = phases_->finish(at, thread, computed);
        if (traced) note(at, at + 1, begin, now()), note(at + 1, next, now(), now());
        at = next;
    }
    const auto* last = ops_.back().as<LinearOp>();
    if (thread == 0 && last) make_own_input(step, *last, thread);  // for hidden()
}

int64_t Program::run_phase(Step& step, size_t phase, int thread) {
    const Part& part = parts_[phase];
    if (part.op < 0) return each(phase, thread, [&](int64_t t) { make_rope(step, t); });
    return std::visit([&](const auto& op) { return compute(step, op, phase, thread); }, ops_[size_t(part.op)].what);
}

int64_t Program::compute(Step& step, const EmbedOp& op, size_t phase, int thread) {
    return each(phase, thread, [&](int64_t t) {
        float* out = row(op.out, t);
        unpack_row(op.matrix, step.tokens[t], out);
        if (op.scale != 1.0f) kernels_.rows->scale(out, buffers_[size_t(op.out)].width, op.scale);
    });
}

int64_t Program::compute(Step& step, const NormRoundOp&, size_t phase, int thread) {
    return make_rows(step, phase, thread);
}

int64_t Program::compute(Step& step, const GatedOp&, size_t phase, int thread) {
    return make_rows(step, phase, thread);
}

int64_t Program::compute(Step&, const NormAddOp& op, size_t phase, int thread) {
    return each(phase, thread, [&](int64_t r) {
        const int64_t n = buffers_[size_t(op.in)].width;
        float* h = row(op.in, r);
        kernels_.rows->norm(h, op.weight->data(), n, op.eps, h);
        kernels_.rows->add(row(op.out, r), h, n);
    });
}

int64_t Program::compute(Step&, const AddOp& op, size_t phase, int thread) {
    return each(phase, thread,
                [&](int64_t r) { kernels_.rows->add(row(op.out, r), row(op.in, r), buffers_[size_t(op.in)].width); });
}

int64_t Program::compute(Step& step, const SelectOp& op, size_t phase, int thread) {
    return each(phase, thread, [&](int64_t r) {
        memcpy(row(op.out, r), row(op.in, step.rows[r]), size_t(buffers_[size_t(op.in)].stride) * 4);
    });
}

void Program::make_rope(const Step& step, int64_t t) {
    for (RopeTable& table : ropes_) {
        const auto half = int64_t(table.frequencies.size());
        for (int64_t i = 0; i < half; ++i) {
            const SinCos both = sin_cos(double(step.positions[t]) * table.frequencies[size_t(i)]);
            table.cos[size_t(t * half + i)] = float(double(table.magnitude) * both.cos);
            table.sin[size_t(t * half + i)] = float(double(table.magnitude) * both.sin);
        }
    }
}

int64_t Program::make_rows(Step& step, size_t phase, int thread) {
    const int index = parts_[phase].op;
    const Op& op = ops_[size_t(index)];
    view_input(step, index, thread);
    return each(phase, thread, [&](int64_t r) { make_row(op, own_[size_t(thread)].x, r, row(op.makes()->out, r)); });
}

// Where the thread finds the rows that an operation made for a linear.
void Program::view_input(const Step& step, int index, int thread) {
    const Op& op = ops_[size_t(index)];
    const Buffer& out = buffers_[size_t(op.makes()->out)];
    const bool per_thread = step.per_thread(op);
    Own& own = own_[size_t(thread)];
    Activations& x = own.x;
    own.made = index;
    x.rows = step.rows_of(op), x.cols = out.width, x.blocks = out.stride / kBlock;
    x.height = kTile;
    while (x.height > 1 && x.height / 2 >= x.rows) x.height /= 2;
    x.codes = per_thread ? own.codes.data() : codes_.data();
    x.meta = per_thread ? own.meta.data() : meta_.data();
    x.bf16 = per_thread ? own.bf16.data() : bf16_.data();
    x.f32 = out.data.data(), x.stride = out.stride;
}

// Computes a row in f32 and rounds it to the forms that the next linear reads. With the last row, the
// rest of a short tile becomes zeros.
void Program::make_row(const Op& op, const Activations& x, int64_t r, float* y) {
    if (const auto* gated = op.as<GatedOp>()) {
        kernels_.rows->gate(row(gated->gate, r), row(gated->up, r), x.cols, gated->kind, y);
    } else {
        const auto& norm = std::get<NormRoundOp>(op.what);
        if (norm.weight)
            kernels_.rows->norm(row(norm.in, r), norm.weight->data(), x.cols, norm.eps, y);
        else
            y = row(norm.in, r);
    }
    if (op.makes()->bf16) kernels_.linear->round(y, x, r);
    if (!op.makes()->int8) return;
    kernels_.linear->quantize(y, x, r);
    if (r + 1 < x.rows) return;
    for (int64_t surplus = x.rows; surplus < up(x.rows, x.height); ++surplus) {
        const int64_t t = surplus / kTile, in = surplus % kTile;
        for (int64_t b = 0; b < x.blocks; ++b) {
            memset(x.codes + ((t * x.blocks + b) * x.height + in) * kBlock, 0, size_t(kBlock));
            x.meta[(t * x.blocks + b) * x.height + in] = BlockMeta{};
        }
    }
}

// Makes sure that the thread's view of a linear's input is there, and its copy if it has one.
void Program::make_own_input(const Step& step, const LinearOp& linear, int thread) {
    Own& own = own_[size_t(thread)];
    if (own.made == linear.input) return;
    const Op& op = ops_[size_t(linear.input)];
    view_input(step, linear.input, thread);
    if (!step.per_thread(op)) return;
    const auto* norm = op.as<NormRoundOp>();
    if (!norm || norm->weight) own.x.f32 = own.row.data();  // otherwise the row is read where it is
    make_row(op, own.x, 0, own.row.data());
}

int64_t Program::compute(Step& step, const LinearOp& op, size_t phase, int thread) {
    make_own_input(step, op, thread);
    const int64_t grain = std::max<int64_t>(1, op.groups() / (kGrainsPerThread * phases_->threads(phase)));
    int64_t begin, end, computed = 0;
    for (; phases_->take(phase, thread, grain, begin, end); computed += end - begin)
        multiply(step, op, begin, end, thread);
    return computed;
}

// Items [begin, end): groups of output rows, for one block of activation tiles after the other.
void Program::multiply(Step& step, const LinearOp& op, int64_t begin, int64_t end, int thread) {
    Own& own = own_[size_t(thread)];
    const int64_t groups = op.groups(), tiles = ceil_div(own.x.rows, kTile);
    for (int64_t from = begin; from < end;) {
        const int64_t block = from / groups, stop = std::min(end, (block + 1) * groups);
        int64_t at = block * groups;
        for (const Segment& s : op.segments) {
            const int64_t low = std::max(from, at) - at, high = std::min(stop, at + s.weight.groups) - at;
            at += s.weight.groups;
            if (low >= high) continue;
            Output y;
            if (op.logits) {
                y.data = step.logits, y.stride = up(s.weight.rows, kGroup);
            } else {
                y.data = row(s.out, 0), y.stride = buffers_[size_t(s.out)].stride;
            }
            y.bias = s.bias ? s.bias->data() : nullptr;
            y.add = s.add;
            const Range range{low, high, block * kTilesAtOnce, std::min(tiles, (block + 1) * kTilesAtOnce)};
            kernels_.linear->multiply(s.weight, own.x, y, range, own.prefetch);
        }
        from = stop;
    }
}

}  // namespace kvarn
