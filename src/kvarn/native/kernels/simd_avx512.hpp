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
static inline I all_words(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline I set_word(const void* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return {_mm512_set1_epi32(word)};
}
static inline I load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_words(void* p, I x) { _mm512_storeu_si512(p, x.v); }
static inline F floor(F x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
static inline I and_words(I x, uint32_t mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(int(mask)))}; }
static inline I and_xor_words(I x, uint32_t mask, uint32_t flipped) {
    return {_mm512_ternarylogic_epi32(x.v, _mm512_set1_epi32(int(mask)), _mm512_set1_epi32(int(flipped)), 0x6a)};
}
static inline I add_words(I x, I y) { return {_mm512_add_epi32(x.v, y.v)}; }
static inline I or_words(I x, I y) { return {_mm512_or_si512(x.v, y.v)}; }
template <int N>
static inline I words_left(I x) {
    return {_mm512_slli_epi32(x.v, N)};
}
template <int N>
static inline I words_right(I x) {
    return {_mm512_srli_epi32(x.v, N)};
}
template <int A, int B>
static inline I rotate_halves(I x) {
    return {_mm512_rolv_epi32(x.v, _mm512_setr_epi32(A, A, A, A, A, A, A, A, B, B, B, B, B, B, B, B))};
}
static inline I add_bytes(I x, int n) { return {_mm512_add_epi8(x.v, _mm512_set1_epi8(char(n)))}; }
// vpdpbusd wants one unsigned operand: k + 128. The first sum takes 128 times the query's codes away.
constexpr int kKeyBias = 128;
static inline I first_key_sum(int32_t query_sum) { return {_mm512_set1_epi32(-kKeyBias * query_sum)}; }
static inline I add_keys(I sum, I k, I q) { return {_mm512_dpbusd_epi32(sum.v, k.v, q.v)}; }
static inline I add_values(I sum, I p, I v) { return {_mm512_dpbusd_epi32(sum.v, p.v, v.v)}; }
constexpr int kRunLimit = 1 << 24;  // runs are sums of 32 bits
static inline I first_run(I u, I x) { return {_mm512_dpbusd_epi32(_mm512_setzero_si512(), u.v, x.v)}; }
static inline I add_run(I run, I u, I x) { return {_mm512_dpbusd_epi32(run.v, u.v, x.v)}; }
static inline I twice_run(I run) { return words_left<1>(run); }
constexpr int kWide = 4;  // registers of 16 dims that wide_quads gives
// out[j] has dims 4j to 4j + 3 of each 16 dims.
static inline void wide_quads(const uint8_t* rows, int64_t stride, I (&out)[kWide]) {
    __m512i x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_si512(rows + i * stride);
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
    out[0].v = _mm512_unpacklo_epi16(a, c), out[1].v = _mm512_unpackhi_epi16(a, c);
    out[2].v = _mm512_unpacklo_epi16(b, d), out[3].v = _mm512_unpackhi_epi16(b, d);
}
static inline void in_dim_order(F (&x)[kWide]) {
    const __m512 a = _mm512_shuffle_f32x4(x[0].v, x[1].v, 0x44), b = _mm512_shuffle_f32x4(x[2].v, x[3].v, 0x44);
    const __m512 c = _mm512_shuffle_f32x4(x[0].v, x[1].v, 0xee), d = _mm512_shuffle_f32x4(x[2].v, x[3].v, 0xee);
    x[0].v = _mm512_shuffle_f32x4(a, b, 0x88), x[1].v = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[2].v = _mm512_shuffle_f32x4(c, d, 0x88), x[3].v = _mm512_shuffle_f32x4(c, d, 0xdd);
}
// Words (s, w) of four rows s, in the order of w, to words of their bytes in the order of s.
static inline __m512i four_by_four(__m512i x) {
    return _mm512_shuffle_epi8(
        x, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}
static inline void quads32(const uint8_t* rows, int64_t stride, I& first, I& second) {
    const auto two = [&](const uint8_t* p) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + stride));
        return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    };
    const __m512i x = two(rows), y = two(rows + 2 * stride);
    const __m512i words = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i more = _mm512_add_epi32(words, _mm512_set1_epi32(4));
    first.v = four_by_four(_mm512_permutex2var_epi32(x, words, y));
    second.v = four_by_four(_mm512_permutex2var_epi32(x, more, y));
}
using Codes = __m256i;
static inline I quads_of(const __m128i (&rows)[4]) {
    __m512i x = _mm512_castsi128_si512(rows[0]);
    x = _mm512_inserti32x4(x, rows[1], 1);
    x = _mm512_inserti32x4(x, rows[2], 2);
    x = _mm512_inserti32x4(x, rows[3], 3);
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return {four_by_four(_mm512_permutexvar_epi32(words, x))};
}
static inline __m256i largest_pairs(F x, F y) {  // of numbers that are not negative
    const __m512i pairs =
        _mm512_castps_si512(_mm512_add_ps(_mm512_shuffle_ps(x.v, y.v, 0x88), _mm512_shuffle_ps(x.v, y.v, 0xdd)));
    return _mm256_max_epu32(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64(pairs, 1));
}
template <int N>
static inline I load_codes(const uint8_t* p) {
    if constexpr (N == 1) return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    if constexpr (N == 2) return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    return load_words(p);
}
static inline F code_factors(I codes) {
    const __m512i c = codes.v, bits = _mm512_add_epi32(c, _mm512_set1_epi32(872));
    const __m512i some = _mm512_maskz_slli_epi32(_mm512_test_epi32_mask(c, c), bits, 20);
    const Mask nan = _mm512_cmpeq_epi32_mask(c, _mm512_set1_epi32(255));
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(some, nan, _mm512_set1_epi32(0x7fc00000)))};
}
static inline Codes to_codes(I x, I y) {
    return _mm256_set_m128i(_mm512_cvtusepi32_epi8(y.v), _mm512_cvtusepi32_epi8(x.v));
}

}  // namespace kvarn::KVARN_ISA
