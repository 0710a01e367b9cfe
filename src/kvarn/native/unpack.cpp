// Packed weights back to numbers, one at a time: embeddings, and the proof that packing loses nothing.
#include "half.hpp"
#include "pack.hpp"

namespace kvarn {

namespace {

int8_t code_at(const Packed& w, int64_t group, int64_t row, int64_t column) {  // of kinds with 8 bits
    const int64_t in = column % kBlock;
    return int8_t(w.codes(group)[column / kBlock * 512 + in / 4 * 64 + row * 4 + in % 4] ^ 0x80u);
}

uint8_t bits_at(const Packed& w, int64_t group, int64_t row, int64_t column) {  // of kinds with 4, 5, 6 bits
    const int64_t in = column % kBlock, g = in / 4, place = row * 4 + in % 4;
    const uint8_t* codes = w.codes(group) + column / kBlock * code_bytes(w.kind);
    uint8_t top = 0;
    if (code_bytes(w.kind) == 320) {
        top = uint8_t(((codes[place] >> g) & 1u) << 4);
        codes += 64;
    } else if (code_bytes(w.kind) == 384) {
        top = uint8_t(((codes[g / 4 * 64 + place] >> (g % 4 * 2)) & 3u) << 4);
        codes += 128;
    }
    return uint8_t(((codes[g % 4 * 64 + place] >> (g / 4 * 4)) & 15u) | top);
}

float float_at(const uint8_t* p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}

float number_at(const Packed& w, int64_t group, int64_t row, int64_t c) {
    const uint8_t* s = w.scales(group);
    const int64_t b = c / kBlock, part = c % kBlock / 16;
    switch (w.kind) {
        case Kind::Q4_0:
            return widen(half(s + b * 32 + row * 2)) * float(int(bits_at(w, group, row, c)) - 8);
        case Kind::Q5_0:
            return widen(half(s + b * 32 + row * 2)) * float(int(bits_at(w, group, row, c)) - 16);
        case Kind::Q4_1:
        case Kind::Q5_1:
            return widen(half(s + b * 64 + row * 2)) * float(bits_at(w, group, row, c)) +
                   widen(half(s + b * 64 + 32 + row * 2));
        case Kind::Q8_0:
            return widen(half(s + b * 32 + row * 2)) * float(code_at(w, group, row, c));
        case Kind::Q4_K:
        case Kind::Q5_K: {
            const uint8_t *k = s + b / 8 * 320, *sub = k + 64 + b % 8 * 32;
            const float scale = widen(half(k + row * 2)) * float(sub[row]);
            return scale * float(bits_at(w, group, row, c)) - widen(half(k + 32 + row * 2)) * float(sub[16 + row]);
        }
        case Kind::Q6_K: {
            const uint8_t* q = s + b / 8 * 288;
            const float scale = widen(half(q + row * 2)) * float(int8_t(q[32 + (b % 8 * 2 + part) * 16 + row]));
            return scale * float(int(bits_at(w, group, row, c)) - 32);
        }
        case Kind::Whole32:
            return float_at(s + b * 64 + row * 4) * float(code_at(w, group, row, c));
        case Kind::Whole16:
            return float_at(s + b * 128 + part * 64 + row * 4) * float(code_at(w, group, row, c));
        case Kind::Whole16Min:
            return float_at(s + b * 256 + part * 64 + row * 4) * float(code_at(w, group, row, c)) -
                   float_at(s + b * 256 + 128 + part * 64 + row * 4);
        case Kind::BF16:
            return std::bit_cast<float>(uint32_t(half(w.codes(group) + (c / 2 * kGroup + row) * 4 + c % 2 * 2)) << 16);
        case Kind::F16:
            return widen(half(w.codes(group) + (c * kGroup + row) * 2));
        case Kind::F32:
            return float_at(w.codes(group) + (c * kGroup + row) * 4);
    }
    return 0.0f;
}

}  // namespace

void unpack_row(const Packed& packed, int64_t row, float* out) {
    for (int64_t c = 0; c < packed.cols; ++c) out[c] = number_at(packed, row / kGroup, row % kGroup, c);
}

}  // namespace kvarn
