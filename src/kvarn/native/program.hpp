// A model as a list of operations over numbered buffers; a step is one pass over the list.
//
// A program is built once: backends/cpu adds buffers, weights and operations in order. `run` gives
// the list to the pool, as phases (threads.hpp): an operation is one phase, attention has four. Which
// thread computes an item changes no bit. Workspaces grow to the largest step and are kept. Non-goals: what
// a model is, where weights come from, sampling.
#pragma once

#include <algorithm>
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

struct FreshToken {  // a token of a sequence with several new ones
    int64_t token, seq, pos;
};

struct FreshTile {  // 32 positions from `pos` on, of which [begin, end) are new
    int64_t seq, pos, begin, end;
    int64_t token;  // the new token at `begin`
    bool kept;      // its new rows go into the tail: no tile but the last two
};

// The attention of one step, for every layer of one group.
struct AttentionWork {
    std::vector<FreshToken> rows;  // prefill tokens: all their keys are written before one is read
    std::vector<FreshTile> tiles;  // of the same sequences, if a codec has a tail
    std::vector<int64_t> first;    // per sequence: its first tile
    std::vector<WorkItem> decode, prefill;
    std::vector<Merge> merges;
    int64_t partial_floats = 0;

    void make(const TableView& table, const SpecView& spec, const StoreView& store, int threads);
    void make_tiles(const TableView& table);
};

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

// The memory of FreshRows, for one layer at a time: for a step of so many tokens of so many sequences.
constexpr int64_t most_tiles(int64_t tokens, int64_t seqs) { return tokens / kSlots + 2 * std::min(seqs, tokens / 2); }
constexpr int64_t fresh_bytes(int64_t tiles, int64_t n_kv_heads, int64_t dim) {  // of K or V
    return tiles * n_kv_heads * kSlots * (up(dim, kBlockNumbers) + int64_t(sizeof(float)));
}
int64_t fresh_bytes(const StoreView& store, int64_t tiles, int64_t n_kv_heads);
FreshRows fresh_rows(uint8_t* memory, const StoreView& store, const AttentionWork& work, int64_t n_kv_heads);

// Writes the keys and values of one layer and step. A row is n_kv_heads vectors of dim numbers.
struct Writer {
    const StoreView& store;
    const TableView& table;
    const CellEncoders& encoders;
    int64_t n_kv_heads;
    FreshRows fresh;

    // The one new token of a sequence, for some stored heads. Returns the bytes written.
    int64_t write_token(int64_t seq, HeadRange heads, const float* k, const float* v) const;
    // One of several. Where the codec has a tail, its row goes to the fresh rows.
    int64_t write_row(const AttentionWork& work, const FreshToken& row, const float* k, const float* v) const;
    // Once the rows of a tile are written: makes its cells if it is full, and keeps its new rows in the tail.
    // Returns the bytes of its cells.
    int64_t finish_tile(const AttentionWork& work, int64_t index) const;
};

// Attention and writes of one layer without a program, for conformance tests. `fresh` is the memory of
// FreshRows: the write fills it, the attention of the same step reads it.
Counted attend(Pool& pool, const Kernels& kernels, AttentionArgs args, Lines<uint8_t>& fresh, bool prefill,
               bool decode);
int64_t write(const Kernels& kernels, const StoreView& store, const TableView& table, int64_t n_kv_heads,
              Lines<uint8_t>& fresh, const float* k, const float* v);

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
    // Each thread may compute its own copy at the start of the next linear, which is the only reader.
    bool per_thread = false;
    int input = -1;  // of a linear: the operation that made its rows
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
        std::vector<Counted> counted;  // per thread

        int64_t rows_of(const Op& op) const { return op.wanted_rows_only ? n_rows : n_tokens; }
        bool per_thread(const Op& op) const { return op.per_thread && rows_of(op) == 1; }
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
    void make_work(const CacheView& cache);
    void make_phases(const Step& step);
    int64_t items_of(const Step& step, const Part& part) const;
    void walk(Step& step, int thread);
    void note(size_t from, size_t to, int64_t begin, int64_t end);
    int64_t run_phase(Step& step, size_t phase, int thread);
    void make_rope(const Step& step, int64_t t);
    void embed(const Step&, const Op&, int64_t t);
    void view_input(const Step&, int op, int thread);
    void make_row(const Op&, const Activations& x, int64_t r, float* y);
    void make_own_input(const Step&, const Op& linear, int thread);
    int64_t linear(Step&, const Op&, size_t phase, int thread);
    int64_t attention(Step&, const Op&, size_t phase, int thread);
    void write_row(Step&, const Op&, const AttentionWork&, const FreshToken&, int thread);
    void begin_decode(Step&, const Op&, const WorkItem&, int thread, bool same_query);
    Writer writer(const Step&, const Op&);
    void queue_prefetch(Step&, size_t layer, int thread, int threads);
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
    std::vector<Part> parts_;  // per phase
    std::unique_ptr<Phases> phases_;
    std::vector<AttentionWork> work_;
    Lines<float> partials_;
    Lines<uint8_t> fresh_;  // memory of FreshRows
    bool tracing_ = false, loaded_ = true;
    std::vector<Timing> timings_;
};

}  // namespace kvarn
