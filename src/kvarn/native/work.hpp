// The work of one step's attention, and the writing of its keys and values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "isa.hpp"
#include "threads.hpp"
#include "view.hpp"

namespace kvarn {

struct Counted {  // what a run did: bytes of cells, kernel calls, time
    int64_t written = 0, read = 0, prefill = 0, decode = 0;
    int64_t prefill_ns = 0, decode_ns = 0;  // in attention, summed over threads

    void operator+=(const Counted& c) {
        written += c.written, read += c.read, prefill += c.prefill, decode += c.decode;
        prefill_ns += c.prefill_ns, decode_ns += c.decode_ns;
    }
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

}  // namespace kvarn
