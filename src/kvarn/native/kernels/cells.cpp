// Encodes cells: f32 to bf16, f16, int8; int8 to int4 and int6. Compiled once per instruction set
// (KVARN_ISA names it), from plain loops that the compiler vectorizes or from simd.hpp. They use only
// integer arithmetic and single IEEE operations, so every instruction set gives the same bits. The NumPy definitions
// are in backends/reference/codecs.py; tests compare the bits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "../base.hpp"
#include "../isa.hpp"
#include "rotation.hpp"

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

void round_int8(const float* __restrict x, int8_t* __restrict out, float* __restrict scale, int64_t n) {
    // 1.5 * 2^23: adding it rounds |t| < 2^22 to an integer, half to even.
    constexpr float kRound = 12582912.0f;
    uint32_t amax = 0;  // as bits, which order like magnitudes; NaN is the largest
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t a = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
        amax = a > amax ? a : amax;
    }
    const float s = amax < kInfinity ? std::bit_cast<float>(amax) / 127.0f : std::bit_cast<float>(0x7fc00000u);
    *scale = s;
    if (!(s > 0.0f)) {  // all zero, too small for a scale, or not finite (the scale is NaN)
        for (int64_t i = 0; i < n; ++i) out[i] = 0;
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        float t = x[i] / s;
        t = t > 127.0f ? 127.0f : t;
        t = t < -127.0f ? -127.0f : t;
        out[i] = int8_t(int32_t((t + kRound) - kRound));
    }
}

// Rows of `dim` numbers become rows of up(dim, 32) codes.
void encode_int8(const float* x, int8_t* out, float* scale, int64_t rows, int64_t dim) {
    const int64_t depth = up(dim, kRotated);
    float here[256];
    std::vector<float> more(depth > 256 ? size_t(depth) : 0);  // only the reference has heads that long
    float* y = depth > 256 ? more.data() : here;
    for (int64_t r = 0; r < rows; ++r, x += dim, out += depth) {
        std::copy(x, x + dim, y);
        std::fill(y + dim, y + depth, 0.0f);
        rotate_blocks(y, depth);
        round_int8(y, out, scale + r, depth);
    }
}

// -- int4 and int6: blocks of 32 numbers, each with a scale code

constexpr uint32_t kScaleBias = 880;  // code c is the f32 with the bits (c + 880) << 20

struct BlockCodes {
    alignas(64) int32_t u[kRotated];
    uint8_t scale;
};

struct Candidate {
    I low, high;
    float error;
};

// The codes of a block with one scale: u = floor(y / s) + half, from 0 to 2 * half - 1.
inline Candidate with_scale(F a, F b, uint32_t code, float half) {
    const F s = set1(bits_of<float>((code + kScaleBias) << 20)), middle = set1(half - 0.5f);
    const auto codes = [&](F y) { return min(max(add(floor(div(y, s)), set1(half)), zero()), set1(2 * half - 1)); };
    const auto squared = [&](F u, F y) {
        const F e = sub(mul(sub(u, middle), s), y);
        return mul(e, e);
    };
    const F x = codes(a), y = codes(b);
    return {to_int(x), to_int(y), reduce_add(add(squared(x, a), squared(y, b)))};
}

// The smallest scale that clips nothing, or one of the next two below: the first with the least error.
inline BlockCodes encode_block(F a, F b, float half) {
    BlockCodes out;
    const uint32_t amax = largest_bits(a, b);
    if (amax == 0 || amax >= kInfinity) {
        for (int32_t& u : out.u) u = int32_t(half);
        out.scale = amax ? 255 : 0;
        return out;
    }
    const float need = bits_of<float>(amax) / (half - 0.5f);
    const int32_t least = int32_t((bits_of<uint32_t>(need) + 0xfffffu) >> 20) - int32_t(kScaleBias);
    const int32_t top = least < 1 ? 1 : least > 254 ? 254 : least;
    Candidate best = with_scale(a, b, uint32_t(top), half);
    out.scale = uint8_t(top);
    for (int32_t less = 1; less <= 2 && top - less >= 1; ++less) {
        const Candidate next = with_scale(a, b, uint32_t(top - less), half);
        if (next.error < best.error) best = next, out.scale = uint8_t(top - less);
    }
    store_words(out.u, best.low), store_words(out.u + kLanes, best.high);
    return out;
}

inline void pack_nibbles(const int32_t* u, uint8_t* out) {
    for (int i = 0; i < 16; ++i) out[i] = uint8_t((u[i] & 15) | (u[16 + i] & 15) << 4);
}

inline void pack_tops(const int32_t* u, uint8_t* out) {  // bits 4 and 5
    for (int i = 0; i < 8; ++i)
        out[i] = uint8_t(u[i] >> 4 | u[8 + i] >> 4 << 2 | u[16 + i] >> 4 << 4 | u[24 + i] >> 4 << 6);
}

template <int kBits>
void encode_blocks(const int8_t* x, const float* x_scale, uint8_t* out, uint8_t* scale, int64_t rows, int64_t depth) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < depth; d += kRotated, x += kRotated, out += kBits * 4) {
            const F s = set1(x_scale[r]);
            // A scale that is NaN makes every number NaN, codes of 0 included.
            const BlockCodes block = encode_block(mul(load_i8(x), s), mul(load_i8(x + kLanes), s), 1 << (kBits - 1));
            pack_nibbles(block.u, out);
            if (kBits == 6) pack_tops(block.u, out + 16);
            *scale++ = block.scale;
        }
}

}  // namespace

extern const CellEncoders encoders;
const CellEncoders encoders = {KVARN_TEXT(KVARN_ISA), encode_bf16,      encode_f16,
                               encode_int8,           encode_blocks<4>, encode_blocks<6>};

}  // namespace kvarn::KVARN_ISA
