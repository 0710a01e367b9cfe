// The AVX2 part of simd.hpp: sixteen lanes are two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvarn::KVARN_ISA {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline __m256 power_half(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline F power_of_two(I n) { return {power_half(n.a), power_half(n.b)}; }
static inline F where_below(F x, F bound, F below, F otherwise) {
    return {_mm256_blendv_ps(otherwise.a, below.a, _mm256_cmp_ps(x.a, bound.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.b, below.b, _mm256_cmp_ps(x.b, bound.b, _CMP_LT_OQ))};
}
static inline __m256 spread(uint32_t mask8) {  // bit i set: all bits of lane i
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask8)), bit), bit));
}
static inline F keep(uint32_t mask16, F x, F otherwise) {
    return {_mm256_blendv_ps(otherwise.a, x.a, spread(mask16 & 0xff)),
            _mm256_blendv_ps(otherwise.b, x.b, spread((mask16 >> 8) & 0xff))};
}
static inline __m256 bf16_half(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
static inline F load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
static inline F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline __m256 i8_half(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
static inline F load_i8(const int8_t* p) { return {i8_half(p), i8_half(p + 8)}; }
static inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline F even_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(load_256(p), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(load_256(p + 16), 16))};
}
static inline F odd_bf16(const uint16_t* p) {
    const __m256i m = _mm256_set1_epi32(int(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(load_256(p), m)),
            _mm256_castsi256_ps(_mm256_and_si256(load_256(p + 16), m))};
}
static inline F zip_half(__m256 e, __m256 o) {
    const __m256 lo = _mm256_unpacklo_ps(e, o), hi = _mm256_unpackhi_ps(e, o);
    return {_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31)};
}
static inline F zip_low(F e, F o) { return zip_half(e.a, o.a); }
static inline F zip_high(F e, F o) { return zip_half(e.b, o.b); }
static inline __m256i round_bf16(__m256 x) {
    const __m256i b = _mm256_castps_si256(x);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static inline void store_bf16(uint16_t* p, F x) {
    const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline __m128i narrow_i8(I x) {
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
}
static inline __m256i magnitudes(F x, F y) {
    const auto bits = [](__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)); };
    return _mm256_max_epu32(_mm256_max_epu32(bits(x.a), bits(x.b)), _mm256_max_epu32(bits(y.a), bits(y.b)));
}
static inline __m256 half_low(F x) { return x.a; }
static inline __m256 half_high(F x) { return x.b; }

template <int H>
static inline __m256 butterfly_half(__m256 x) {
    __m256 other;
    if constexpr (H <= 2)
        other = _mm256_permute_ps(x, H == 1 ? 0xb1 : 0x4e);
    else
        other = _mm256_permute2f128_ps(x, x, 1);
    constexpr int kUpper = H == 1 ? 0xaa : H == 2 ? 0xcc : 0xf0;
    return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), kUpper);
}
template <int H>
static inline F butterfly(F x) {
    if constexpr (H == 8) return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
    return {butterfly_half<H>(x.a), butterfly_half<H>(x.b)};
}

// -- words of four bytes

constexpr int kIntHalves = 1, kIntScoreRows = 3, kIntValueRows = 3;

