// Tiles of keys: finds the blocks that hold a tile of 32 slots. In the instruction set's namespace.
#pragma once

#include "axes.hpp"

namespace kvarn::KVARN_ISA {
namespace {

struct TileCells {
    const uint8_t* half[2];  // the first slot of each half; null if no block holds it
    const float* scale[2];

    void advance(const CellsView& cells, int64_t heads) {
        for (int h = 0; h < 2; ++h) {
            if (half[h]) half[h] += heads * cells.strides.head * cell_bytes(cells.codec);
            if (scale[h]) scale[h] += heads * cells.scale_strides.head;
        }
    }
};

struct Tile {
    int64_t pos;
    TileCells k, v;
};

inline Tile of_head(const StoreView& s, Tile t, int64_t heads) {  // the same slots of a head further on
    t.k.advance(s.k, heads);
    t.v.advance(s.v, heads);
    return t;
}

struct Walk {  // finds blocks of one sequence by position
    const AttentionArgs& a;
    const int32_t *blocks, *first;
    int64_t n, at = 0;

    Walk(const AttentionArgs& args, int64_t seq)
        : a(args),
          blocks(args.table.blocks + seq * args.table.max_blocks),
          first(args.table.first + seq * args.table.max_blocks),
          n(args.table.n_blocks[seq]) {}

    int64_t find(int64_t pos) {  // the entry that holds pos, or -1; fast if positions ascend
        if (at >= n || first[at] > pos) at = 0;
        if (at + 1 < n && first[at + 1] <= pos) {
            int64_t low = at + 1, high = n;  // first[low] <= pos < first[high]
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
        for (int h = 0; h < 2; ++h) {
            const int64_t entry = find(pos + 16 * h);
            if (entry < 0) continue;
            const int64_t block = blocks[entry], slot = pos + 16 * h - first[entry];
            const auto place = [&](const CellsView& from, TileCells& to) {
                to.half[h] = from.cells + s.offset(from.strides, block, slot) * cell_bytes(from.codec);
                if (from.scales) to.scale[h] = from.scales + s.offset(from.scale_strides, block, slot);
            };
            place(s.k, t.k);
            place(s.v, t.v);
        }
        return of_head(s, t, head);
    }
};

}  // namespace
}  // namespace kvarn::KVARN_ISA
