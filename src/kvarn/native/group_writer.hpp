// Writes the parts of one group of packed rows; pack.cpp and tables.cpp use it.
#pragma once

#include <cstring>

#include "pack.hpp"

namespace kvarn {

inline uint32_t word(const uint8_t* p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}
inline void put(uint8_t* p, uint32_t x) { memcpy(p, &x, 4); }

struct GroupWriter {
    const PackedMatrix& w;
    uint8_t *scales, *codes;  // of the group
    int64_t stride;           // bytes from one block's codes to the next
    const int8_t* grid;

    GroupWriter(const PackedMatrix& packed, int64_t group, const int8_t* of_type)
        : w(packed),
          scales(packed.data.get() + group * packed.group_bytes),
          codes(scales + packed.scale_bytes),
          stride(code_bytes(packed.kind)),
          grid(of_type) {}
    uint8_t* block(int64_t b) const { return codes + b * stride; }
    void put_half(int64_t offset, int64_t row, uint16_t x) const { memcpy(scales + offset + row * 2, &x, 2); }
    void put_float(int64_t offset, int64_t row, float x) const { memcpy(scales + offset + row * 4, &x, 4); }
};

// `bytes`: 16 of them; byte i has column i in its low nibble and column i + 16 in its high one.
inline void put_nibbles(uint8_t* nibbles, int64_t row, const uint8_t* bytes) {
    for (int g = 0; g < 4; ++g) put(nibbles + g * 64 + row * 4, word(bytes + g * 4));
}

const FileType* find_table_type(const std::string& name);  // null if it is not in tables.cpp

}  // namespace kvarn