static inline I zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I all_words(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I set_word(const void* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)};
}
static inline I load_words(const void* p) { return {load_256(p), load_256(static_cast<const __m256i*>(p) + 1)}; }
static inline void store_words(void* p, I x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}
static inline F floor(F x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
static inline I and_words(I x, uint32_t mask) {
    const __m256i m = _mm256_set1_epi32(int(mask));
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline I add_words(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline I or_words(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int N>
static inline I words_left(I x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
static inline I words_right(I x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
static inline __m256i rotate_half(__m256i x) {
    return _mm256_or_si256(_mm256_slli_epi32(x, N), _mm256_srli_epi32(x, 32 - N));
}
template <int A, int B>
static inline I rotate_halves(I x) {
    return {rotate_half<A>(x.a), rotate_half<B>(x.b)};
}
static inline I add_bytes(I x, int n) {
    const __m256i y = _mm256_set1_epi8(char(n));
    return {_mm256_add_epi8(x.a, y), _mm256_add_epi8(x.b, y)};
}
#if defined(__AVXVNNI__)
// vpdpbusd wants one unsigned operand, as in simd_avx512.hpp.
constexpr int kKeyBias = 128;
static inline I first_key_sum(int32_t query_sum) {
    return {_mm256_set1_epi32(-kKeyBias * query_sum), _mm256_set1_epi32(-kKeyBias * query_sum)};
}
static inline I add_values(I sum, I p, I v) {
    return {_mm256_dpbusd_avx_epi32(sum.a, p.a, v.a), _mm256_dpbusd_avx_epi32(sum.b, p.b, v.b)};
}
static inline I add_keys(I sum, I k, I q) { return add_values(sum, k, q); }
constexpr int kRunLimit = 1 << 24;  // runs are sums of 32 bits
static inline I first_run(I u, I x) { return add_values(zero_words(), u, x); }
static inline I add_run(I run, I u, I x) { return add_values(run, u, x); }
static inline I twice_run(I run) { return words_left<1>(run); }
#else
constexpr int kKeyBias = 0;
static inline I first_key_sum(int32_t) { return zero_words(); }
// In assembly, because GCC sorts chains of integer additions: it computes all products first, and registers run out.
static inline __m256i next_sum(__m256i sum, __m256i next) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(next));
    return sum;
}
// |k| times q with the sign of k: two products of at most 127 * 127 fit 16 bits.
static inline __m256i add_keys_half(__m256i sum, __m256i k, __m256i q) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(k), _mm256_sign_epi8(q, k));
    return next_sum(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline I add_keys(I sum, I k, I q) { return {add_keys_half(sum.a, k.a, q.a), add_keys_half(sum.b, k.b, q.b)}; }
static inline __m256i add_values_half(__m256i sum, __m256i p, __m256i v) {  // 256 * 127 fits 16 bits
    return next_sum(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(p, v), _mm256_set1_epi16(1)));
}
static inline I add_values(I sum, I p, I v) {
    return {add_values_half(sum.a, p.a, v.a), add_values_half(sum.b, p.b, v.b)};
}
constexpr int kRunLimit = 32767;
static inline I first_run(I u, I x) { return {_mm256_maddubs_epi16(u.a, x.a), _mm256_maddubs_epi16(u.b, x.b)}; }
static inline __m256i add_run_half(__m256i run, __m256i u, __m256i x) {
    __asm__("vpaddw %1, %0, %0" : "+x"(run) : "x"(_mm256_maddubs_epi16(u, x)));
    return run;
}
static inline I add_run(I run, I u, I x) { return {add_run_half(run.a, u.a, x.a), add_run_half(run.b, u.b, x.b)}; }
static inline I twice_run(I run) {
    return {_mm256_madd_epi16(run.a, _mm256_set1_epi16(2)), _mm256_madd_epi16(run.b, _mm256_set1_epi16(2))};
}
#endif

// -- int4 values, two blocks at a time: the first block is in the lower lanes, the second in the upper ones
//
//   load_blocks             of kStepSlots slots, eight bytes of each block; `upper`: the second eight
//   low_nibbles high_nibbles          numbers that are at most 15
//   load_block_codes codes_of_step    codes of 16 slots of each block; of the slots of a step, everywhere
//   add_blocks              sums of products of codes and numbers
//   words_of                eight sums of the first block, then eight of the second

#if defined(__AVXVNNI__)
constexpr int kStepSlots = 4;
struct BlockBytes {
    __m256i a, b;  // bytes 0 to 3, and 4 to 7
};
struct BlockSums {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
};
template <bool upper>
static inline BlockBytes load_blocks(const uint8_t* rows, int64_t stride) {
    const auto pair = [&](const uint8_t* at) {
        const __m256i x = load_256(at), y = load_256(at + stride);
        return upper ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y);
    };
    const __m256i x = pair(rows), y = pair(rows + 2 * stride);
    return {_mm256_unpacklo_epi16(x, y), _mm256_unpackhi_epi16(x, y)};
}
static inline BlockBytes low_nibbles(BlockBytes x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline BlockBytes high_nibbles(BlockBytes x) {
    return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
static inline BlockSums add_blocks(BlockSums sum, __m256i p, BlockBytes v) {
    return {_mm256_dpbusd_avx_epi32(sum.a, p, v.a), _mm256_dpbusd_avx_epi32(sum.b, p, v.b)};
}
static inline I words_of(BlockSums sum) {
    return {_mm256_permute2x128_si256(sum.a, sum.b, 0x20), _mm256_permute2x128_si256(sum.a, sum.b, 0x31)};
}
#else
constexpr int kStepSlots = 2;
using BlockBytes = __m256i;
struct BlockSums {  // of 16 bits
    __m256i v = _mm256_setzero_si256();
};
template <bool upper>
static inline BlockBytes load_blocks(const uint8_t* rows, int64_t stride) {
    const __m256i x = load_256(rows), y = load_256(rows + stride);
    return upper ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y);
}
static inline BlockBytes low_nibbles(BlockBytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline BlockBytes high_nibbles(BlockBytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
static inline BlockSums add_blocks(BlockSums sum, __m256i p, BlockBytes v) { return {add_run_half(sum.v, p, v)}; }
static inline I words_of(BlockSums sum) {
    return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(sum.v)),
            _mm256_cvtepu16_epi32(_mm256_extracti128_si256(sum.v, 1))};
}
#endif
using BlockCodes = __m256i;
static inline BlockCodes load_block_codes(const uint8_t* first, const uint8_t* second) {
    const auto at = [](const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    return _mm256_set_m128i(at(second), at(first));
}
template <int kStep>
static inline __m256i codes_of_step(BlockCodes codes) {
    if constexpr (kStepSlots == 4) return _mm256_shuffle_epi32(codes, kStep * 0x55);
    return _mm256_shuffle_epi8(codes, _mm256_set1_epi16(0x0100 + 0x0202 * kStep));
}
static inline F set_halves(float x, float y) { return {_mm256_set1_ps(x), _mm256_set1_ps(y)}; }
static inline F load_halves(const float* p, const float* q) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(q)}; }
static inline void store_halves(float* p, float* q, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(q, x.b); }

// -- four bytes of a word are one dim of four slots

constexpr int kWide = 2;  // registers of 16 dims that wide_quads gives
static inline void wide_quads(const uint8_t* rows, int64_t stride, I (&out)[kWide]) {
    __m256i x[4];
    interleave(rows, stride, x);
    out[0] = {x[0], x[1]}, out[1] = {x[2], x[3]};
}
static inline void in_dim_order(F (&x)[kWide]) {
    const F low = {_mm256_permute2f128_ps(x[0].a, x[0].b, 0x20), _mm256_permute2f128_ps(x[1].a, x[1].b, 0x20)};
    x[1] = {_mm256_permute2f128_ps(x[0].a, x[0].b, 0x31), _mm256_permute2f128_ps(x[1].a, x[1].b, 0x31)};
    x[0] = low;
}
using Codes = __m256i;
static inline I quads_of(const __m128i (&x)[4]) {
    const __m128i a = _mm_unpacklo_epi8(x[0], x[1]), b = _mm_unpackhi_epi8(x[0], x[1]);
    const __m128i c = _mm_unpacklo_epi8(x[2], x[3]), d = _mm_unpackhi_epi8(x[2], x[3]);
    return {_mm256_set_m128i(_mm_unpackhi_epi16(a, c), _mm_unpacklo_epi16(a, c)),
            _mm256_set_m128i(_mm_unpackhi_epi16(b, d), _mm_unpacklo_epi16(b, d))};
}
static inline __m256i largest_pairs(F x, F y) {  // of numbers that are not negative
    const auto pairs = [](__m256 a, __m256 b) {
        return _mm256_castps_si256(_mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)));
    };
    return _mm256_max_epu32(pairs(x.a, x.b), pairs(y.a, y.b));
}
template <int N>
static inline I load_codes(const uint8_t* p) {
    if constexpr (N == 4) return load_words(p);
    const auto* at = reinterpret_cast<const __m128i*>(p);
    if constexpr (N == 2)
        return {_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
    const __m128i c = _mm_loadu_si128(at);
    return {_mm256_cvtepu8_epi32(c), _mm256_cvtepu8_epi32(_mm_srli_si128(c, 8))};
}
static inline __m256 code_factors_half(__m256i c) {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(c, _mm256_set1_epi32(872)), 20);
    const __m256i some = _mm256_andnot_si256(_mm256_cmpeq_epi32(c, _mm256_setzero_si256()), bits);
    const __m256i nan = _mm256_cmpeq_epi32(c, _mm256_set1_epi32(255));
    return _mm256_castsi256_ps(_mm256_blendv_epi8(some, _mm256_set1_epi32(0x7fc00000), nan));
}
static inline F code_factors(I codes) { return {code_factors_half(codes.a), code_factors_half(codes.b)}; }
static inline Codes to_codes(I x, I y) {
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(x.a, x.b), _mm256_packus_epi32(y.a, y.b));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

}  // namespace kvarn::KVARN_ISA
