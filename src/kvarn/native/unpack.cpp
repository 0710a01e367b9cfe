// Converts packed weights back to numbers, one at a time. Embeddings use it, and tests use it to
// check that packing loses nothing.
#include "half.hpp"
#include "pack.hpp"

namespace kvarn {

namespace {

int8_t code_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t column) {  // for kinds of 8 bits
    const int64_t in = column % kBlock;
    return int8_t(w.codes(group)[column / kBlock * code_bytes(Kind::Q8_0) + in / 4 * 64 + row * 4 + in % 4] ^ 0x80u);
}

uint8_t bits_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t column) {  // for kinds of 2 to 6 bits
    const int64_t in = column % kBlock, g = in / 4, place = row * 4 + in % 4;
    const uint8_t* codes = w.codes(group) + column / kBlock * code_bytes(w.kind);
    const auto pair = [&] { return unsigned(codes[g / 4 * 64 + place] >> (g % 4 * 2)) & 3u; };
    const auto single = [&](const uint8_t* plane) { return unsigned(plane[place] >> g) & 1u; };
    const auto nibble = [&](const uint8_t* from) { return unsigned(from[g % 4 * 64 + place] >> (g / 4 * 4)) & 15u; };
    switch (code_bits(w.kind)) {
        case 2:
            return uint8_t(pair());
        case 3:
            return uint8_t(pair() | single(codes + 128) << 2);
        case 5:
            return uint8_t(nibble(codes + 64) | single(codes) << 4);
        case 6:
            return uint8_t(nibble(codes + 128) | pair() << 4);
        default:
            return uint8_t(nibble(codes));
    }
}

float float_at(const uint8_t* p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

int level_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t column) {  // for integer kinds
    if (w.kind == Kind::Q8_0) return code_at(w, group, row, column);
    const int bits = bits_at(w, group, row, column);
    switch (w.kind) {
        case Kind::Q3_K:
            return bits - 4;
        case Kind::Q4_0:
            return bits - 8;
        case Kind::Q5_0:
            return bits - 16;
        case Kind::Q6_K:
            return bits - 32;
        case Kind::Table16:
        case Kind::Table32:
        case Kind::Table:
            return int(w.table[bits]) - 128;
        default:
            return bits;
    }
}

// Scale times level, and the minimum where there is one, in the order of the file's own arithmetic.
float scaled_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t column) {
    const ScaleLayout layout = scale_layout(w.kind);
    const uint8_t* s = w.scales(group);
    const int64_t block = column / kBlock, part = column % kBlock / 16;
    const auto half_at = [&](int64_t offset) { return widen(half(s + offset + row * 2)); };
    const auto factor = [&](int64_t i) { return s[layout.factor(block, i) + row]; };
    const float d = layout.d_bytes == 4 ? float_at(s + layout.record(block) + row * 4) : half_at(layout.record(block));
    const auto level = float(level_at(w, group, row, column));
    switch (w.kind) {
        case Kind::Q4_1:
        case Kind::Q5_1:
            return d * level + half_at(layout.min(block));
        case Kind::Q4_K:
        case Kind::Q5_K:
            return d * float(factor(0)) * level - half_at(layout.min(block)) * float(factor(1));
        case Kind::Q2_K:
            return d * float(factor(part) & 15) * level - half_at(layout.min(block)) * float(factor(part) >> 4);
        case Kind::Q3_K:
        case Kind::Q6_K:
        case Kind::Table16:
            return d * float(int8_t(factor(part))) * level;
        case Kind::Table32:
            return d * float(int8_t(factor(0))) * level;
        default:
            return d * level;
    }
}

float number_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t c) {
    const uint8_t* codes = w.codes(group);
    switch (w.kind) {
        case Kind::BF16:
            return std::bit_cast<float>(uint32_t(half(codes + (c / 2 * kGroup + row) * 4 + c % 2 * 2)) << 16);
        case Kind::F16:
            return widen(half(codes + (c * kGroup + row) * 2));
        case Kind::F32:
            return float_at(codes + (c * kGroup + row) * 4);
        default:
            return scaled_at(w, group, row, c);
    }
}

}  // namespace

void unpack_row(const PackedMatrix& packed, int64_t row, float* out) {
    for (int64_t c = 0; c < packed.cols; ++c) out[c] = number_at(packed, row / kGroup, row % kGroup, c);
}

}  // namespace kvarn
