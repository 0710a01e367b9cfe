// Sixteen lanes of f32 (F) and of i32 (I) on any machine: one __m512, two __m256, or an array.
// Kernels are written once with these, so every instruction set does the same operations in the
// same order. Only files that are compiled once per instruction set include this one; everything is
// in that set's namespace.
//
//   zero set1 load store          load_f16 load_bf16 load_i8 widen; store_bf16 rounds half to even
//   add sub mul div max min fma   lane by lane
//   to_int                        rounds half to even
//   where_below keep              choose by a comparison, or by the bits of a mask
//   even_bf16 odd_bf16            even and odd elements of 32 bf16
//   zip_low zip_high              lanes 0..15 and 16..31 of e and o interleaved
//   reduce_add reduce_max         across lanes, always the same tree: lanes 8 apart, then 4, 2, 1
//   largest_bits                  largest magnitude as bits, which order like numbers; NaN is largest
//   store_i8                      saturates and returns the sum
//   to_codes store_codes          32 integers as unsigned bytes, saturated
//   sums_of no_sums store_sums    sums of codes, of eight tiles at a time
//   butterfly<h>                  lanes i and i + h become their sum and their difference
//   floor                         lane by lane
//   set_word load_words store_words         words of four bytes
//   and_words or_words words_left words_right rotate_halves     bits of words
//   add_bytes                     the same number to every byte, modulo 256
//   first_key_sum add_keys        sums of four products of bytes per lane, from first_key_sum on. Keys
//                                 are signed bytes plus kKeyBias
//   add_values                    the same of unsigned and signed bytes; two neighbours of the unsigned ones have at
//                                 most 256 together
//   first_run add_run twice_run   the same for a few steps: two products of a step, times their number, must not be
//                                 above kRunLimit. twice_run gives the sums of a run, times 2
//   add_words all_words           x + y; the same word in all lanes
//   quads16                       16 bytes of four rows as a word per column; quads8: 8 bytes, twice
//   quads32                       32 bytes of four rows, in two registers (AVX-512 only)
//   wide_quads in_dim_order       the same for kWide * 16 bytes, in an order of its own; puts it right
//   Eight largest_pairs           maxima of the sums of two neighbours, of 32 lanes down to 8
//   weight_steps                  steps of weights, from eight such maxima
//   load_codes                    a word of N bytes for each lane
//   code_factors                  scale codes of int4 and int6 (docs/codecs.md), halved
#pragma once

#include <cstdint>
#include <cstring>

#include "../base.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX2__)
#define KVARN_UNROLL(n) _Pragma(KVARN_TEXT(GCC unroll n))
#else
#define KVARN_UNROLL(n)  // arrays of sixteen, unrolled sixteen times, take the compiler minutes
#endif

#define KVARN_INLINE inline __attribute__((always_inline))

namespace kvarn::KVARN_ISA {

constexpr int kLanes = 16;

template <typename To, typename From>
static inline To bits_of(From x) {
    return __builtin_bit_cast(To, x);
}
template <typename T>
constexpr T smaller(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
constexpr T larger(T a, T b) {
    return a > b ? a : b;
}

static inline float widen_bf16(uint16_t x) { return bits_of<float>(uint32_t(x) << 16); }

constexpr float kLeastWeight = 0x1p-118f;  // a tile whose weights are all smaller adds nothing

#if defined(__AVX2__)
// 32 bytes of four rows: out[j] has dims 4j to 4j + 3 and 16 + 4j to 16 + 4j + 3, a word per dim.
static inline void interleave(const uint8_t* rows, int64_t stride, __m256i (&out)[4]) {
    __m256i x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i * stride));
    const __m256i a = _mm256_unpacklo_epi8(x[0], x[1]), b = _mm256_unpackhi_epi8(x[0], x[1]);
    const __m256i c = _mm256_unpacklo_epi8(x[2], x[3]), d = _mm256_unpackhi_epi8(x[2], x[3]);
    out[0] = _mm256_unpacklo_epi16(a, c), out[1] = _mm256_unpackhi_epi16(a, c);
    out[2] = _mm256_unpacklo_epi16(b, d), out[3] = _mm256_unpackhi_epi16(b, d);
}
#endif

}  // namespace kvarn::KVARN_ISA

#if defined(__AVX512F__)
#include "simd_avx512.hpp"
#elif defined(__AVX2__)
#include "simd_avx2.hpp"
#else
#include "simd_portable.hpp"
#endif

