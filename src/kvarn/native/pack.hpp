// Weights as kernels read them: groups of 16 output rows in blocks of 32 columns; lanes are rows.
//
// A group is its scales, then its codes, each aligned to 64 bytes. The codes of one block are
// vectors of 64 bytes. Byte [row * 4 + j] of vector g is column 4g + j:
//
//   2 bits    two planes of bit pairs (vectors 0..3 and 4..7)                 Q2_K
//   3 bits    those, then a plane whose byte i has bit g of vector g          Q3_K
//   4 bits    4 vectors; low nibbles are vectors 0..3, high ones 4..7         Q4_0 Q4_1 Q4_K tables
//   5 bits    a plane whose byte i has bit g of vector g, then the nibbles    Q5_0 Q5_1 Q5_K
//   6 bits    the two planes of pairs, then the nibbles                       Q6_K
//   8 bits    8 vectors, code + 128                                           Q8_0
//
// Scales (ScaleLayout has the offsets):
//
//   Q4_0 Q5_0 Q8_0   per block f16 d[16]
//   Q4_1 Q5_1        per block f16 d[16], m[16]
//   Q4_K Q5_K        per 256 columns f16 d[16], dmin[16]; per block u8 sc[16], mn[16]
//   Q2_K             per 256 columns f16 d[16], dmin[16]; per 16 columns u8 [16]: low nibble sc,
//                    high nibble mn
//   Q3_K Q6_K        per 256 columns f16 d[16]; per 16 columns i8 sc[16]
//   Table16 Table32  per 256 columns f32 d[16]; per 16 or 32 columns i8 sc[16]
//   Table            per block f32 d[16]
//
// All other integer types become tables: each of them takes its numbers from at most 16 values.
// BF16 keeps pairs of columns together, [pair][row][2]; F16 and F32 are [column][row]. Nothing here
// rounds: unpacking gives the bits that dequantizing the file gives. Non-goals: multiplying,
// threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace kvarn {

enum class Kind : int32_t {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Table16,  // a scale per 256 columns, a factor per 16
    Table32,  // a scale per 256 columns, a factor per 32
    Table,    // a scale per 32 columns
    BF16,
    F16,
    F32
};

constexpr int64_t kGroup = 16;  // output rows of a group
constexpr int64_t kBlock = 32;  // columns that share an activation scale

struct PackedMatrix {
    Kind kind{};
    int64_t rows = 0, cols = 0;  // of the model, without padding
    int64_t groups = 0, blocks = 0;
    int64_t scale_bytes = 0, group_bytes = 0;  // of one group
    uint8_t table[16] = {};                    // tables: value + 128
    std::shared_ptr<uint8_t> data;

    const uint8_t* scales(int64_t group) const { return data.get() + group * group_bytes; }
    const uint8_t* codes(int64_t group) const { return scales(group) + scale_bytes; }
    int64_t nbytes() const { return groups * group_bytes; }
    bool integer() const { return kind < Kind::BF16; }
};

const char* name_of(Kind kind);

constexpr int64_t code_bits(Kind kind) {
    switch (kind) {
        case Kind::Q2_K:
            return 2;
        case Kind::Q3_K:
            return 3;
        case Kind::Q5_0:
        case Kind::Q5_1:
        case Kind::Q5_K:
            return 5;
        case Kind::Q6_K:
            return 6;
        case Kind::Q8_0:
            return 8;
        case Kind::BF16:
        case Kind::F16:
            return 16;
        case Kind::F32:
            return 32;
        default:
            return 4;
    }
}
constexpr int64_t code_bytes(Kind kind) { return code_bits(kind) * kGroup * kBlock / 8; }  // of one block of one group

// Where the scales of a group are. One record serves `blocks` blocks: d[16], then m[16] if there
// are minima, then per block `factors` vectors of 16 bytes. Offsets are in bytes from the first
// record.
struct ScaleLayout {
    int64_t blocks;
    int64_t d_bytes;  // 2: f16, 4: f32, 0: no scales
    bool minima;      // f16
    int64_t factors;

    constexpr int64_t min_offset() const { return kGroup * d_bytes; }
    constexpr int64_t factor_offset() const { return kGroup * (d_bytes + (minima ? 2 : 0)); }
    constexpr int64_t record_bytes() const { return factor_offset() + blocks * factors * kGroup; }
    constexpr int64_t record(int64_t block) const { return block / blocks * record_bytes(); }
    constexpr int64_t min(int64_t block) const { return record(block) + min_offset(); }
    constexpr int64_t factor(int64_t block, int64_t i) const {
        return record(block) + factor_offset() + (block % blocks * factors + i) * kGroup;
    }
};

constexpr ScaleLayout scale_layout(Kind kind) {
    switch (kind) {
        case Kind::Q4_0:
        case Kind::Q5_0:
        case Kind::Q8_0:
            return {1, 2, false, 0};
        case Kind::Q4_1:
        case Kind::Q5_1:
            return {1, 2, true, 0};
        case Kind::Q2_K:
        case Kind::Q4_K:
        case Kind::Q5_K:
            return {8, 2, true, 2};
        case Kind::Q3_K:
        case Kind::Q6_K:
            return {8, 2, false, 2};
        case Kind::Table16:
            return {8, 4, false, 2};
        case Kind::Table32:
            return {8, 4, false, 1};
        case Kind::Table:
            return {1, 4, false, 0};
        default:
            return {1, 0, false, 0};
    }
}

struct GroupWriter;
using PackRow = void (*)(const GroupWriter& to, int64_t row, const uint8_t* from);

// A type of weights in a file, and the kind that it becomes.
struct FileType {
    const char* name;
    int64_t columns, bytes;  // of a block in the file
    Kind kind;
    PackRow pack_row;
    const int8_t* numbers = nullptr;          // tables: [16] values
    int64_t grid_rows = 0, grid_columns = 0;  // of the grid that its codes index, if it has one
};

const FileType* find_file_type(const std::string& name);  // null if no weights have this type
// Whether the type's table has every number of the grid.
bool fits(const FileType& file_type, const int8_t* grid);

PackedMatrix outline(Kind kind, int64_t rows, int64_t cols);   // only its sizes: no data
PackedMatrix allocate(Kind kind, int64_t rows, int64_t cols);  // zeroed
PackedMatrix allocate(const FileType& file_type, int64_t rows, int64_t cols);

// Packs rows of the file into groups [begin, end); `rows` is the first row of group `begin`. Groups
// are independent, so threads can share them.
void pack(const FileType& file_type, const int8_t* grid, const uint8_t* rows, const PackedMatrix& out, int64_t begin,
          int64_t end);

void unpack_row(const PackedMatrix& packed, int64_t row, float* out);  // [cols]

}  // namespace kvarn
