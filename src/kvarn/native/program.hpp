// A model as a list of operations over numbered buffers; a step is one pass over the list.
//
// A program is built once: backends/cpu adds buffers, weights and operations in order. `run` gives
// the list to the pool. Every thread goes through the list. It computes its share of an operation's
// items and then waits at a barrier. Workspaces grow to the largest step and are kept. Non-goals:
// what a model is, where weights come from, sampling.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "isa.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "threads.hpp"
#include "view.hpp"

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

struct Counted {  // what a run did: bytes of cells, kernel calls, time
    int64_t written = 0, read = 0, prefill = 0, decode = 0;
    int64_t prefill_ns = 0, decode_ns = 0;  // in attention, summed over threads

    void operator+=(const Counted& c) {
        written += c.written, read += c.read, prefill += c.prefill, decode += c.decode;
        prefill_ns += c.prefill_ns, decode_ns += c.decode_ns;
    }
};

struct Timing {
    int32_t op;
    int64_t begin, end;  // ns
};

struct HeadRange {  // of stored heads
    int64_t begin, end;
};

// Prefetches the cells that a token's keys will be written to.
void prefetch_write(const StoreView& store, int64_t cell, HeadRange heads);

// Encodes one token's keys and values (n_kv_heads rows of dim each) into its cell. Returns the
// bytes written.
int64_t write_heads(const StoreView& store, const CellEncoders& encoders, int64_t cell, HeadRange heads, const float* k,
                    const float* v, int64_t n_kv_heads);

// The attention of one step, for every layer of one group.
struct AttentionWork {
    std::vector<int64_t> rows;  // prefill tokens: all their keys are written before one is read
    std::vector<WorkItem> decode, prefill;
    std::vector<Merge> merges;
    int64_t partial_floats = 0;

    void make(const TableView& table, const SpecView& spec, const StoreView& store, int threads);
};

// Attention of one layer without a program, for conformance tests.
Counted attend(Pool& pool, const Kernels& kernels, const AttentionArgs& args, bool prefill, bool decode);

template <typename T>
struct InLines {  // an allocator that aligns to cache lines: a load across two lines costs two
    using value_type = T;
    InLines() = default;
    template <typename U>
    InLines(const InLines<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const InLines&) const { return true; }
};
template <typename T>
using Lines = std::vector<T, InLines<T>>;

struct RopeTable {
    std::vector<double> frequencies;
    float magnitude = 1;
    std::vector<float> cos, sin;  // [T, half] of the current step
};

using Vector = std::shared_ptr<std::vector<float>>;  // weight of a norm, or bias; padded with zeros

struct Segment {  // a matrix of a linear operation
    PackedMatrix weight;
    Vector bias;
    int out = -1;
    bool add = false;
};

struct Op {
    enum class Kind { Embed, NormRound, NormAdd, Add, Linear, Attention, Gated, Select, Logits } kind{};
    std::string name;
    bool wanted_rows_only = false;  // runs over the rows that the caller wants, not over all tokens
    // Each thread may compute its own copy, without a barrier: the next linear is the only reader.
    bool per_thread = false;
    int in = -1, in2 = -1, in3 = -1, out = -1;
    float scale = 1, eps = 0;
    bool needs_int8 = false, needs_bf16 = false;  // forms of the output that the next linear reads
    Vector weight, weight2;                       // norms
    Vector centre;                                // of keys; null: none
    PackedMatrix matrix;
    std::vector<Segment> segments;
    int layer = 0, rope = -1, heads = 0, kv_heads = 0, head_dim = 0;
    Gate gate{};
};

class Program {
  public:
    Program(std::shared_ptr<Pool> pool, const Kernels& kernels)
        : pool_(std::move(pool)), kernels_(kernels), own_(size_t(pool_->size())) {}
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
    void reserve(int64_t tokens) { grow(tokens, 0); }  // grows workspaces for steps of this many tokens
    int64_t vocabulary() const;
    int64_t workspace_bytes() const;
    // What workspace_bytes becomes after steps of `tokens` tokens, and after `sequences` sequences
    // that decode and see `keys` keys each. Nothing is allocated.
    int64_t workspace_for(int64_t tokens, int64_t sequences, int64_t keys) const;
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
        std::vector<Counted> counted;  // per thread

        int64_t rows_of(const Op& op) const { return op.wanted_rows_only ? n_rows : n_tokens; }
        bool per_thread(const Op& op) const { return op.per_thread && rows_of(op) == 1; }
    };

    void grow(int64_t tokens, int64_t rows);
    void walk(Step& step, int thread);
    void run_op(Step& step, const Op& op, size_t index, int thread);
    void embed(Step&, const Op&, Shares&, int thread);
    void make_linear_input(Step&, const Op&, Shares&, int thread);
    void linear(Step&, const Op&, Shares&, int thread);
    void attention(Step&, const Op&, size_t index, int thread);
    void write_rows(Step&, const Op&, const AttentionWork&, Shares&, int thread);
    void begin_decode(Step&, const Op&, const WorkItem&, int thread);
    void queue_prefetch(Step&, size_t layer, int thread);
    void finish_heads(const Op&, int64_t t, int64_t heads, const Vector& norm, float* x) const;
    void finish_keys(const Op&, int64_t t, int64_t first, int64_t heads, float* x) const;
    float* row(int buffer, int64_t r) {
        return buffers_[size_t(buffer)].data.data() + r * buffers_[size_t(buffer)].stride;
    }

    std::shared_ptr<Pool> pool_;
    const Kernels& kernels_;
    std::vector<Buffer> buffers_;
    std::vector<RopeTable> ropes_;
    std::vector<Op> ops_;
    int64_t capacity_ = 0, widest_ = 0;
    std::vector<Own> own_;  // per thread
    Lines<int8_t> codes_;
    Lines<BlockMeta> meta_;
    Lines<uint16_t> bf16_;
    std::vector<std::vector<Shares>> shares_;  // per operation, one per phase
    std::vector<AttentionWork> work_;
    Lines<float> partials_;
    bool tracing_ = false, loaded_ = true;
    std::vector<Timing> timings_;
};

}  // namespace kvarn
