#include "planes.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "half.hpp"
#include "isa.hpp"

namespace kvarn {

namespace {

// -- blocks of a file

template <int kBytes>
void put_nibbles(const uint8_t* __restrict from, uint8_t* __restrict codes) {  // low halves, then high halves
    for (int i = 0; i < kBytes; ++i) codes[i] = from[i] & 15;
    for (int i = 0; i < kBytes; ++i) codes[kBytes + i] = from[i] >> 4;
}

// Bit i of four bytes is the fifth bit of code i.
void put_fifths(const uint8_t* bits, uint8_t* codes) {
    for (int i = 0; i < 4; ++i) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, 8);
        const uint64_t each = bits[i] * 0x0101010101010101u & 0x8040201008040201u;  // byte j has bit j
        eight |= ((each + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
        memcpy(codes + 8 * i, &eight, 8);
    }
}

// kWidth bits of 32 bytes, from kFrom on, are the upper bits of 32 codes.
template <int kWidth, int kFrom>
void put_upper(const uint8_t* __restrict bits, uint8_t* __restrict codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= uint8_t(((bits[i] >> kFrom) & ((1 << kWidth) - 1)) << 4);
}

// Blocks of 32 that begin with a scale. kOffset and kFifths are the bytes where offset and fifth bits
// are; 0: it has none.
template <int kOffset, int kFifths, int kCodes>
void read_32(const uint8_t* from, int64_t blocks, uint8_t* codes, float* numbers) {
    for (int64_t b = 0; b < blocks; ++b, from += kCodes + 16, codes += 32) {
        const float scale = widen(half(from));
        *numbers++ = scale;
        if constexpr (kOffset > 0)
            *numbers++ = widen(half(from + kOffset));
        else if constexpr (kFifths > 0)
            *numbers++ = -16.0f * scale;
        put_nibbles<16>(from + kCodes, codes);
        if constexpr (kFifths > 0) put_fifths(from + kFifths, codes);
    }
}

void read_q8_0(const uint8_t* from, int64_t blocks, uint8_t* codes, float* numbers) {
    for (int64_t b = 0; b < blocks; ++b, from += 34, codes += 32) {
        numbers[b] = widen(half(from));
        for (int i = 0; i < 32; ++i) codes[i] = from[2 + i] ^ 0x80u;
    }
}

// Eight pairs of Q4_K and Q5_K.
void read_pairs(const uint8_t* from, float* numbers) {
    const float scale = widen(half(from)), offset = widen(half(from + 2));
    for (int j = 0; j < 8; ++j) {
        uint8_t sc, mn;
        scale_min(from + 4, j, sc, mn);
        numbers[2 * j] = scale * float(sc);
        numbers[2 * j + 1] = -(offset * float(mn));
    }
}

void read_q4_k(const uint8_t* from, int64_t blocks, uint8_t* codes, float* numbers) {
    for (int64_t b = 0; b < blocks; ++b, from += 144, codes += 256, numbers += 16) {
        read_pairs(from, numbers);
        for (int i = 0; i < 4; ++i) put_nibbles<32>(from + 16 + 32 * i, codes + 64 * i);
    }
}

void read_q5_k(const uint8_t* from, int64_t blocks, uint8_t* codes, float* numbers) {
    for (int64_t b = 0; b < blocks; ++b, from += 176, codes += 256, numbers += 16) {
        read_pairs(from, numbers);
        for (int i = 0; i < 4; ++i) put_nibbles<32>(from + 48 + 32 * i, codes + 64 * i);
        const uint8_t* high = from + 16;
        put_upper<1, 0>(high, codes), put_upper<1, 1>(high, codes + 32);
        put_upper<1, 2>(high, codes + 64), put_upper<1, 3>(high, codes + 96);
        put_upper<1, 4>(high, codes + 128), put_upper<1, 5>(high, codes + 160);
        put_upper<1, 6>(high, codes + 192), put_upper<1, 7>(high, codes + 224);
    }
}

void read_q6_k(const uint8_t* from, int64_t blocks, uint8_t* codes, float* numbers) {
    for (int64_t b = 0; b < blocks; ++b, from += 210, numbers += 16) {
        const float scale = widen(half(from + 208));
        for (int j = 0; j < 16; ++j) numbers[j] = float(int8_t(from[192 + j])) * scale;
        for (int part = 0; part < 2; ++part, codes += 128) {
            const uint8_t* high = from + 128 + 32 * part;
            put_nibbles<64>(from + 64 * part, codes);
            put_upper<2, 0>(high, codes), put_upper<2, 2>(high, codes + 32);
            put_upper<2, 4>(high, codes + 64), put_upper<2, 6>(high, codes + 96);
        }
    }
}

// -- units

void unit_4(const uint8_t* __restrict codes, uint16_t* __restrict tiles) {
    for (int i = 0; i < 32; ++i)
        tiles[i] = uint16_t(codes[i] | codes[32 + i] << 4 | codes[64 + i] << 8 | codes[96 + i] << 12);
}

void unit_5(const uint8_t* __restrict codes, uint16_t* __restrict tiles) {
    for (int i = 0; i < 32; ++i) tiles[i] = uint16_t(codes[i] | codes[32 + i] << 5 | codes[64 + i] << 10);
}

void unit_6(const uint8_t* __restrict codes, uint16_t* __restrict tiles) {
    constexpr int kTile = kPlaneRows * 16;
    uint8_t upper[32];  // a byte for four blocks
    for (int tile = 0; tile < 2; ++tile, codes += 64)
        for (int i = 0; i < 16; ++i) {
            const uint8_t a = codes[i], b = codes[16 + i], c = codes[32 + i], d = codes[48 + i];
            tiles[tile * kTile + i] = uint16_t((a & 15) | (b & 15) << 4 | (c & 15) << 8 | (d & 15) << 12);
            upper[tile * 16 + i] = uint8_t(a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6);
        }
    for (int i = 0; i < 16; ++i) tiles[2 * kTile + i] = uint16_t(upper[i] | upper[16 + i] << 8);
}

void unit_8(const uint8_t* __restrict codes, uint16_t* __restrict tiles) {
    constexpr int kTile = kPlaneRows * 32;
    for (int i = 0; i < 32; ++i) tiles[i] = uint16_t(codes[i] | codes[32 + i] << 8);
    for (int i = 0; i < 32; ++i) tiles[kTile + i] = uint16_t(codes[64 + i] | codes[96 + i] << 8);
}

constexpr PlaneType kTypes[] = {
    {"Q4_0", 32, 18, 0, -1, 4, 4, 32, 1, false, read_32<0, 0, 2>, unit_4},
    {"Q4_1", 32, 20, 0, 2, 4, 4, 32, 1, true, read_32<2, 0, 4>, unit_4},
    {"Q4_K", 256, 144, 0, 2, 4, 4, 32, 1, true, read_q4_k, unit_4},
    {"Q5_0", 32, 22, 0, -1, 5, 3, 32, 1, true, read_32<0, 2, 6>, unit_5},
    {"Q5_1", 32, 24, 0, 2, 5, 3, 32, 1, true, read_32<2, 4, 8>, unit_5},
    {"Q5_K", 256, 176, 0, 2, 5, 3, 32, 1, true, read_q5_k, unit_5},
    {"Q6_K", 256, 210, 208, -1, 6, 8, 16, 3, false, read_q6_k, unit_6},
    {"Q8_0", 32, 34, 0, -1, 8, 4, 32, 2, false, read_q8_0, unit_8},
};

float largest_half(const uint8_t* from, int64_t n, int64_t stride) {
    constexpr uint16_t kInfinity = 0x7c00;
    uint16_t largest = 0;  // as bits, which order like magnitudes
    for (int64_t i = 0; i < n; ++i, from += stride) {
        const uint16_t size = half(from) & 0x7fffu;
        largest = size < kInfinity && size > largest ? size : largest;
    }
    return widen(largest);
}

}  // namespace

const PlaneType* find_plane_type(const std::string& name) {
    const auto* found =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](auto& type) { return type.name == name; });
    return found == std::end(kTypes) ? nullptr : found;
}

