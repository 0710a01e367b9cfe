// Scales in weights: conversion of half-precision numbers, and integers of six bits.
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

// The 6-bit scale and minimum of sub-block j; `s` holds eight of both in 12 bytes.
inline void scale_min(const uint8_t* s, int j, uint8_t& sc, uint8_t& mn) {
    if (j < 4) {
        sc = s[j] & 63, mn = s[j + 4] & 63;
    } else {
        sc = uint8_t((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
        mn = uint8_t((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
    }
}

}  // namespace kvarn
