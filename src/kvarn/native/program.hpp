// A model as a list of operations over numbered buffers; a step is one pass over the list.
//
// A program is built once: backends/cpu adds buffers, weights and operations in order. `run` gives
// the list to the pool, as phases (threads.hpp): an operation is one phase, attention has four. Which
// thread computes an item changes no bit. Workspaces grow to the largest step and are kept. Non-goals: what
// a model is, where weights come from, sampling.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear.hpp"
#include "ops.hpp"
#include "prefetch.hpp"
#include "work.hpp"

namespace kvarn {

struct LayerView {
    StoreView store;
    int64_t group = 0;  // the group whose table it uses
};

struct GroupView {
    TableView table;
    SpecView spec;
};

struct CacheView {
    std::vector<LayerView> layers;
    std::vector<GroupView> groups;
};

struct Timing {
    int32_t op;
    int64_t begin, end;  // ns
};

struct RopeTable {
    std::vector<double> frequencies;
    float magnitude = 1;
    std::vector<float> cos, sin;  // [T, half] of the current step
};

class Program {
  public:
    Program(std::shared_ptr<Pool> pool, const Kernels& kernels)
        : pool_(std::move(pool)),
          kernels_(kernels),
          own_(size_t(pool_->size())),
          thread_counts_(kvarn::thread_counts(pool_->size())),
          threads_(thread_counts_.size(), 32, kShortStep) {}
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    int add_buffer(int64_t width);
    int add_rope(std::vector<double> frequencies, float magnitude);
    void add_op(Op op);

    // Writes logits [n_rows, vocabulary] of these rows of the step.
    Counted run(const CacheView& cache, const int64_t* tokens, const int32_t* positions, int64_t n_tokens,
                const int64_t* rows, int64_t n_rows, float* logits);

    // The rows that the last run's logits were computed from, in f32; no rows before the first run.
    // A single row is not in its buffer, because each thread computes its own copy (see add_op), so
    // this returns what thread 0 read.
    const Activations& hidden() const { return own_[0].x; }

    int n_buffers() const { return int(buffers_.size()); }
    int64_t width(int buffer) const { return buffers_[size_t(buffer)].width; }
    void reserve(int64_t tokens) { grow(tokens, 0); }  // grows workspaces for steps of this many tokens
    int64_t vocabulary() const;
    int64_t workspace_bytes() const;
    // What workspace_bytes becomes after steps of `tokens` tokens, and after `sequences` sequences
    // that decode and see `keys` keys each. Rows of values are padded to multiples of `block`, and
    // `tails` of K and V have a tail. Nothing is allocated.
    int64_t workspace_for(int64_t tokens, int64_t sequences, int64_t keys, int64_t block, int64_t tails) const;
    bool loaded() const { return loaded_; }  // false: a matrix is an outline, so the program cannot run
    void trace(bool on) { tracing_ = on; }
    std::vector<Timing> take_timings() { return std::move(timings_); }
    const std::vector<Op>& ops() const { return ops_; }

  private:
    struct Buffer {
        int64_t width = 0, stride = 0;
        Lines<float> data;
    };
    struct Own {        // workspace of one thread
        Activations x;  // the input of the next linear
        int made = -1;  // the operation that made it in this step
        Lines<float> row, q, k;
        Lines<int8_t> codes;
        Lines<BlockMeta> meta;
        Lines<uint16_t> bf16;
        Lines<uint8_t> scratch;
        std::vector<const uint8_t*> prefetch_spans;
        PrefetchQueue prefetch;
    };
    struct Step {  // arguments of one run, and its counts
        const CacheView& cache;
        const int64_t* tokens;
        const int32_t* positions;
        int64_t n_tokens;
        const int64_t* rows;
        int64_t n_rows;
        float* logits;
        int threads;                   // that compute it
        Prefetch prefetch;             // of cells
        std::vector<Counted> counted;  // per thread

