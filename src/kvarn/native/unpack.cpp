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

float number_at(const PackedMatrix& w, int64_t group, int64_t row, int64_t c) {
    const uint8_t* s = w.scales(group);
    const int64_t b = c / kBlock, part = c % kBlock / 16;
    const auto half_at = [&](int64_t offset) { return widen(half(s + offset + row * 2)); };
    const auto bits = [&] { return bits_at(w, group, row, c); };
    switch (w.kind) {
        case Kind::Q4_0:
            return half_at(scale_layout(Kind::Q4_0).record(b)) * float(int(bits()) - 8);
        case Kind::Q5_0:
            return half_at(scale_layout(Kind::Q5_0).record(b)) * float(int(bits()) - 16);
        case Kind::Q4_1:
        case Kind::Q5_1: {
            constexpr ScaleLayout kLayout = scale_layout(Kind::Q4_1);
            return half_at(kLayout.record(b)) * float(bits()) + half_at(kLayout.min(b));
        }
        case Kind::Q8_0:
            return half_at(scale_layout(Kind::Q8_0).record(b)) * float(code_at(w, group, row, c));
        case Kind::Q4_K:
        case Kind::Q5_K: {
            constexpr ScaleLayout kLayout = scale_layout(Kind::Q4_K);
            const uint8_t sc = s[kLayout.factor(b, 0) + row], mn = s[kLayout.factor(b, 1) + row];
            const float scale = half_at(kLayout.record(b)) * float(sc);
            return scale * float(bits()) - half_at(kLayout.min(b)) * float(mn);
        }
        case Kind::Q2_K: {
            constexpr ScaleLayout kLayout = scale_layout(Kind::Q2_K);
            const uint8_t both = s[kLayout.factor(b, part) + row];
            const float scale = half_at(kLayout.record(b)) * float(both & 15);
            return scale * float(bits()) - half_at(kLayout.min(b)) * float(both >> 4);
        }
        case Kind::Q3_K:
        case Kind::Q6_K: {
            constexpr ScaleLayout kLayout = scale_layout(Kind::Q3_K);
            const float scale = half_at(kLayout.record(b)) * float(int8_t(s[kLayout.factor(b, part) + row]));
            return scale * float(int(bits()) - (w.kind == Kind::Q3_K ? 4 : 32));
        }
        case Kind::Table16: {
            constexpr ScaleLayout kLayout = scale_layout(Kind::Table16);
            const auto factor = int8_t(s[kLayout.factor(b, part) + row]);
            return float_at(s + kLayout.record(b) + row * 4) * float(factor) * float(int(w.table[bits()]) - 128);
        }
        case Kind::Table32: {
            constexpr ScaleLayout kLayout = scale_layout(Kind::Table32);
            const auto factor = int8_t(s[kLayout.factor(b, 0) + row]);
            return float_at(s + kLayout.record(b) + row * 4) * float(factor) * float(int(w.table[bits()]) - 128);
        }
        case Kind::Table: {
            constexpr ScaleLayout kLayout = scale_layout(Kind::Table);
            return float_at(s + kLayout.record(b) + row * 4) * float(int(w.table[bits()]) - 128);
        }
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
