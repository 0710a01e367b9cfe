// exp, log, sin and cos in f64 with the same bits on every machine. A libm rounds differently
// between versions, vendors and instruction sets. These use only additions, multiplications and
// divisions in one written order (the build turns contraction off). Errors are below one unit in
// the last place; tests/test_arithmetic.py compares them with the C library.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace kvarn {

namespace elementary {

// 1.5 * 2^52: adding it rounds |t| < 2^51 to an integer, half to even.
constexpr double kShift = 6755399441055744.0;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// sin(r + tail) and cos(r + tail) for |r| <= pi / 4 by Taylor series. The first terms left out,
// r^19 and r^18, are below 2^-57.
inline double sin_near_zero(double r, double tail) {
    const double z = r * r;
    double p = 1.0 / 355687428096000.0;  // 17!
    p = p * z - 1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return r + (r * z * p + tail * (1.0 - 0.5 * z));
}

inline double cos_near_zero(double r, double tail) {
    const double z = r * r, half = 0.5 * z, w = 1.0 - half;
    double p = 1.0 / 20922789888000.0;  // 16!
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    return w + (((1.0 - w) - half) + (z * z * p - r * tail));
}

}  // namespace elementary

// Infinity above 709.78; 0 below -708, where results would be subnormal.
inline double exponential(double x) {
    using namespace elementary;
    const double bounded = x < -708.0 ? -708.0 : x > 709.8 ? 709.8 : x;
    const double shifted = bounded * 1.4426950408889634 + kShift;  // log2(e)
    const double k = shifted - kShift;
    const double r = (bounded - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
    double p = 1.0 / 6227020800.0;  // 13!; r^14 / 14! is below 2^-57
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    const double grown = 1.0 + (r + r * r * p);
    // 2^k in two factors, because 2^1024 is not a double. The low bits of `shifted` are k.
    const uint64_t exponent = (std::bit_cast<uint64_t>(shifted) + 1022u) << 52;
    const double result = grown * 2.0 * std::bit_cast<double>(exponent);
    return x < -708.0 ? 0.0 : x == x ? result : x;
}

// NaN below zero, -infinity at zero, like the C library.
inline double logarithm(double x) {
    using namespace elementary;
    if (!(x > 0.0)) return x == 0.0 ? -kInfinity : std::numeric_limits<double>::quiet_NaN();
    if (x == kInfinity) return x;
    int64_t k = 0;
    if (x < 0x1p-1022) x *= 0x1p54, k = -54;  // subnormal
    uint64_t bits = std::bit_cast<uint64_t>(x);
    bits += 0x3ff0000000000000u - 0x3fe6a09e667f3bcdu;  // moves the mantissa into [sqrt(1/2), sqrt(2)]
    k += int64_t(bits >> 52) - 1023;
    const double m = std::bit_cast<double>((bits & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu);
    // log(1 + f) = 2 atanh(s), s = f / (2 + f): an odd series in s, |s| <= 0.172
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
    double p = 2.0 / 23.0;
    p = p * z + 2.0 / 21.0;
    p = p * z + 2.0 / 19.0;
    p = p * z + 2.0 / 17.0;
    p = p * z + 2.0 / 15.0;
    p = p * z + 2.0 / 13.0;
    p = p * z + 2.0 / 11.0;
    p = p * z + 2.0 / 9.0;
    p = p * z + 2.0 / 7.0;
    p = p * z + 2.0 / 5.0;
    p = p * z + 2.0 / 3.0;
    const double e = double(k);
    return e * 0x1.62e42fee00000p-1 + (f - (half - (s * (half + z * p) + e * 0x1.a39ef35793c76p-33)));
}

struct SinCos {
    double sin, cos;
};

// Subtracts quarter turns in three parts of pi / 2. The first two parts have 33 bits, so the result
// is exact for up to 2^20 quarter turns, about 1.6 million radians.
inline SinCos sin_cos(double x) {
    using namespace elementary;
    const double shifted = x * 0.6366197723675814 + kShift;  // 2 / pi
    const double n = shifted - kShift;
    const double a = x - n * 0x1.921fb54400000p+0, b = n * 0x1.0b4611a600000p-34;
    const double r0 = a - b, lost = (((a - r0) - b) - n * 0x1.3198a2e037073p-69);
    const double r = r0 + lost, tail = (r0 - r) + lost;
    const double s = sin_near_zero(r, tail), c = cos_near_zero(r, tail);
    switch (std::bit_cast<uint64_t>(shifted) & 3u) {
        case 0:
            return {s, c};
        case 1:
            return {c, -s};
        case 2:
            return {-s, -c};
        default:
            return {-c, s};
    }
}

}  // namespace kvarn