namespace kvarn::KVARN_ISA {

#if defined(__AVX2__)
static inline float reduce_add(F x) {
    const __m256 h = _mm256_add_ps(half_low(x), half_high(x));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float reduce_max(F x) {
    const __m256 h = _mm256_max_ps(half_low(x), half_high(x));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline uint32_t largest_bits(F x, F y) {
    const __m256i m = magnitudes(x, y);
    __m128i q = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    q = _mm_max_epu32(q, _mm_unpackhi_epi64(q, q));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(q, _mm_shuffle_epi32(q, 1))));
}
static inline I quads16(const uint8_t* rows, int64_t stride) {
    __m128i x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * stride));
    return quads_of(x);
}
static inline I quads8(const uint8_t* rows, int64_t stride) {
    __m128i x[4];
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows + i * stride));
        x[i] = _mm_unpacklo_epi64(x[i], x[i]);
    }
    return quads_of(x);
}
using Eight = __m256i;
static inline Eight no_lanes() { return _mm256_setzero_si256(); }
// For tile t of eight: step[t] = max / 255, inverse[t] = 255 / max. A step that is 0 or NaN makes the
// tile's codes irrelevant.
static inline void weight_steps(const Eight (&top)[8], float* step, float* inverse) {
    __m256i x[4];
    for (int i = 0; i < 4; ++i)
        x[i] = _mm256_max_epu32(_mm256_unpacklo_epi32(top[2 * i], top[2 * i + 1]),
                                _mm256_unpackhi_epi32(top[2 * i], top[2 * i + 1]));
    for (int i = 0; i < 2; ++i)
        x[i] = _mm256_max_epu32(_mm256_unpacklo_epi64(x[2 * i], x[2 * i + 1]),
                                _mm256_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
    const __m256 most = _mm256_castsi256_ps(
        _mm256_max_epu32(_mm256_permute2x128_si256(x[0], x[1], 0x20), _mm256_permute2x128_si256(x[0], x[1], 0x31)));
    const __m256 all = _mm256_set1_ps(255.0f);
    const __m256 small = _mm256_cmp_ps(most, _mm256_set1_ps(kLeastWeight), _CMP_LT_OQ);
    _mm256_storeu_ps(step, _mm256_andnot_ps(small, _mm256_div_ps(most, all)));
    _mm256_storeu_ps(inverse, _mm256_div_ps(all, most));
}
static inline void store_codes(uint8_t* p, Codes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
using CodeSums = __m256i;  // four parts of a sum
static inline CodeSums no_sums() { return _mm256_setzero_si256(); }
static inline CodeSums sums_of(Codes x) { return _mm256_sad_epu8(x, _mm256_setzero_si256()); }
static inline void store_sums(int32_t* out, const CodeSums (&sums)[8]) {
    const auto four = [](const CodeSums* x) {          // of four tiles: halves of their sums
        const auto two = [](CodeSums a, CodeSums b) {  // parts below 2^32: one in each word
            return _mm256_or_si256(a, _mm256_slli_epi64(b, 32));
        };
        const __m256i a = two(x[0], x[1]), b = two(x[2], x[3]);
        return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    };
    const __m256i a = four(sums), b = four(sums + 4);
    const __m256i low = _mm256_permute2x128_si256(a, b, 0x20), high = _mm256_permute2x128_si256(a, b, 0x31);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_add_epi32(low, high));
}
static inline int32_t store_i8(int8_t* p, I x) {
    const __m128i bytes = narrow_i8(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128;
}
#endif

// 2^x for x <= 127: exactly 1 at 0, exactly 0 below -126, NaN for NaN. Otherwise the error is at
// most 2 units in the last place, or 3e-6 of the value if `coarse`.
template <bool coarse = false>
static inline F exp2(F x) {
#if defined(__AVX512F__)
    const F n = {_mm512_roundscale_ps(x.v, 0)};  // to whole numbers, half to even
#else
    const F n = to_float(to_int(max(x, set1(-127.0f))));
#endif
    const F f = sub(x, n);  // [-0.5, 0.5]; NaN stays NaN
    F p;
    if constexpr (coarse) {
        p = set1(9.58285e-3f);
        p = fma(p, f, set1(5.590643e-2f));
        p = fma(p, f, set1(2.4024099e-1f));
        p = fma(p, f, set1(6.931242e-1f));
    } else {
        p = set1(1.535336188319500e-4f);
        p = fma(p, f, set1(1.339887440266574e-3f));
        p = fma(p, f, set1(9.618437357674640e-3f));
        p = fma(p, f, set1(5.550332471162809e-2f));
        p = fma(p, f, set1(2.402264791363012e-1f));
        p = fma(p, f, set1(6.931472028550421e-1f));
    }
    p = fma(p, f, set1(1.0f));
#if defined(__AVX512F__)
    const Mask kept = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return {_mm512_maskz_scalef_ps(kept, p.v, n.v)};
#else
    return where_below(x, set1(-126.0f), zero(), mul(p, power_of_two(to_int(n))));
#endif
}

// A function that does nothing but prefetch has to be KVARN_INLINE: GCC drops calls of it, as if they had no effect.
static inline void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
static inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }
static inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }  // past L1

}  // namespace kvarn::KVARN_ISA
