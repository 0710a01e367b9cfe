// A thread's scratch memory for attention. One list below names the arrays and their sizes. It is
// used twice: to compute the size of the memory, and to divide the memory into the arrays.
#pragma once

#include <algorithm>

#include "base.hpp"
#include "view.hpp"

namespace kvarn {

constexpr int64_t kMaxRows = 128;                             // query rows of a work item, at most
constexpr int64_t kScratchRows = 64;                          // query rows that are computed together, at most
constexpr int64_t kSpanBytes = kChunk + kChunk / kSlots * 8;  // of a row's weights as integers (integers.hpp)
constexpr int64_t kAmxRows = 16;  // query rows that one AMX tile holds; AMX stores whole tiles
static_assert(kQueryRows <= kMaxRows && kHeadRows <= kScratchRows && kMaxQueryGroup <= kHeadRows);

struct Scratch {               // depth: head dims, rounded up to 32
    uint8_t* q;                // [kMaxRows][depth], bf16 or f32
    float* s;                  // [kScratchRows][kChunk] scores
    uint8_t* p;                // [kScratchRows][kChunk] softmax weights, bf16 or f32; or rows of integers.hpp
    uint8_t *k, *v;            // staged tiles of one chunk
    float* rows;               // [kSlots][depth] one tile in f32, on its way into k or v
    float* o;                  // [kMaxRows][depth] outputs over all chunks
    float* part;               // [kScratchRows + kAmxRows][depth] outputs over one chunk
    float *k_scale, *v_scale;  // [depth / 32][kChunk]: factors of the cells of one chunk
};

struct Carver {  // hands out memory, aligned to cache lines
    uint8_t* at;

    uint8_t* take(int64_t bytes) {
        uint8_t* p = at;
        at += up(bytes, 64);
        return p;
    }
};

struct Sizer {  // only counts what a Carver would hand out
    int64_t* total;

    uint8_t* take(int64_t bytes) {
        *total += up(bytes, 64);
        return nullptr;
    }
};

// carve<Carver>(memory, dim) gives the arrays, carve<Sizer>(&total, dim) only adds up their bytes.
template <typename Memory, typename From>
static inline Scratch carve(From from, int64_t dim) {
    const int64_t depth = up(dim, 32);
    Memory memory{from};
    Scratch x;
    x.q = memory.take(kMaxRows * depth * 4);
    x.s = reinterpret_cast<float*>(memory.take(kScratchRows * kChunk * 4));
    x.p = memory.take(kScratchRows * std::max(kChunk * 4, depth / 32 * kSpanBytes));
    x.k = memory.take(kChunk * depth * 4);
    x.v = memory.take(kChunk * depth * 4);
    x.rows = reinterpret_cast<float*>(memory.take(kSlots * depth * 4));
    x.o = reinterpret_cast<float*>(memory.take(kMaxRows * depth * 4));
    x.part = reinterpret_cast<float*>(memory.take((kScratchRows + kAmxRows) * depth * 4));
    x.k_scale = reinterpret_cast<float*>(memory.take(depth / 32 * kChunk * 4));
    x.v_scale = reinterpret_cast<float*>(memory.take(depth / 32 * kChunk * 4));
    return x;
}

static inline int64_t scratch_bytes(int64_t dim) {
    int64_t total = 0;
    carve<Sizer>(&total, dim);
    return total;
}

}  // namespace kvarn
