// Products of packed weights and activations.
//
// Integer weights meet activations rounded to int8 per 32, so that the sum over a block is an exact integer, whatever
// instruction computes it. One order of floats per output, lanes being output rows, over ascending blocks:
//     acc = fma(d * dx, float(isum), acc);  acc = fma(m, dx * sumx, acc)
// BF16 weights meet activations rounded to bf16, pairs of columns in ascending order, the odd one first (as VDPBF16PS
// does it); F16 and F32 weights meet f32, columns ascending. So a row's bits depend neither on its companions nor on
// the instruction set. Non-goals: threads (the caller hands out groups), bookkeeping.
#pragma once

#include <cstdint>

#include "pack.hpp"

namespace kvarn {

constexpr int64_t kTile = 16;  // activation rows side by side

struct BlockMeta {   // of one row in one block of 32 columns
    float d;         // scale
    float s;         // scale times the sum of codes
    int32_t sum[2];  // of codes, first and second 16
};

// Rows of activations in the forms that weights ask for. int8 rows stand in tiles: [tile][block][height][32].
struct Activations {
    int64_t rows = 0, cols = 0, blocks = 0;
    int64_t height = 0;  // rows of a tile: 16, or for fewer rows the next power of two; surplus rows are zeros
    int8_t* codes = nullptr;
    BlockMeta* meta = nullptr;   // [tile][block][height]
    uint16_t* bf16 = nullptr;    // [rows][blocks * 32]
    const float* f32 = nullptr;  // [rows][stride]
    int64_t stride = 0;
};

struct Output {
    float* data = nullptr;  // [rows][stride]; whole groups of 16 are written
    int64_t stride = 0;
    const float* bias = nullptr;  // [groups * 16]
    bool add = false;             // to what stands there
};

// Memory that will be read soon: a product of many rows leaves memory idle, and can bring it nearer meanwhile.
struct PrefetchQueue {
    const uint8_t* const* spans = nullptr;
    int64_t n_spans = 0, span_bytes = 0;
    int64_t next = 0, done = 0;  // the span in progress, and its bytes that are done
};

struct Range {  // of groups of output rows, and of tiles of activation rows
    int64_t group_begin, group_end, tile_begin, tile_end;
};

struct Linear {
    void (*quantize)(const float* x, const Activations& out, int64_t row);  // into codes and meta
    void (*round)(const float* x, const Activations& out, int64_t row);     // into bf16
    void (*multiply)(const PackedMatrix& w, const Activations& x, const Output& y, const Range& range,
                     PrefetchQueue& queue);
};

}  // namespace kvarn
