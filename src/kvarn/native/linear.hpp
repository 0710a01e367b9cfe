// Products of packed weights and activations.
//
// Integer weights are multiplied with activations that are rounded to int8 per 32 columns. So the
// sum over a block is an exact integer on every instruction set. An output is one chain over
// ascending blocks; lanes are output rows. d and m are scale and minimum of the weights, dx and
// sumx are scale and sum of the activation codes:
//     acc = fma(d * dx, float(isum), acc);  acc = fma(m, dx * sumx, acc)
// BF16 weights are multiplied with activations rounded to bf16, summed in one of the two orders of
// isa.hpp. F16 and F32 weights are multiplied with f32, columns ascending. So the bits of a row
// depend neither on the other rows nor on the instruction set. Non-goals: threads (the caller hands
// out groups), bookkeeping.
#pragma once

#include <cstdint>

#include "pack.hpp"

namespace kvarn {

constexpr int64_t kTile = 16;  // activation rows of a tile

struct BlockMeta {   // of one row in one block of 32 columns
    float d;         // scale
    float s;         // scale times the sum of codes
    int32_t sum[2];  // of the codes of the first and the last 16 columns
};

// Rows of activations in the forms that weights need. int8 rows are in tiles:
// [tile][block][height][32].
struct Activations {
    int64_t rows = 0, cols = 0, blocks = 0;
    int64_t height = 0;  // rows of a tile: 16, or for fewer rows the next power of two; the rest is zeros
    int8_t* codes = nullptr;
    BlockMeta* meta = nullptr;   // [tile][block][height]
    uint16_t* bf16 = nullptr;    // [rows][blocks * 32]
    const float* f32 = nullptr;  // [rows][stride]
    int64_t stride = 0;
};

struct Output {
    float* data = nullptr;  // [rows][stride]; kernels write whole groups of 16
    int64_t stride = 0;
    const float* bias = nullptr;  // [groups * 16]
    bool add = false;             // add to what `data` holds
};

// Spans of memory to prefetch. A product of many rows is bound by arithmetic, so it can prefetch
// what the next operation reads.
struct PrefetchQueue {
    const uint8_t* const* spans = nullptr;
    int64_t n_spans = 0, span_bytes = 0;
    int64_t next = 0, done = 0;  // current span, and how many of its bytes are done
};

struct Range {  // groups of output rows, and tiles of activation rows
    int64_t group_begin, group_end, tile_begin, tile_end;
};

struct Linear {
    void (*quantize)(const float* x, const Activations& out, int64_t row);  // into codes and meta
    void (*round)(const float* x, const Activations& out, int64_t row);     // into bf16
    void (*multiply)(const PackedMatrix& w, const Activations& x, const Output& y, const Range& range,
                     PrefetchQueue& queue);
};

}  // namespace kvarn
