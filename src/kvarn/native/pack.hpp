// Weights as the kernels read them: groups of 16 output rows, lanes being rows, in blocks of 32 columns.
//
// A group is its scales, then its codes, each 64-byte aligned. The codes of one block are vectors of 64 bytes, byte
// [row * 4 + j] of vector g being column 4g + j:
//
//   2 bits    two planes of bit pairs (vectors 0..3 and 4..7)                  Q2_K
//   3 bits    those, then a plane whose byte i has bit g of vector g           Q3_K
//   nibbles   4 vectors; low nibbles are vectors 0..3, high ones 4..7          Q4_0 Q4_1 Q4_K, tables
//   5 bits    a plane whose byte i has bit g of vector g, then the nibbles     Q5_0 Q5_1 Q5_K
//   6 bits    the two planes of pairs, then the nibbles                        Q6_K
//   8 bits    8 vectors, code + 128                                            Q8_0
//
//   scales    f16 d[16] (and m[16]) per block; for K types f16 d[16] (and dmin[16]) per 256 columns, then per block
//             u8 sc[16] (and mn[16]), in Q3_K and Q6_K i8 sc[16] per 16 columns, in Q2_K u8 [16] per 16 columns with
//             sc in the lower nibble and mn in the upper; for tables f32 d[16] per 256 columns and i8 sc[16] per 16
//             or 32, or f32 d[16] per block
//
// A table is the home of every other integer type: all of them take their numbers out of 16 or fewer. BF16 keeps pairs
// of columns together, [pair][row][2]; F16 and F32 are [column][row]. Nothing here rounds: unpack gives back the bits
// that dequantizing the file gives. Non-goals: multiplying, threads.
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
    Table16,  // factors per 16 columns of a scale per 256
    Table32,  // per 32
    Table,    // a scale per 32 columns
    BF16,
    F16,
    F32
};

constexpr int64_t kGroup = 16;  // output rows side by side
constexpr int64_t kBlock = 32;  // columns that share an activation scale

struct PackedMatrix {
    Kind kind{};
    int64_t rows = 0, cols = 0;  // as the model has them
    int64_t groups = 0, blocks = 0;
    int64_t scale_bytes = 0, group_bytes = 0;  // of one group
    uint8_t table[16] = {};                    // number + 128, of tables
    std::shared_ptr<uint8_t> data;

    const uint8_t* scales(int64_t group) const { return data.get() + group * group_bytes; }
    const uint8_t* codes(int64_t group) const { return scales(group) + scale_bytes; }
    int64_t nbytes() const { return groups * group_bytes; }
    bool integer() const { return kind < Kind::BF16; }
};

const char* name_of(Kind kind);
int64_t code_bytes(Kind kind);   // of one block of one group
int64_t scale_bytes(Kind kind);  // of one block of one group, on average

struct GroupWriter;
using PackRow = void (*)(const GroupWriter& to, int64_t row, const uint8_t* from);

// How a type of the file is stored, and what it becomes.
struct FileType {
    const char* name;
    int64_t columns, bytes;  // of a stored block
    Kind kind;
    PackRow pack_row;
    const int8_t* numbers = nullptr;          // [16], of tables
    int64_t grid_rows = 0, grid_columns = 0;  // of the grid of numbers that its codes point into, if it has one
};

const FileType* find_file_type(const std::string& name);  // null: no type of weights
// Whether a grid holds only what the type's table can.
bool fits(const FileType& file_type, const int8_t* grid);

std::shared_ptr<uint8_t> pages(int64_t bytes);                 // zeroed, in large pages where the system has them
PackedMatrix allocate(Kind kind, int64_t rows, int64_t cols);  // zeroed
PackedMatrix allocate(const FileType& file_type, int64_t rows, int64_t cols);

// Rows of stored bytes into groups [begin, end). Groups are independent: threads may share the work.
void pack(const FileType& file_type, const int8_t* grid, const uint8_t* rows, const PackedMatrix& out, int64_t begin,
          int64_t end);

void unpack_row(const PackedMatrix& packed, int64_t row, float* out);  // [cols]

}  // namespace kvarn
