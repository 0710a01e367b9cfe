// Weights as a CUDA device reads them: blocks of a file become tiles of codes and headers of f16
// numbers. backends/cuda/planes.py shows the layout and defines the numbers.
//
// A row takes two steps: its blocks become one byte per column and an f32 scale (and offset) per block
// of the planes, and these become tiles and headers. Non-goals: threads, products.
#pragma once

#include <cstdint>
#include <string>

#include "base.hpp"

namespace kvarn {

constexpr int64_t kPlaneRows = 16;  // whose tiles lie together

struct PlaneType {
    const char* name;
    int64_t columns, bytes;       // of a block in the file
    int64_t scale_at, offset_at;  // the bytes of its f16 numbers; -1: it has no offset
    int64_t bits;                 // of a code
    int64_t blocks, span;         // of a unit; columns of a block
    int64_t tiles;                // of a unit
    bool offsets;                 // in the headers
    // `blocks` of the file: codes of all columns, and scales, or pairs of a scale and an offset.
    void (*read)(const uint8_t* from, int64_t blocks, uint8_t* codes, float* numbers);
    void (*put_unit)(const uint8_t* codes, uint16_t* tiles);  // one row of the tiles of a unit

    constexpr int64_t unit() const { return blocks * span; }  // columns
    constexpr int64_t words() const { return offsets ? blocks : blocks / 2; }
    constexpr int64_t units(int64_t row_bytes) const { return ceil_div(row_bytes / bytes * columns, unit()); }
};

const PlaneType* find_plane_type(const std::string& name);  // null if this type is not packed

struct Largest {
    float scale = 0.0f, offset = 0.0f;
};
Largest largest_scales(const PlaneType& type, const uint8_t* blocks, int64_t n);  // sizes of the finite ones

struct PlanesOut {
    uint16_t* codes;          // [rows / 16, units, tiles, 16, span]
    int64_t row;              // the first one there
    uint32_t* headers;        // [units, words, columns]
    int64_t column, columns;  // the first one; all
};

// n rows of the file. Scales and offsets are multiplied by 2 to this power; columns behind the row are
// zero.
void pack_planes(const PlaneType& type, const uint8_t* rows, int64_t n, int64_t row_bytes, int power,
                 const PlanesOut& out);

}  // namespace kvarn