        int64_t rows_of(const Op& op) const { return op.wanted_rows_only ? n_rows : n_tokens; }
        bool per_thread(const Op& op) const { return op.makes() && op.makes()->per_thread && rows_of(op) == 1; }
    };

    enum AttentionPart { kWriteRows, kFinishTiles, kCompute, kMerge, kAttentionParts };
    struct Part {  // a phase: a part of an operation; the first one is that of no operation
        int op;
        int part;  // of attention: an AttentionPart
    };
    // Computes the items of a phase that the thread takes; returns their number.
    template <typename Fn>
    int64_t each(size_t phase, int thread, Fn&& fn) {
        int64_t i, end, n = 0;
        for (; phases_->take(phase, thread, 1, i, end); ++n) fn(i);
        return n;
    }

    void grow(int64_t tokens, int64_t rows);
    Prefetch choose_prefetch(const CacheView& cache, int64_t n_tokens, int64_t keys);
    void took(int64_t ns);
    void make_work(const CacheView& cache, int threads);
    void make_phases(const Step& step);
    int64_t items_of(const Step& step, const Part& part) const;
    void walk(Step& step, int thread);
    void note(size_t from, size_t to, int64_t begin, int64_t end);
    int64_t run_phase(Step& step, size_t phase, int thread);
    // What each kind of operation does in a phase; returns the number of items computed.
    int64_t compute(Step&, const EmbedOp&, size_t phase, int thread);
    int64_t compute(Step&, const NormRoundOp&, size_t phase, int thread);
    int64_t compute(Step&, const GatedOp&, size_t phase, int thread);
    int64_t compute(Step&, const NormAddOp&, size_t phase, int thread);
    int64_t compute(Step&, const AddOp&, size_t phase, int thread);
    int64_t compute(Step&, const SelectOp&, size_t phase, int thread);
    int64_t compute(Step&, const LinearOp&, size_t phase, int thread);
    int64_t compute(Step&, const AttentionOp&, size_t phase, int thread);
    void make_rope(const Step& step, int64_t t);
    int64_t make_rows(Step&, size_t phase, int thread);
    void view_input(const Step&, int op, int thread);
    void make_row(const Op&, const Activations& x, int64_t r, float* y);
    void make_own_input(const Step&, const LinearOp&, int thread);
    void multiply(Step&, const LinearOp&, int64_t begin, int64_t end, int thread);
    void write_row(Step&, const AttentionOp&, const AttentionWork&, const FreshToken&, int thread);
    void begin_decode(Step&, const AttentionOp&, const WorkItem&, int thread, bool same_query);
    Writer writer(const Step&, const AttentionOp&);
    void queue_prefetch(Step&, size_t layer, int thread, int threads);
    void finish_heads(const AttentionOp&, int64_t t, int64_t heads, const Vector& norm, float* x) const;
    void finish_keys(const AttentionOp&, int64_t t, int64_t first, int64_t heads, float* x) const;
    float* row(int buffer, int64_t r) {
        return buffers_[size_t(buffer)].data.data() + r * buffers_[size_t(buffer)].stride;
    }

    std::shared_ptr<Pool> pool_;
    const Kernels& kernels_;
    std::vector<Buffer> buffers_;
    std::vector<RopeTable> ropes_;
    std::vector<Op> ops_;
    int64_t capacity_ = 0, widest_ = 0;
    std::vector<Own> own_;                            // per thread
    static constexpr int64_t kShortStep = 5'000'000;  // ns; threads hardly wait in longer ones
    std::vector<int> thread_counts_;
    Fastest threads_;  // of thread_counts_
    PrefetchTrials prefetch_;
    Lines<int8_t> codes_;
    Lines<BlockMeta> meta_;
    Lines<uint16_t> bf16_;
    std::vector<Part> parts_;  // per phase
    std::unique_ptr<Phases> phases_;
    std::vector<AttentionWork> work_;
    Lines<float> partials_;
    Lines<uint8_t> fresh_;  // memory of FreshRows
    bool tracing_ = false, loaded_ = true;
    std::vector<Timing> timings_;
};

}  // namespace kvarn
