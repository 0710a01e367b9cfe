// The AVX-512 part of simd.hpp: sixteen lanes are one register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvarn::KVARN_ISA {

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};
using Mask = __mmask16;

static inline F zero() { return {_mm512_setzero_ps()}; }
static inline F set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
static inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline F power_of_two(I n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
static inline F where_below(F x, F bound, F below, F otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_LT_OQ), otherwise.v, below.v)};
}
static inline F keep(uint32_t mask16, F x, F otherwise) {
    return {_mm512_mask_blend_ps(Mask(mask16), otherwise.v, x.v)};
}
static inline F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
static inline F load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline F load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
static inline F even_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
static inline F odd_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
}
static inline F zip_low(F e, F o) {
    const __m512i i = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return {_mm512_permutex2var_ps(e.v, i, o.v)};
}
static inline F zip_high(F e, F o) {
    const __m512i i = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return {_mm512_permutex2var_ps(e.v, i, o.v)};
}
static inline void store_bf16(uint16_t* p, F x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x.v));
#else
    const __m512i b = _mm512_castps_si512(x.v);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
    const Mask nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(b, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
#endif
}
static inline __m128i narrow_i8(I x) { return _mm512_cvtepi32_epi8(x.v); }
static inline __m256i magnitudes(F x, F y) {  // bits without sign; 32 lanes reduced to 8 by maximum
    const __m512i sign = _mm512_set1_epi32(0x7fffffff);
    const __m512i m = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x.v), sign),
                                       _mm512_and_si512(_mm512_castps_si512(y.v), sign));
    return _mm256_max_epu32(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
}
static inline __m256 half_low(F x) { return _mm512_castps512_ps256(x.v); }
static inline __m256 half_high(F x) { return _mm512_extractf32x8_ps(x.v, 1); }

template <int H>
static inline F butterfly(F x) {
    constexpr Mask kUpper = H == 1 ? 0xaaaa : H == 2 ? 0xcccc : H == 4 ? 0xf0f0 : 0xff00;
    __m512 other;
    if constexpr (H <= 2)
        other = _mm512_permute_ps(x.v, H == 1 ? 0xb1 : 0x4e);
    else
        other = _mm512_shuffle_f32x4(x.v, x.v, H == 4 ? 0xb1 : 0x4e);
    return {_mm512_mask_sub_ps(_mm512_add_ps(x.v, other), kUpper, other, x.v)};
}

// -- words of four bytes

constexpr int kIntHalves = 2, kIntScoreRows = 10, kIntValueRows = 6;

static inline I zero_words() { return {_mm512_setzero_si512()}; }
static inline I set_word(const void* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return {_mm512_set1_epi32(word)};
}
static inline I load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_words(void* p, I x) { _mm512_storeu_si512(p, x.v); }
// vpdpbusd wants one unsigned operand: k + 128. The first sum takes 128 times the query's codes away.
static inline I first_key_sum(int32_t query_sum) { return {_mm512_set1_epi32(-128 * query_sum)}; }
static inline I key_words(const void* p) {
    return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0x80808080u)))};
}
static inline I add_keys(I sum, I k, I q) { return {_mm512_dpbusd_epi32(sum.v, k.v, q.v)}; }
static inline I add_values(I sum, I p, I v) { return {_mm512_dpbusd_epi32(sum.v, p.v, v.v)}; }
static inline void quads(const uint8_t* rows, int64_t stride, I& a, I& b) {
    __m256i x[4];
    interleave(rows, stride, x);
    a.v = _mm512_inserti64x4(_mm512_castsi256_si512(x[0]), x[1], 1);
    b.v = _mm512_inserti64x4(_mm512_castsi256_si512(x[2]), x[3], 1);
}
static inline F low_dims(F a, F b) { return {_mm512_shuffle_f32x4(a.v, b.v, 0x88)}; }
static inline F high_dims(F a, F b) { return {_mm512_shuffle_f32x4(a.v, b.v, 0xdd)}; }
static inline void store_u8(uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(x.v));
}

}  // namespace kvarn::KVARN_ISA
