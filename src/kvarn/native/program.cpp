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

}  // namespace

// If there is only one row, every thread computes it for itself, which is faster than a barrier.
// That is not allowed if the next linear writes a buffer that another thread may still be reading.
void Program::add_op(Op op) {
    if ((op.kind == Op::Kind::Linear || op.kind == Op::Kind::Logits) && !ops_.empty()) {
        Op& before = ops_.back();
        before.per_thread = before.kind == Op::Kind::NormRound || before.kind == Op::Kind::Gated;
        for (const Segment& s : op.segments)
            before.per_thread = before.per_thread && (s.out < 0 || (s.out != before.in && s.out != before.in2));
    }
    loaded_ = loaded_ && (op.kind != Op::Kind::Embed || op.matrix.data);
    for (const Segment& s : op.segments) loaded_ = loaded_ && s.weight.data;
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
    for (const RopeTable& r : ropes_) total += int64_t((r.cos.size() + r.sin.size()) * 4);
    for (const Own& o : own_)
        total += int64_t((o.row.size() + o.q.size() + o.k.size()) * 4 + o.codes.size() +
                         o.meta.size() * sizeof(BlockMeta) + o.bf16.size() * 2 + o.scratch.size());
    return total;
}

int64_t Program::workspace_for(int64_t tokens, int64_t sequences, int64_t keys) const {
    const int64_t rounded = widest_ * (1 + 2) + widest_ / kBlock * int64_t(sizeof(BlockMeta));  // codes, bf16, meta
    int64_t total = up(tokens, kTile) * rounded, scratch = 0, partials = 0;
    for (const Buffer& b : buffers_) total += tokens * b.stride * 4;
    for (const RopeTable& r : ropes_) total += tokens * int64_t(r.frequencies.size()) * 2 * 4;
    for (const Op& op : ops_) {
        if (op.kind != Op::Kind::Attention) continue;
        scratch = std::max(scratch, scratch_bytes(op.head_dim));
        partials = std::max(partials, sequences * ceil_div(keys, kChunk) * op.heads * (2 + up(op.head_dim, 16)) * 4);
    }
    return total + partials + int64_t(own_.size()) * (widest_ * 3 * 4 + rounded + scratch);
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
            const int64_t tiles = ceil_div(n, kTile);
            shares_[i][0].reset(groups * ceil_div(tiles, kTilesAtOnce));
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
    for (RopeTable& table : ropes_) {  // each thread computes its part of the tokens
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

// Computes rows in f32 and rounds them to the forms that the next linear reads. The rest of a short
// tile is zeros.
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
    const int64_t n = step.rows_of(op), tiles = ceil_div(n, kTile);
    if (!n) return;
    int64_t groups = 0;
    for (const Segment& s : op.segments) groups += s.weight.groups;
    const int64_t grain = std::max<int64_t>(1, groups / (kGrainsPerThread * pool_->size()));
    int64_t begin, end;
    while (shares.take(thread, grain, begin, end))
        while (begin < end) {  // an item is one group with one block of tiles
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

}  // namespace kvarn
