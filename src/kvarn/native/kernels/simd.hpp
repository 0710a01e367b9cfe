// Sixteen lanes of f32 and of i32, whatever the registers are: one __m512, two __m256, or an array.
// Kernels are written once over these, so every instruction set performs the same operations in the same order.
// Included only by files that are compiled once per instruction set; all of it lives in that set's namespace.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define KVARN_PASTE_(a, b) a##b
#define KVARN_PASTE(a, b) KVARN_PASTE_(a, b)
#define KVARN_TEXT_(a) #a
#define KVARN_TEXT(a) KVARN_TEXT_(a)

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
static inline T smaller(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
static inline T larger(T a, T b) {
    return a > b ? a : b;
}

static inline float widen_bf16(uint16_t x) { return bits_of<float>(uint32_t(x) << 16); }

#if defined(__AVX512F__)

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
static inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // half to even
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
static inline F load_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Even and odd elements of 32 bf16.
static inline F even_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
static inline F odd_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
}
// Lanes 0..15 and 16..31 of a sequence whose even elements are in `e`, odd ones in `o`.
static inline F zip_low(F e, F o) {
    const __m512i i = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return {_mm512_permutex2var_ps(e.v, i, o.v)};
}
static inline F zip_high(F e, F o) {
    const __m512i i = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return {_mm512_permutex2var_ps(e.v, i, o.v)};
}
static inline void store_bf16(uint16_t* p, F x) {  // half to even; NaN stays NaN
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
static inline __m256i magnitudes(F x, F y) {  // the larger bits of 8 lanes each, without their signs
    const __m512i sign = _mm512_set1_epi32(0x7fffffff);
    const __m512i m = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x.v), sign),
                                       _mm512_and_si512(_mm512_castps_si512(y.v), sign));
    return _mm256_max_epu32(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
}
static inline __m256 half_low(F x) { return _mm512_castps512_ps256(x.v); }
static inline __m256 half_high(F x) { return _mm512_extractf32x8_ps(x.v, 1); }

#elif defined(__AVX2__)

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
static inline F abs(F x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
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
static inline __m256 spread(uint32_t mask8) {  // bit i -> lane i all ones
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
static inline __m256 u8_half(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
static inline F load_i8(const int8_t* p) { return {i8_half(p), i8_half(p + 8)}; }
static inline F load_u8(const uint8_t* p) { return {u8_half(p), u8_half(p + 8)}; }
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

#else

struct F {
    float v[kLanes];
};
struct I {
    int32_t v[kLanes];
};

#define KVARN_EACH(expression)                                  \
    {                                                           \
        F r;                                                    \
        for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
        return r;                                               \
    }
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
static inline F zero() KVARN_EACH(0.0f) static inline F set1(float x) KVARN_EACH(x) static inline F load(const float* p)
    KVARN_EACH(p[i]) static inline void store(float* p, F x) {
    memcpy(p, x.v, sizeof x.v);
}
static inline F add(F a, F b) KVARN_EACH(a.v[i] + b.v[i]) static inline F sub(F a, F b)
    KVARN_EACH(a.v[i] - b.v[i]) static inline F mul(F a, F b) KVARN_EACH(a.v[i] * b.v[i]) static inline F
    div(F a, F b) KVARN_EACH(a.v[i] / b.v[i]) static inline F max(F a, F b)
        KVARN_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]) static inline F min(F a, F b)
            KVARN_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]) static inline F fma(F a, F b, F c)
                KVARN_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])) static inline F abs(F a)
                    KVARN_EACH(bits_of<float>(bits_of<uint32_t>(a.v[i]) & 0x7fffffffu)) static inline I to_int(F a) {
    I r;
    for (int i = 0; i < kLanes; ++i) {
        const float x = a.v[i];
        r.v[i] = x > -4194304.0f && x < 4194304.0f ? int32_t(round_even(x)) : INT32_MIN;
    }
    return r;
}
static inline F to_float(I a) KVARN_EACH(float(a.v[i])) static inline F power_of_two(I n)
    KVARN_EACH(bits_of<float>((uint32_t(n.v[i]) + 127u) << 23)) static inline F
    where_below(F x, F bound, F below, F otherwise)
        KVARN_EACH(x.v[i] < bound.v[i] ? below.v[i] : otherwise.v[i]) static inline F
    keep(uint32_t mask16, F x, F otherwise) KVARN_EACH((mask16 >> i) & 1u ? x.v[i] : otherwise.v[i]) static inline F
    load_bf16(const uint16_t* p) KVARN_EACH(widen_bf16(p[i])) static inline F load_f16(const uint16_t* p)
        KVARN_EACH(half_to_float(p[i])) static inline F load_i8(const int8_t* p) KVARN_EACH(float(p[i])) static inline F
    load_u8(const uint8_t* p) KVARN_EACH(float(p[i])) static inline F even_bf16(const uint16_t* p)
        KVARN_EACH(widen_bf16(p[2 * i])) static inline F odd_bf16(const uint16_t* p)
            KVARN_EACH(widen_bf16(p[2 * i + 1])) static inline F zip_low(F e, F o)
                KVARN_EACH(i & 1 ? o.v[i / 2] : e.v[i / 2]) static inline F zip_high(F e, F o)
                    KVARN_EACH(i & 1 ? o.v[8 + i / 2] : e.v[8 + i / 2]) static inline uint16_t round_bf16(float x) {
    const uint32_t b = bits_of<uint32_t>(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return uint16_t((b >> 16) | 0x40u);
    return uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
static inline void store_bf16(uint16_t* p, F x) {
    for (int i = 0; i < kLanes; ++i) p[i] = round_bf16(x.v[i]);
}
#undef KVARN_EACH

#endif

// Sums and maxima across lanes, always as the same tree: lanes i and i + 8, then 4, 2, 1 apart.
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
// The largest magnitude as bits, whose order is that of the numbers; NaN is the largest.
static inline uint32_t largest_bits(F x, F y) {
    const __m256i m = magnitudes(x, y);
    __m128i q = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    q = _mm_max_epu32(q, _mm_unpackhi_epi64(q, q));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(q, _mm_shuffle_epi32(q, 1))));
}
static inline int32_t store_i8(int8_t* p, I x) {  // saturated; gives their sum
    const __m128i bytes = narrow_i8(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128;
}
#else
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
#endif

// 2^x for x <= 127: exactly 1 at 0, exactly 0 below -126, NaN for NaN; else to 2 units in the last place, or, `coarse`,
// to 3e-6 of the value.
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

static inline void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
static inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }  // not into the nearest cache

}  // namespace kvarn::KVARN_ISA
