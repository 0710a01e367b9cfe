// The cache as kernels see it: cache/view.py's Store, Table and LayerSpec, as plain pointers. Nothing is owned here.
#pragma once

#include <cstdint>

namespace kvarn {

enum class Codec : int32_t { F32, F16, BF16, Int8 };

constexpr int64_t cell_bytes(Codec codec) { return codec == Codec::F32 ? 4 : codec == Codec::Int8 ? 1 : 2; }

struct Strides {  // in elements
    int64_t block = 0, panel = 0, head = 0, slot = 0, dim = 0;
};

struct StoreView {
    uint8_t *k = nullptr, *v = nullptr;
    float *k_scale = nullptr, *v_scale = nullptr;
    Strides ks, vs, k_scales, v_scales;
    int64_t n_blocks = 0, block_size = 0, panel_size = 0, n_heads = 0, dim = 0;  // n_heads: stored heads
    Codec codec{};
};

struct TableView {
    const int32_t *blocks = nullptr, *first = nullptr;  // [S, N]
    const int32_t *n_blocks = nullptr, *kv_len = nullptr, *q_start = nullptr;
    const int64_t* cells = nullptr;  // [T]
    int64_t n_seqs = 0, max_blocks = 0, tokens = 0;
};

struct SpecView {
    int64_t n_heads = 0, n_kv_heads = 0, window = -1, pinned = 0;  // window -1: none

    bool visible(int64_t q, int64_t k) const { return k <= q && (window < 0 || k > q - window || k < pinned); }
    static uint32_t below(int64_t n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1u; }
    // Which of the 32 positions from `pos` some query of [first, last] may see, as bits.
    uint32_t visible32(int64_t first, int64_t last, int64_t pos) const {
        uint32_t seen = below(last + 1 - pos);
        if (window >= 0) seen &= ~below(first - window + 1 - pos) | below(pinned - pos);
        return seen;
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
};

constexpr int64_t kSlots = 32;       // of a key tile, at absolute positions
constexpr int64_t kChunk = 256;      // slots whose softmax is one piece; pieces merge in ascending order
constexpr int64_t kQueryRows = 120;  // query rows (positions times group) of a prefill unit, about
constexpr int64_t kHeadRows = 60;    // query rows of a decode unit, at most

// A unit of work of one sequence. Decode: its one query position, over slots [begin, end), for some stored heads, tile
// by tile and head by head, which is how memory lies. Prefill: query positions [begin, end) of one stored head, over
// all keys.
struct WorkItem {
    int32_t seq, head, heads;
    int64_t begin, end;
    int64_t partial;  // decode: where its (m, l, O) go, one after the other for each query head
    bool whole;       // decode: no other unit has keys of these heads, so it merges by itself
};

struct Merge {         // the partial results of one sequence and one stored head
    int64_t first, n;  // units
    int32_t seq, head;
};

int64_t scratch_bytes(int64_t dim);  // that a thread needs

struct Attention {
    int64_t (*decode)(const AttentionArgs&, const WorkItem&, float* partials, uint8_t* scratch);  // bytes read
    void (*merge)(const AttentionArgs&, const WorkItem* items, const Merge&, const float* partials);
    int64_t (*prefill)(const AttentionArgs&, const WorkItem&, uint8_t* scratch);
};

}  // namespace kvarn
