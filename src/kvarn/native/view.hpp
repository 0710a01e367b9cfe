// The cache as kernels see it: the Store, Table and LayerSpec of backends/host.py as plain
// pointers. Owns nothing.
#pragma once

#include <cstdint>

#include "base.hpp"

namespace kvarn {

enum class Codec : int32_t { F32, F16, BF16, Int8, Int4, Int6 };  // how numbers of K or V are stored

// A cell is the unit of a row: one number, or a word of integers. Rows of integers are rotated in
// blocks of 32 numbers, so they are padded with zeros to whole blocks. int8 has one scale per row, int4
// and int6 have a scale code per block. They have a tail, too: the int8 rows of the tile (32 positions)
// that is not full yet.
constexpr int64_t kBlockNumbers = 32;
constexpr bool rotated(Codec codec) { return codec >= Codec::Int8; }
constexpr bool has_tail(Codec codec) { return codec >= Codec::Int4; }
constexpr int64_t cell_bytes(Codec codec) { return codec == Codec::F16 || codec == Codec::BF16 ? 2 : 4; }
constexpr int64_t scale_bytes(Codec codec) { return has_tail(codec) ? 1 : 4; }
constexpr int64_t blocks_of(int64_t dim) { return ceil_div(dim, kBlockNumbers); }
constexpr int64_t cells_of(Codec codec, int64_t dim) {
    constexpr int64_t kWords[] = {8, 4, 6};  // of a block
    return rotated(codec) ? blocks_of(dim) * kWords[int(codec) - int(Codec::Int8)] : dim;
}
constexpr int64_t scales_of(Codec codec, int64_t dim) {
    return !rotated(codec) ? 0 : codec == Codec::Int8 ? 1 : blocks_of(dim);
}

// Limits that kernels rely on; bind_cache.cpp refuses a store that exceeds them. Arrays of fixed
// size: `o` in decode.cpp, `narrow` in stage.hpp, `encoded` and `TileRows` in write.cpp.
constexpr int64_t kMaxHeadDim = 256;    // numbers of one head
constexpr int64_t kMaxQueryGroup = 16;  // query heads that share one stored head

struct Strides {  // in elements
    int64_t block = 0, panel = 0, head = 0, slot = 0, dim = 0;
};

struct Place {                   // of a slot
    int64_t block, panel, slot;  // slot: in the panel
};

struct CellsView {              // K or V of one layer, or its tail
    uint8_t* cells = nullptr;   // null: there is no tail
    uint8_t* scales = nullptr;  // only if the codec has scales: floats, or codes
    Strides strides, scale_strides;
    Codec codec{};
    int64_t panel_size = 0;

    int64_t row_bytes(int64_t dim) const {
        return cells_of(codec, dim) * cell_bytes(codec) + scales_of(codec, dim) * scale_bytes(codec);
    }
    // A slot of a block, for heads from 0 on, or for one head.
    Place place(int64_t block, int64_t slot) const { return {block, slot / panel_size, slot % panel_size}; }
    uint8_t* at(const Place& p, int64_t head = 0) const {
        return cells + (offset(strides, p) + head * strides.head) * cell_bytes(codec);
    }
    uint8_t* at(int64_t block, int64_t slot) const { return at(place(block, slot)); }
    uint8_t* scale_at(const Place& p, int64_t head = 0) const {
        return scales ? scales + (offset(scale_strides, p) + head * scale_strides.head) * scale_bytes(codec) : nullptr;
    }
    uint8_t* scale_at(int64_t block, int64_t slot) const { return scale_at(place(block, slot)); }
    static int64_t offset(const Strides& st, const Place& p) {
        return p.block * st.block + p.panel * st.panel + p.slot * st.slot;
    }
};

struct StoreView {
    CellsView k, v;
    CellsView k_tail, v_tail;  // int8, two blocks of 32 slots per sequence; of codecs that have a tail
    int64_t n_blocks = 0, block_size = 0, panel_size = 0, n_heads = 0, dim = 0;  // n_heads: stored heads

