// PackedMatrix weights back to numbers, one at a time: embeddings, and the proof that packing loses nothing.
#include "half.hpp"
#include "pack.hpp"

namespace kvarn {

namespace {

int8_t code_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t column) {  // of kinds with 8 bits
    const int64_t in = column % kBlock;
    return int8_t(w.codes(group)[column / kBlock * 512 + in / 4 * 64 + row * 4 + in % 4] ^ 0x80u);
}

uint8_t bits_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t column) {  // of kinds with 2 to 6 bits
    const int64_t in = column % kBlock, g = in / 4, place = row * 4 + in % 4, bytes = code_bytes(w.kind);
    const uint8_t* codes = w.codes(group) + column / kBlock * bytes;
    const auto pair = [&] { return unsigned(codes[g / 4 * 64 + place] >> (g % 4 * 2)) & 3u; };
    const auto single = [&](const uint8_t* plane) { return unsigned(plane[place] >> g) & 1u; };
    const auto nibble = [&](const uint8_t* from) { return unsigned(from[g % 4 * 64 + place] >> (g / 4 * 4)) & 15u; };
    switch (bytes) {
        case 128:
            return uint8_t(pair());
        case 192:
            return uint8_t(pair() | single(codes + 128) << 2);
        case 320:
            return uint8_t(nibble(codes + 64) | single(codes) << 4);
        case 384:
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

float number_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t c) {
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
        case Kind::Q2_K: {
            const uint8_t *k = s + b / 8 * 320, both = k[64 + (b % 8 * 2 + part) * 16 + row];
            const float scale = widen(half(k + row * 2)) * float(both & 15);
            return scale * float(bits_at(w, group, row, c)) - widen(half(k + 32 + row * 2)) * float(both >> 4);
        }
        case Kind::Q3_K:
        case Kind::Q6_K: {
            const uint8_t* k = s + b / 8 * 288;
            const float scale = widen(half(k + row * 2)) * float(int8_t(k[32 + (b % 8 * 2 + part) * 16 + row]));
            return scale * float(int(bits_at(w, group, row, c)) - (w.kind == Kind::Q3_K ? 4 : 32));
        }
        case Kind::Table16:
        case Kind::Table32: {
            const int64_t per = w.kind == Kind::Table16 ? 16 : 32;
            const uint8_t* k = s + c / 256 * (64 + 256 / per * 16);
            const float scale = float_at(k + row * 4) * float(int8_t(k[64 + c % 256 / per * 16 + row]));
            return scale * float(int(w.table[bits_at(w, group, row, c)]) - 128);
        }
        case Kind::Table:
            return float_at(s + b * 64 + row * 4) * float(int(w.table[bits_at(w, group, row, c)]) - 128);
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

void unpack_row(const PackedMatrix& packed, int64_t row, float* out) {
    for (int64_t c = 0; c < packed.cols; ++c) out[c] = number_at(packed, row / kGroup, row % kGroup, c);
}

}  // namespace kvarn
