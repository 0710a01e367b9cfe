// Encodes cells: f32 to bf16, f16, int8. Compiled once per instruction set (KVARN_ISA names it)
// from plain loops that the compiler vectorizes. The loops use only integer arithmetic and single
// IEEE operations, so every instruction set gives the same bits. The NumPy definitions are in
// backends/reference/codecs.py; tests compare the bits.
#include <bit>
#include <cmath>

#include "../base.hpp"
#include "../isa.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;

void encode_bf16(const float* __restrict x, uint16_t* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // half to even
        const uint32_t quiet = (bits >> 16) | 0x40u;
        out[i] = uint16_t((bits & 0x7fffffffu) > kInfinity ? quiet : rounded);
    }
}

void encode_f16(const float* __restrict x, uint16_t* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
        const uint32_t a = bits & 0x7fffffffu;
        // Normal: drop 13 mantissa bits half to even, rebias the exponent from 127 to 15.
        const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
        // Subnormal: the last bit of 0.5f is the smallest f16, so the addition rounds half to even.
        const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
        uint32_t h = a < 0x38800000u ? small : normal;
        h = a >= 0x477ff000u ? 0x7c00u : h;                      // 65520 and above round to infinity
        h = a > kInfinity ? 0x7e00u | ((a >> 13) & 0x3ffu) : h;  // NaN stays NaN
        out[i] = uint16_t(h | ((bits >> 16) & 0x8000u));
    }
}

void encode_int8(const float* __restrict x, int8_t* __restrict out, float* __restrict scale, int64_t rows,
                 int64_t dim) {
    // 1.5 * 2^23: adding it rounds |t| < 2^22 to an integer, half to even.
    constexpr float kRound = 12582912.0f;
    for (int64_t r = 0; r < rows; ++r, x += dim, out += dim) {
        uint32_t amax = 0;  // as bits, which order like magnitudes; NaN is the largest
        for (int64_t i = 0; i < dim; ++i) {
            const uint32_t a = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
            amax = a > amax ? a : amax;
        }
        const bool finite = amax < kInfinity;
        const float s = finite ? std::bit_cast<float>(amax) / 127.0f : std::bit_cast<float>(0x7fc00000u);
        scale[r] = s;
        if (!(s > 0.0f)) {  // all zero, too small for a scale, or not finite (the scale is NaN)
            for (int64_t i = 0; i < dim; ++i) out[i] = 0;
            continue;
        }
        for (int64_t i = 0; i < dim; ++i) {
            float t = x[i] / s;
            t = t > 127.0f ? 127.0f : t;
            t = t < -127.0f ? -127.0f : t;
            out[i] = int8_t(int32_t((t + kRound) - kRound));
        }
    }
}

}  // namespace

extern const CellEncoders encoders;
const CellEncoders encoders = {KVARN_TEXT(KVARN_ISA), encode_bf16, encode_f16, encode_int8};

}  // namespace kvarn::KVARN_ISA