    int64_t width() const { return up(dim, rotated(v.codec) ? 32 : 16); }       // of an output that is not finished
    int64_t slot_bytes() const { return k.row_bytes(dim) + v.row_bytes(dim); }  // in one slot of one head
    bool has_tail() const { return kvarn::has_tail(k.codec) || kvarn::has_tail(v.codec); }
    static int64_t tail_block(int64_t seq, int64_t pos) { return 2 * seq + pos / 32 % 2; }
};

// The int8 rows of a step with several new tokens of a sequence, for codecs that have a tail: whole
// tiles, [tile][KV head][slot]. Attention reads a query's own tile here.
struct FreshRows {
    CellsView k, v;
    const int64_t* first = nullptr;  // per sequence: the tile of its first new token
};

struct TableView {
    const int32_t *blocks = nullptr, *first = nullptr;  // [S, N]
    const int32_t *n_blocks = nullptr, *kv_len = nullptr, *q_start = nullptr;
    const int64_t* cells = nullptr;  // [T] flat index of the cell that each new token is written to; -1: none
    int64_t n_seqs = 0, max_blocks = 0, tokens = 0;
};

struct Seen {  // positions: [0, pinned) and [begin, end), where pinned <= begin
    int64_t pinned, begin, end;

    bool any(int64_t from, int64_t to) const { return from < pinned || (begin < to && from < end); }
    int64_t before(int64_t pos) const {  // how many are below pos
        const int64_t last = pos < end ? pos : end;
        return pos <= 0 ? 0 : (pos < pinned ? pos : pinned) + (last > begin ? last - begin : 0);
    }
};

// A query sees positions up to its own. A window hides those before its start, except pinned ones.
struct SpecView {
    int64_t n_heads = 0, n_kv_heads = 0, window = -1, pinned = 0;  // window -1: none

    // What some query of [first, last] sees. Everything else about visibility follows from this.
    Seen seen(int64_t first, int64_t last) const {
        const int64_t begin = window < 0 || first - window + 1 < 0 ? 0 : first - window + 1;
        return {pinned < begin ? pinned : begin, begin, last + 1};
    }
    static uint32_t below(int64_t n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1u; }
    // The 32 positions from `pos` as bits: 1 where some query of [first, last] sees the position.
    uint32_t visible32(int64_t first, int64_t last, int64_t pos) const {
        const Seen s = seen(first, last);
        return below(s.end - pos) & (~below(s.begin - pos) | below(s.pinned - pos));
    }
    uint32_t visible32(int64_t q, int64_t pos) const { return visible32(q, q, pos); }
};

// One step's attention over one layer. q and out are [T] rows of n_heads * dim floats.
struct AttentionArgs {
    StoreView store;
    TableView table;
    SpecView spec;
    float scale = 0;
    const float* q = nullptr;
    float* out = nullptr;
    int64_t q_stride = 0, out_stride = 0;
    FreshRows fresh;
    bool prefetch = true;     // decode: plain cells are prefetched
    bool same_query = false;  // decode: the scratch still has the query of the item before, which is this item's, too
};

constexpr int64_t kSlots = 32;             // slots of a key tile; tiles begin at multiples of 32 positions
constexpr int64_t kHalfTile = kSlots / 2;  // slots that always lie in one panel: panels are multiples of it
constexpr int64_t kChunk = 256;            // slots of one softmax; chunks are merged in ascending order
constexpr int64_t kQueryRows = 120;        // query rows (positions times group) of a prefill item, at most
constexpr int64_t kHeadRows = 60;          // query rows of a decode item, at most

// Work of one sequence that one thread does at a time.
//   decode    the one query position, over slots [begin, end), for `heads` heads from `head` on.
//             It reads tile by tile, and within a tile head by head, which is the order of memory.
//   prefill   query positions [begin, end) of one stored head, over all keys
struct WorkItem {
    int32_t seq, head, heads;
    int64_t begin, end;
    int64_t partial;  // decode: where (m, l, O) of its query heads go, one after the other
    bool whole;       // decode: no other item has keys of these heads, so this one also merges
};

struct Merge {         // the partial results of one sequence and one stored head
    int64_t first, n;  // decode items
    int32_t seq, head;
};

struct Attention {
    // decode and prefill return the bytes of cells that they read.
    int64_t (*decode)(const AttentionArgs&, const WorkItem&, float* partials, uint8_t* scratch);
    void (*merge)(const AttentionArgs&, const WorkItem* items, const Merge&, const float* partials);
    int64_t (*prefill)(const AttentionArgs&, const WorkItem&, uint8_t* scratch);
};

}  // namespace kvarn
