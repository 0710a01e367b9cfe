// Writing cells: encodes the keys and values of a token and puts them into its slot, or into int8 rows
// from which the cells of a whole tile are made.
#include <algorithm>
#include <cstring>

#include "work.hpp"

namespace kvarn {
namespace {

void encode(Codec codec, const CellEncoders& encoders, const float* x, int64_t dim, uint8_t* out, float* scale) {
    switch (codec) {
        case Codec::F32:
            memcpy(out, x, size_t(dim) * 4);
            return;
        case Codec::F16:
            return encoders.f16(x, reinterpret_cast<uint16_t*>(out), dim);
        case Codec::BF16:
            return encoders.bf16(x, reinterpret_cast<uint16_t*>(out), dim);
        default:  // codecs with a tail are made from int8
            return encoders.int8(x, reinterpret_cast<int8_t*>(out), scale, 1, dim);
    }
}

void put_row(const uint8_t* row, int64_t cells, int64_t stride, int64_t bytes, uint8_t* to) {
    if (stride == 1)
        memcpy(to, row, size_t(cells * bytes));
    else if (bytes == 2)
        for (int64_t i = 0; i < cells; ++i) memcpy(to + i * stride * 2, row + i * 2, 2);
    else
        for (int64_t i = 0; i < cells; ++i) memcpy(to + i * stride * 4, row + i * 4, 4);
}

struct Slot {
    int64_t block, slot;
};

// Encodes n_kv_heads vectors into some stored heads of one slot.
void put(const CellEncoders& encoders, const float* from, int64_t dim, const CellsView& to, Slot at, HeadRange heads,
         int64_t copies) {
    alignas(64) uint8_t encoded[kMaxHeadDim * sizeof(float)];
    const int64_t bytes = cell_bytes(to.codec);
    uint8_t *cells = to.at(at.block, at.slot), *scales = to.scale_at(at.block, at.slot);
    float scale = 0;
    for (int64_t h = heads.begin; h < heads.end; ++h) {
        if (h == heads.begin || h % copies == 0)
            encode(to.codec, encoders, from + h / copies * dim, dim, encoded, &scale);
        put_row(encoded, cells_of(to.codec, dim), to.strides.dim, bytes, cells + h * to.strides.head * bytes);
        if (scales) memcpy(scales + h * to.scale_strides.head * 4, &scale, 4);
    }
}

// One row of int8, of one head.
struct Int8Row {
    alignas(64) uint8_t codes[kMaxHeadDim];
    float scale;
};

Int8Row int8_row(const CellsView& from, Slot at, int64_t head, int64_t dim) {
    Int8Row row;
    const uint8_t* cells = from.at(at.block, at.slot) + head * from.strides.head * 4;
    if (from.strides.dim == 1)
        memcpy(row.codes, cells, size_t(cells_of(Codec::Int8, dim)) * 4);
    else
        for (int64_t w = 0; w < cells_of(Codec::Int8, dim); ++w)
            memcpy(row.codes + w * 4, cells + w * from.strides.dim * 4, 4);
    memcpy(&row.scale, from.scale_at(at.block, at.slot) + head * from.scale_strides.head * 4, 4);
    return row;
}

void put_int8_row(const Int8Row& row, const CellsView& to, Slot at, int64_t head, int64_t dim) {
    put_row(row.codes, cells_of(Codec::Int8, dim), to.strides.dim, 4,
            to.at(at.block, at.slot) + head * to.strides.head * 4);
    memcpy(to.scale_at(at.block, at.slot) + head * to.scale_strides.head * 4, &row.scale, 4);
}

struct TileRows {  // a tile of one head: int8 rows and the cells that are made from them
    alignas(64) int8_t codes[kSlots * kMaxHeadDim];
    float scales[kSlots];
    alignas(64) uint8_t cells[kSlots * kMaxHeadDim];
    uint8_t scale_codes[kSlots * kMaxHeadDim / kBlockNumbers];
};

// Makes the cells of a full tile, whose int8 rows lie in one block of `from`. Its stored head h has the
// rows of head h / copies.
void make_cells(const CellEncoders& encoders, int64_t dim, const CellsView& from, int64_t from_block, int64_t copies,
                const CellsView& to, Slot first, HeadRange heads) {
    const int64_t depth = up(dim, kBlockNumbers), words = cells_of(to.codec, dim), blocks = blocks_of(dim);
    TileRows tile;
    for (int64_t h = heads.begin; h < heads.end; ++h) {
        if (h == heads.begin || h % copies == 0) {
            for (int64_t s = 0; s < kSlots; ++s) {
                const Int8Row row = int8_row(from, {from_block, s}, h / copies, dim);
                memcpy(tile.codes + s * depth, row.codes, size_t(depth));
                tile.scales[s] = row.scale;
            }
            const auto make = to.codec == Codec::Int4 ? encoders.int4 : encoders.int6;
            make(tile.codes, tile.scales, tile.cells, tile.scale_codes, kSlots, depth);
        }
        for (int64_t s = 0; s < kSlots; ++s) {
            put_row(tile.cells + s * words * 4, words, to.strides.dim, 4,
                    to.at(first.block, first.slot + s) + h * to.strides.head * 4);
            uint8_t* codes = to.scale_at(first.block, first.slot + s) + h * to.scale_strides.head;
            for (int64_t g = 0; g < blocks; ++g) codes[g * to.scale_strides.dim] = tile.scale_codes[s * blocks + g];
        }
    }
}

struct Lane {  // K or V
    const CellsView &cells, &tail, &fresh;

