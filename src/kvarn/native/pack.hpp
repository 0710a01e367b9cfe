// Weights as the kernels read them: groups of 16 output rows, lanes being rows, in blocks of 32 columns.
//
// A group is its scales, then its codes, each 64-byte aligned. The codes of one block are vectors of 64 bytes, byte
// [row * 4 + j] of vector g being column 4g + j:
//
//   nibbles   4 vectors; low nibbles are vectors 0..3, high ones 4..7          Q4_0 Q4_1 Q4_K
//   5 bits    a plane whose byte i has bit g of vector g, then the nibbles     Q5_0 Q5_1 Q5_K
//   6 bits    two planes of bit pairs (vectors 0..3 and 4..7), then nibbles    Q6_K
//   8 bits    8 vectors, code + 128                                            Q8_0, whole
//
//   scales    f16 d[16] (and m[16]) per block; for K types f16 d[16] (and dmin[16]) per 256 columns, then per block
//             u8 sc[16] (and mn[16]), in Q6_K i8 sc[16] per 16 columns; for `whole` f32 per 32 or 16 columns, then
//             minima
//
// BF16 keeps pairs of columns together, [pair][row][2]; F16 and F32 are [column][row].
// `whole` is the lossless home of every other type: 8-bit codes and f32 scales. Nothing here rounds: unpack gives back
// the bits that dequantizing the file gives. Non-goals: multiplying, threads.
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
    Q4_K,
    Q5_K,
    Q6_K,
    Whole32,
    Whole16,
    Whole16Min,
    BF16,
    F16,
    F32
};

constexpr int64_t kGroup = 16;  // output rows side by side
constexpr int64_t kBlock = 32;  // columns that share an activation scale

struct Packed {
    Kind kind{};
    int64_t rows = 0, cols = 0;  // as the model has them
    int64_t groups = 0, blocks = 0;
    int64_t scale_bytes = 0, group_bytes = 0;  // of one group
    std::shared_ptr<uint8_t> data;

    const uint8_t* scales(int64_t group) const { return data.get() + group * group_bytes; }
    const uint8_t* codes(int64_t group) const { return scales(group) + scale_bytes; }
    int64_t nbytes() const { return groups * group_bytes; }
    bool integer() const { return kind < Kind::BF16; }
};

bool kind_of(const std::string& type, Kind& kind);  // of a GGUF type with a packing of its own
const char* name_of(Kind kind);
int64_t row_bytes(const std::string& type, int64_t cols);  // of a stored row of such a type, Q2_K included
int64_t code_bytes(Kind kind);                             // of one block of one group
int64_t scale_bytes(Kind kind);                            // of one block of one group, on average

std::shared_ptr<uint8_t> pages(int64_t bytes);           // zeroed, in large pages where the system has them
Packed allocate(Kind kind, int64_t rows, int64_t cols);  // zeroed

// Rows of stored bytes into groups [begin, end). Groups are independent: threads may share the work.
void pack(const uint8_t* rows, int64_t row_bytes, const Packed& out, int64_t begin, int64_t end);
// Rows of numbers into Whole32 or Whole16; false when they are not codes times a scale.
bool pack_floats(const float* rows, const Packed& out, int64_t begin, int64_t end);
// Stored Q2_K rows into Whole16Min.
void pack_q2_k(const uint8_t* rows, int64_t row_bytes, const Packed& out, int64_t begin, int64_t end);

void unpack_row(const Packed& packed, int64_t row, float* out);  // [cols]

}  // namespace kvarn