Largest largest_scales(const PlaneType& type, const uint8_t* blocks, int64_t n) {
    return {largest_half(blocks + type.scale_at, n, type.bytes),
            type.offset_at < 0 ? 0.0f : largest_half(blocks + type.offset_at, n, type.bytes)};
}

void pack_planes(const PlaneType& type, const uint8_t* rows, int64_t n, int64_t row_bytes, int power,
                 const PlanesOut& out) {
    const int64_t units = type.units(row_bytes), words = units * type.words(), tile = kPlaneRows * type.span;
    // What is behind the row stays zero.
    std::vector<uint8_t> codes(size_t(units * type.unit()));
    std::vector<float> numbers(size_t(2 * words));
    std::vector<uint16_t> halves(size_t(kPlaneRows * 2 * words));
    const float scale = std::ldexp(1.0f, int(14 + type.bits) + power);
    const float factors[2] = {scale, type.offsets ? std::ldexp(1.0f, power) : scale};
    for (int64_t begin = 0; begin < n; begin += kPlaneRows) {
        const int64_t end = std::min(begin + kPlaneRows, n);
        for (int64_t r = begin; r < end; ++r) {
            type.read(rows + r * row_bytes, row_bytes / type.bytes, codes.data(), numbers.data());
            for (int64_t i = 0; i < words; ++i) numbers[2 * i] *= factors[0], numbers[2 * i + 1] *= factors[1];
            kernels().encoders->f16(numbers.data(), halves.data() + (r - begin) * 2 * words, 2 * words);
            const int64_t row = out.row + r;
            uint16_t* to = out.codes + row / kPlaneRows * units * type.tiles * tile + row % kPlaneRows * type.span;
            for (int64_t u = 0; u < units; ++u, to += type.tiles * tile) type.put_unit(&codes[u * type.unit()], to);
        }
        // All rows together: a single one would write four bytes here and there.
        for (int64_t w = 0; w < words; ++w) {
            uint32_t* to = out.headers + w * out.columns + out.column + begin;
            for (int64_t r = 0; r < end - begin; ++r) memcpy(to + r, &halves[size_t(2 * (r * words + w))], 4);
        }
    }
}

}  // namespace kvarn
