// The portable part of simd.hpp: sixteen lanes are an array.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvarn::KVARN_ISA {

struct F {
    float v[kLanes];
};
struct I {
    int32_t v[kLanes];
};

// The body of a function that computes lane i by one expression.
#define KVARN_EACH(expression)                              \
    F r;                                                    \
    for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
    return r

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu;
    if (e == 31) return bits_of<float>(sign | 0x7f800000u | (m << 13));
    if (e == 0) return bits_of<float>(sign | bits_of<uint32_t>(float(m) * 5.9604644775390625e-08f));
    return bits_of<float>(sign | ((e + 112) << 23) | (m << 13));
}
static inline float round_even(float x) {  // |x| < 2^22
    constexpr float kMagic = 12582912.0f;
    return (x + kMagic) - kMagic;
}
static inline uint16_t round_bf16(float x) {
    const uint32_t b = bits_of<uint32_t>(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return uint16_t((b >> 16) | 0x40u);
    return uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

static inline F zero() { KVARN_EACH(0.0f); }
static inline F set1(float x) { KVARN_EACH(x); }
static inline F load(const float* p) { KVARN_EACH(p[i]); }
static inline void store(float* p, F x) { memcpy(p, x.v, sizeof x.v); }
static inline F add(F a, F b) { KVARN_EACH(a.v[i] + b.v[i]); }
static inline F sub(F a, F b) { KVARN_EACH(a.v[i] - b.v[i]); }
static inline F mul(F a, F b) { KVARN_EACH(a.v[i] * b.v[i]); }
static inline F div(F a, F b) { KVARN_EACH(a.v[i] / b.v[i]); }
static inline F max(F a, F b) { KVARN_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline F min(F a, F b) { KVARN_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline F fma(F a, F b, F c) { KVARN_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
static inline I to_int(F a) {
    I r;
    for (int i = 0; i < kLanes; ++i) {
        const float x = a.v[i];
        r.v[i] = x > -4194304.0f && x < 4194304.0f ? int32_t(round_even(x)) : INT32_MIN;
    }
    return r;
}
static inline F to_float(I a) { KVARN_EACH(float(a.v[i])); }
static inline F power_of_two(I n) { KVARN_EACH(bits_of<float>((uint32_t(n.v[i]) + 127u) << 23)); }
static inline F where_below(F x, F bound, F below, F otherwise) {
    KVARN_EACH(x.v[i] < bound.v[i] ? below.v[i] : otherwise.v[i]);
}
static inline F keep(uint32_t mask16, F x, F otherwise) { KVARN_EACH((mask16 >> i) & 1u ? x.v[i] : otherwise.v[i]); }
static inline F load_bf16(const uint16_t* p) { KVARN_EACH(widen_bf16(p[i])); }
static inline F load_f16(const uint16_t* p) { KVARN_EACH(half_to_float(p[i])); }
static inline F load_i8(const int8_t* p) { KVARN_EACH(float(p[i])); }
static inline F even_bf16(const uint16_t* p) { KVARN_EACH(widen_bf16(p[2 * i])); }
static inline F odd_bf16(const uint16_t* p) { KVARN_EACH(widen_bf16(p[2 * i + 1])); }
static inline F zip_low(F e, F o) { KVARN_EACH(i & 1 ? o.v[i / 2] : e.v[i / 2]); }
static inline F zip_high(F e, F o) { KVARN_EACH(i & 1 ? o.v[8 + i / 2] : e.v[8 + i / 2]); }
static inline void store_bf16(uint16_t* p, F x) {
    for (int i = 0; i < kLanes; ++i) p[i] = round_bf16(x.v[i]);
}

static inline F floor(F x) { KVARN_EACH(__builtin_floorf(x.v[i])); }
static inline F code_factors(I codes) {
    KVARN_EACH(codes.v[i] == 0     ? 0.0f
               : codes.v[i] == 255 ? __builtin_nanf("")
                                   : bits_of<float>((uint32_t(codes.v[i]) + 872u) << 20));
}

#undef KVARN_EACH

static inline float reduce_add(F x) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.v[i] = x.v[i] + x.v[i + width];
    return x.v[0];
}
static inline float reduce_max(F x) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.v[i] = x.v[i] > x.v[i + width] ? x.v[i] : x.v[i + width];
    return x.v[0];
}
static inline uint32_t largest_bits(F x, F y) {
    uint32_t most = 0;
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t a = bits_of<uint32_t>(x.v[i]) & 0x7fffffffu, b = bits_of<uint32_t>(y.v[i]) & 0x7fffffffu;
        most = larger(most, larger(a, b));
    }
    return most;
}
static inline int32_t store_i8(int8_t* p, I x) {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) {
        p[i] = int8_t(x.v[i] > 127 ? 127 : x.v[i] < -128 ? -128 : x.v[i]);
        sum += p[i];
    }
    return sum;
}

template <int H>
static inline F butterfly(F x) {
    F r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = i & H ? x.v[i ^ H] - x.v[i] : x.v[i] + x.v[i ^ H];
    return r;
}

// -- words of four bytes

constexpr int kIntHalves = 1, kIntScoreRows = 1, kIntValueRows = 1;

static inline I zero_words() { return {}; }
static inline I all_words(int32_t x) {
    I r;
    for (int32_t& v : r.v) v = x;
    return r;
}
static inline I set_word(const void* p) {
    I r;
    for (int i = 0; i < kLanes; ++i) memcpy(&r.v[i], p, 4);
    return r;
}
static inline I load_words(const void* p) {
    I r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
static inline void store_words(void* p, I x) { memcpy(p, x.v, sizeof x.v); }
template <int N>
static inline I load_codes(const uint8_t* p) {
    I r = {};
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < N; ++j) r.v[i] |= int32_t(uint32_t(p[i * N + j]) << (8 * j));
    return r;
}
#define KVARN_EACH_WORD(expression)                                          \
    I r;                                                                     \
    for (int i = 0; i < kLanes; ++i) r.v[i] = int32_t(uint32_t(expression)); \
    return r
static inline I and_words(I x, uint32_t mask) { KVARN_EACH_WORD(uint32_t(x.v[i]) & mask); }
static inline I add_words(I x, I y) { KVARN_EACH_WORD(uint32_t(x.v[i]) + uint32_t(y.v[i])); }
static inline I or_words(I x, I y) { KVARN_EACH_WORD(x.v[i] | y.v[i]); }
template <int N>
static inline I words_left(I x) {
    KVARN_EACH_WORD(uint32_t(x.v[i]) << N);
}
template <int N>
static inline I words_right(I x) {
    KVARN_EACH_WORD(uint32_t(x.v[i]) >> N);
}
template <int A, int B>
static inline I rotate_halves(I x) {
    KVARN_EACH_WORD((uint32_t(x.v[i]) << (i < 8 ? A : B)) | (uint32_t(x.v[i]) >> (32 - (i < 8 ? A : B))));
}
#undef KVARN_EACH_WORD
static inline I add_bytes(I x, int n) {
    uint8_t bytes[4 * kLanes];
    memcpy(bytes, x.v, sizeof bytes);
    for (uint8_t& b : bytes) b = uint8_t(b + n);
    memcpy(x.v, bytes, sizeof bytes);
    return x;
}
constexpr int kKeyBias = 0;
static inline I first_key_sum(int32_t) { return {}; }
template <typename A>
static inline I add_products(I sum, I a, I b) {  // a has bytes of type A, b signed ones
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 32; j += 8)
            sum.v[i] += int32_t(A(uint32_t(a.v[i]) >> j)) * int32_t(int8_t(uint32_t(b.v[i]) >> j));
    return sum;
}
static inline I add_keys(I sum, I k, I q) { return add_products<int8_t>(sum, k, q); }
static inline I add_values(I sum, I p, I v) { return add_products<uint8_t>(sum, p, v); }
constexpr int kRunLimit = 1 << 24;  // runs are sums of 32 bits
static inline I first_run(I u, I x) { return add_values({}, u, x); }
static inline I add_run(I run, I u, I x) { return add_values(run, u, x); }
static inline I twice_run(I run) { return words_left<1>(run); }
static inline I quads16(const uint8_t* rows, int64_t stride) {
    uint8_t words[kLanes][4];
    for (int d = 0; d < kLanes; ++d)
        for (int s = 0; s < 4; ++s) words[d][s] = rows[s * stride + d];
    I r;
    memcpy(r.v, words, sizeof r.v);
    return r;
}
static inline I quads8(const uint8_t* rows, int64_t stride) {
    uint8_t twice[4][16];
    for (int s = 0; s < 4; ++s)
        for (int i = 0; i < 16; ++i) twice[s][i] = rows[s * stride + i % 8];
    return quads16(twice[0], 16);
}
constexpr int kWide = 2;  // registers of 16 dims that wide_quads gives
static inline void wide_quads(const uint8_t* rows, int64_t stride, I (&out)[kWide]) {
    out[0] = quads16(rows, stride), out[1] = quads16(rows + kLanes, stride);
}
static inline void in_dim_order(F (&)[kWide]) {}
struct Eight {
    uint32_t most;
};
static inline Eight no_lanes() { return {0}; }
static inline Eight largest_pairs(F x, F y) {
    F pairs;
    for (int i = 0; i < kLanes / 2; ++i)
        pairs.v[i] = x.v[2 * i] + x.v[2 * i + 1], pairs.v[kLanes / 2 + i] = y.v[2 * i] + y.v[2 * i + 1];
    return {largest_bits(pairs, zero())};
}
static inline void weight_steps(const Eight (&top)[8], float* step, float* inverse) {
    for (int t = 0; t < 8; ++t) {
        const float most = bits_of<float>(top[t].most);
        step[t] = most < kLeastWeight ? 0.0f : most / 255.0f;
        inverse[t] = 255.0f / most;
    }
}
struct Codes {
    uint8_t v[2 * kLanes];
};
static inline Codes to_codes(I x, I y) {
    Codes r;
    for (int i = 0; i < 2 * kLanes; ++i) {
        const int32_t code = i < kLanes ? x.v[i] : y.v[i - kLanes];
        r.v[i] = uint8_t(code > 255 ? 255 : code < 0 ? 0 : code);
    }
    return r;
}
static inline void store_codes(uint8_t* p, const Codes& x) { memcpy(p, x.v, sizeof x.v); }
using CodeSums = int32_t;
static inline CodeSums no_sums() { return 0; }
static inline CodeSums sums_of(const Codes& x) {
    int32_t sum = 0;
    for (const uint8_t code : x.v) sum += code;
    return sum;
}
static inline void store_sums(int32_t* out, const CodeSums (&sums)[8]) { memcpy(out, sums, sizeof sums); }

}  // namespace kvarn::KVARN_ISA