    int64_t row_bytes(int64_t dim) const { return (has_tail(cells.codec) ? tail : cells).row_bytes(dim); }
};

Lane keys_of(const Writer& w) { return {w.store.k, w.store.k_tail, w.fresh.k}; }
Lane values_of(const Writer& w) { return {w.store.v, w.store.v_tail, w.fresh.v}; }

}  // namespace

void prefetch_write(const StoreView& s, int64_t cell, HeadRange heads) {
    const Strides& st = s.k.strides;
    if (cell < 0 || st.dim == 1 || has_tail(s.k.codec)) return;  // a contiguous row is only a few cache lines
    const uint8_t* at = s.k.at(cell / s.block_size, cell % s.block_size);
    for (int64_t h = heads.begin; h < heads.end; ++h)
        for (int64_t i = 0; i < cells_of(s.k.codec, s.dim); ++i)
            __builtin_prefetch(at + (h * st.head + i * st.dim) * cell_bytes(s.k.codec), 1);
}

int64_t fresh_bytes(const StoreView& store, int64_t tiles, int64_t n_kv_heads) {
    const int64_t parts = has_tail(store.k.codec) + has_tail(store.v.codec);
    return parts * fresh_bytes(tiles, n_kv_heads, store.dim);
}

FreshRows fresh_rows(uint8_t* memory, const StoreView& store, const AttentionWork& work, int64_t n_kv_heads) {
    const int64_t units = cells_of(Codec::Int8, store.dim), rows = int64_t(work.tiles.size()) * n_kv_heads * kSlots;
    const auto carve = [&](const CellsView& cells) {
        CellsView view;
        if (!has_tail(cells.codec)) return view;
        view.codec = Codec::Int8;
        view.panel_size = kSlots;
        view.strides = {n_kv_heads * kSlots * units, 0, kSlots * units, units, 1};
        view.scale_strides = {n_kv_heads * kSlots, 0, kSlots, 1, 0};
        view.cells = memory, memory += rows * units * 4;
        view.scales = memory, memory += rows * int64_t(sizeof(float));
        return view;
    };
    FreshRows fresh;
    fresh.k = carve(store.k), fresh.v = carve(store.v);
    fresh.first = work.first.data();
    return fresh;
}

int64_t Writer::write_token(int64_t seq, HeadRange heads, const float* k, const float* v) const {
    const int64_t cell = table.cells[table.q_start[seq]], pos = table.kv_len[seq] - 1, slot = pos % kSlots;
    const int64_t copies = store.n_heads / n_kv_heads, n = heads.end - heads.begin;
    const Slot at{cell / store.block_size, cell % store.block_size};
    const auto write = [&](const float* from, const Lane& to) {
        const int64_t bytes = n * to.row_bytes(store.dim), block = StoreView::tail_block(seq, pos);
        if (!has_tail(to.cells.codec)) {
            put(encoders, from, store.dim, to.cells, at, heads, copies);
            return bytes;
        }
        put(encoders, from, store.dim, to.tail, {block, slot}, heads, copies);
        if (slot != kSlots - 1) return bytes;
        make_cells(encoders, store.dim, to.tail, block, 1, to.cells, {at.block, at.slot - slot}, heads);
        return bytes + n * kSlots * to.cells.row_bytes(store.dim);
    };
    return write(k, keys_of(*this)) + write(v, values_of(*this));
}

int64_t Writer::write_row(const AttentionWork& work, const FreshToken& row, const float* k, const float* v) const {
    const int64_t cell = table.cells[row.token], slot = row.pos % kSlots, copies = store.n_heads / n_kv_heads;
    const auto write = [&](const float* from, const Lane& to) {
        const int64_t bytes = store.n_heads * to.row_bytes(store.dim);
        if (!has_tail(to.cells.codec)) {
            put(encoders, from, store.dim, to.cells, {cell / store.block_size, cell % store.block_size},
                {0, store.n_heads}, copies);
            return bytes;
        }
        const int64_t first_pos = table.kv_len[row.seq] - (table.q_start[row.seq + 1] - table.q_start[row.seq]);
        const int64_t block = work.first[size_t(row.seq)] + row.pos / kSlots - first_pos / kSlots;
        put(encoders, from, store.dim, to.fresh, {block, slot}, {0, n_kv_heads}, 1);
        for (int64_t s = 0; row.pos == first_pos && s < slot; ++s)  // the tile's earlier rows
            for (int64_t h = 0; h < n_kv_heads; ++h) {
                const Slot there{StoreView::tail_block(row.seq, row.pos), s};
                put_int8_row(int8_row(to.tail, there, h * copies, store.dim), to.fresh, {block, s}, h, store.dim);
            }
        return bytes;
    };
    return write(k, keys_of(*this)) + write(v, values_of(*this));
}

int64_t Writer::finish_tile(const AttentionWork& work, int64_t index) const {
    const FreshTile& tile = work.tiles[size_t(index)];
    const int64_t copies = store.n_heads / n_kv_heads, block = StoreView::tail_block(tile.seq, tile.pos);
    int64_t bytes = 0;
    for (const Lane& to : {keys_of(*this), values_of(*this)}) {
        if (!has_tail(to.cells.codec)) continue;
        if (tile.end == tile.pos + kSlots) {
            const int64_t cell = table.cells[tile.token + tile.end - 1 - tile.begin] - (kSlots - 1);
            make_cells(encoders, store.dim, to.fresh, index, copies, to.cells,
                       {cell / store.block_size, cell % store.block_size}, {0, store.n_heads});
            bytes += store.n_heads * kSlots * to.cells.row_bytes(store.dim);
        }
        for (int64_t s = tile.begin - tile.pos; tile.kept && s < tile.end - tile.pos; ++s)
            for (int64_t h = 0; h < store.n_heads; ++h)
                put_int8_row(int8_row(to.fresh, {index, s}, h / copies, store.dim), to.tail, {block, s}, h, store.dim);
    }
    return bytes;
}

}  // namespace kvarn
