// Tiles of keys: finds the blocks that hold a tile of 32 slots. In the instruction set's namespace.
#pragma once

#include "axes.hpp"

namespace kvarn::KVARN_ISA {
namespace {

struct TileCells {
    const CellsView* view;   // the cells of the layer, or int8 rows that are not cells yet
    const uint8_t* half[2];  // the first slot of each half; null if no block holds it
    const uint8_t* scale[2];

    void advance(int64_t heads) {  // to the same slots of a head further on
        for (int h = 0; h < 2; ++h) {
            if (half[h]) half[h] += heads * view->strides.head * cell_bytes(view->codec);
            if (scale[h]) scale[h] += heads * view->scale_strides.head * scale_bytes(view->codec);
        }
    }
};

struct Tile {
    int64_t pos;
    TileCells k, v;
};

// Where the tile of the queries lies as int8 rows: the tail, or the fresh rows of the step.
struct OwnTile {
    int64_t pos = -1;  // of its first slot; -1: it lies where all others are
    const CellsView *k = nullptr, *v = nullptr;
    int64_t block = 0;
    int64_t copies = 1;  // stored heads per head of the rows

    static OwnTile of_tail(const AttentionArgs& a, int64_t seq, int64_t q_pos) {
        if (!a.store.has_tail()) return {};
        return {q_pos / kSlots * kSlots, &a.store.k_tail, &a.store.v_tail, StoreView::tail_block(seq, q_pos), 1};
    }
    static OwnTile of_step(const AttentionArgs& a, int64_t seq, int64_t q_pos, int64_t first_pos) {
        if (!a.store.has_tail()) return {};
        const int64_t block = a.fresh.first[seq] + q_pos / kSlots - first_pos / kSlots;
        return {q_pos / kSlots * kSlots, &a.fresh.k, &a.fresh.v, block, a.store.n_heads / a.spec.n_kv_heads};
    }
};

struct Walk {  // finds blocks of one sequence by position
    const AttentionArgs& a;
    const int32_t *blocks, *first;
    int64_t n, at = 0;
    OwnTile own;

    Walk(const AttentionArgs& args, int64_t seq, OwnTile own_tile)
        : a(args),
          blocks(args.table.blocks + seq * args.table.max_blocks),
          first(args.table.first + seq * args.table.max_blocks),
          n(args.table.n_blocks[seq]),
          own(own_tile) {}

    int64_t find(int64_t pos) {  // the entry that holds pos, or -1; fast for the same entry and the next
        if (at >= n || first[at] > pos) at = 0;
        if (at + 1 < n && first[at + 1] <= pos) {
            int64_t low = at + 1,
                    high = at + 2 < n && first[at + 2] <= pos ? n : at + 2;  // first[low] <= pos < first[high]
            while (high - low > 1) {
                const int64_t mid = (low + high) / 2;
                (first[mid] <= pos ? low : high) = mid;
            }
            at = low;
        }
        return at < n && first[at] <= pos && pos < first[at] + a.store.block_size ? at : -1;
    }

    Tile tile(int64_t pos, int64_t head) {
        const StoreView& s = a.store;
        Tile t{};
        t.pos = pos;
        t.k.view = &s.k, t.v.view = &s.v;
        for (int h = 0; h < 2; ++h) {
            const int64_t entry = find(pos + 16 * h);
            if (entry < 0) continue;
            const Place at = s.k.place(blocks[entry], pos + 16 * h - first[entry]);  // V has the panels of K
            t.k.half[h] = s.k.at(at, head), t.k.scale[h] = s.k.scale_at(at, head);
            t.v.half[h] = s.v.at(at, head), t.v.scale[h] = s.v.scale_at(at, head);
        }
        if (pos == own.pos) {
            if (own.k->cells) t.k = own_cells(*own.k, head);
            if (own.v->cells) t.v = own_cells(*own.v, head);
        }
        return t;
    }

    TileCells own_cells(const CellsView& rows, int64_t head) const {
        TileCells t{&rows, {}, {}};
        for (int h = 0; h < 2; ++h) {
            const Place at = rows.place(own.block, 16 * h);
            t.half[h] = rows.at(at, head / own.copies), t.scale[h] = rows.scale_at(at, head / own.copies);
        }
        return t;
    }
};

}  // namespace
}  // namespace kvarn::KVARN_ISA
