// Conversion of half-precision numbers in weights.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvarn {

inline uint16_t half(const uint8_t* p) {
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
}

inline float widen(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
    if (e == 31) return std::bit_cast<float>(sign | 0x7f800000u | (m << 13));
    if (e == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(m) * 5.9604644775390625e-08f));
    return std::bit_cast<float>(sign | ((e + 112) << 23) | (m << 13));
}

}  // namespace kvarn
