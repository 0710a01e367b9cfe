// Integer arithmetic on packed codes: 64 bytes at a time with AVX-512, 32 with AVX2, arrays without
// both. Lanes are output rows, with four columns per lane. The sum over a block is an exact integer
// on every path. Function names are those of simd.hpp; load_* and set1_* differ because these
// registers can be narrower than F and I. Included by linear.cpp; in the instruction set's
// namespace.
#pragma once

#include "simd.hpp"

namespace kvarn::KVARN_ISA {
namespace {

#if defined(__AVX512VNNI__)

constexpr int kFloatLanes = 16;
using Bytes = __m512i;
using Ints = __m512i;
using Floats = __m512;
constexpr bool kSigned = false;  // 8-bit codes stay code + 128; half_sum corrects the sum
constexpr bool kWide = true;     // 32 registers: room for 16 accumulators beside the codes
constexpr bool kReuses = false;  // codes are unpacked again for each tile of activations: once in 16 rows

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
template <int kBy>
inline Bytes shift_bits(Bytes x) {  // to the left; the caller masks bits that cross into another byte
    if constexpr (kBy < 0) return _mm512_srli_epi16(x, -kBy);
    if constexpr (kBy > 0) return _mm512_slli_epi16(x, kBy);
    return x;
}
template <int kBits, int kFrom, int kTo>
inline Bytes insert_bits(Bytes code, Bytes plane) {  // bits kFrom.. of the plane as bits kTo.. of the code
    const Bytes mask = _mm512_set1_epi8(((1 << kBits) - 1) << kTo);
    return _mm512_ternarylogic_epi64(code, shift_bits<kTo - kFrom>(plane), mask, 0xf8);  // a | (b & c)
}
inline Bytes zero_bytes() { return _mm512_setzero_si512(); }
inline Bytes broadcast_16(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes lookup(Bytes table, Bytes places) { return _mm512_shuffle_epi8(table, places); }
inline Bytes broadcast_4(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
inline Ints dot(Ints acc, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline Ints set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
template <int kBits>
inline Ints shift_left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
}
inline Ints mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Floats to_float(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats set1_float(float x) { return _mm512_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats load_halves(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_floats(const uint8_t* p) { return _mm512_loadu_ps(p); }
inline Ints load_unsigned(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_signed(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints low_nibble(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi32(15)); }
inline Ints high_nibble(Ints x) { return _mm512_srli_epi32(x, 4); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }

#elif defined(__AVX2__)

constexpr int kFloatLanes = 8;
using Bytes = __m256i;
using Ints = __m256i;
using Floats = __m256;
constexpr bool kWide = false;
constexpr bool kReuses = true;  // few registers: codes are unpacked once, for many rows
#if defined(__AVXVNNI__)
constexpr bool kSigned = false;
#else
constexpr bool kSigned = true;
#endif

inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
template <int kBy>
inline Bytes shift_bits(Bytes x) {
    if constexpr (kBy < 0) return _mm256_srli_epi16(x, -kBy);
    if constexpr (kBy > 0) return _mm256_slli_epi16(x, kBy);
    return x;
}
template <int kBits, int kFrom, int kTo>
inline Bytes insert_bits(Bytes code, Bytes plane) {
    const Bytes mask = _mm256_set1_epi8(((1 << kBits) - 1) << kTo);
    return _mm256_or_si256(code, _mm256_and_si256(shift_bits<kTo - kFrom>(plane), mask));
}
inline Bytes zero_bytes() { return _mm256_setzero_si256(); }
inline Bytes broadcast_16(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes lookup(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }
inline Bytes broadcast_4(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
#if defined(__AVXVNNI__)
inline Ints dot(Ints acc, Bytes w, Bytes x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
#else
#define KVARN_PAIRS 1  // sums go through 16 bits
using Pairs = __m256i;  // sums of two products
inline Pairs pairs(Bytes w, Bytes x) { return _mm256_maddubs_epi16(w, x); }
inline Pairs add_pairs(Pairs a, Pairs b) { return _mm256_add_epi16(a, b); }
inline Ints widen(Pairs x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
// Keeps additions in the order of the source: GCC would compute all products first, and run out of registers.
inline void in_order(__m256i& sum) { __asm__("" : "+x"(sum)); }
inline Bytes centre(Bytes w) { return _mm256_xor_si256(w, _mm256_set1_epi8(int8_t(0x80))); }
inline Bytes magnitude(Bytes code) { return _mm256_abs_epi8(code); }
inline Pairs signed_pairs(Bytes code, Bytes magnitude, Bytes x) {  // 2 * 128 * 127 fits 16 bits
    return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, code));
}
inline Bytes even_words(Bytes x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline Bytes odd_words(Bytes x) { return _mm256_srai_epi16(x, 8); }
inline Ints word_pairs(Bytes w, Bytes x) { return _mm256_madd_epi16(w, x); }
inline void store_bytes(void* p, Bytes x) { _mm256_store_si256(static_cast<__m256i*>(p), x); }
#endif
inline Ints set1_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
template <int kBits>
inline Ints shift_left(Ints a) {
    return _mm256_slli_epi32(a, kBits);
}
inline Ints mul(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Floats to_float(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats set1_float(float x) { return _mm256_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats load_halves(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_floats(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
inline Ints load_unsigned(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_signed(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints low_nibble(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi32(15)); }
inline Ints high_nibble(Ints x) { return _mm256_srli_epi32(x, 4); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }

#else

constexpr int kFloatLanes = 16;
struct Bytes {
    uint8_t v[4 * kFloatLanes];
};
using Ints = I;
using Floats = F;
constexpr bool kSigned = false;
constexpr bool kWide = false;
constexpr bool kReuses = false;

inline Bytes load_bytes(const uint8_t* p) {
    Bytes b;
    memcpy(b.v, p, sizeof b.v);
    return b;
}
inline Bytes low_nibbles(Bytes x) {
    for (uint8_t& b : x.v) b = uint8_t(b & 15u);
    return x;
}
inline Bytes high_nibbles(Bytes x) {
    for (uint8_t& b : x.v) b = uint8_t(b >> 4);
    return x;
}
template <int kBits, int kFrom, int kTo>
inline Bytes insert_bits(Bytes code, Bytes plane) {
    for (int i = 0; i < 4 * kFloatLanes; ++i)
        code.v[i] = uint8_t(code.v[i] | (((plane.v[i] >> kFrom) & ((1u << kBits) - 1u)) << kTo));
    return code;
}
inline Bytes zero_bytes() { return {}; }
inline Bytes broadcast_16(const uint8_t* p) {  // lookup() uses only the first 16
    Bytes b{};
    memcpy(b.v, p, 16);
    return b;
}
inline Bytes lookup(const Bytes& table, Bytes places) {
    for (uint8_t& b : places.v) b = table.v[b];
    return places;
}
inline const int8_t* broadcast_4(const int8_t* x) { return x; }
inline Ints dot(Ints acc, const Bytes& w, const int8_t* x) {
    for (int i = 0; i < kFloatLanes; ++i)
        acc.v[i] += w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[1] + w.v[4 * i + 2] * x[2] + w.v[4 * i + 3] * x[3];
    return acc;
}
inline Ints set1_int(int32_t x) {
    Ints r;
    for (int32_t& v : r.v) v = x;
    return r;
}
inline Ints add(Ints a, Ints b) {
    for (int i = 0; i < kFloatLanes; ++i) a.v[i] += b.v[i];
    return a;
}
inline Ints sub(Ints a, Ints b) {
    for (int i = 0; i < kFloatLanes; ++i) a.v[i] -= b.v[i];
    return a;
}
template <int kBits>
inline Ints shift_left(Ints a) {
    for (int32_t& v : a.v) v *= 1 << kBits;
    return a;
}
inline Ints mul(Ints a, Ints b) {
    for (int i = 0; i < kFloatLanes; ++i) a.v[i] *= b.v[i];
    return a;
}
inline Floats set1_float(float x) { return set1(x); }
inline Floats fnma(Floats a, Floats b, Floats c) {
    for (float& v : a.v) v = -v;
    return fma(a, b, c);
}
inline Floats load_halves(const uint8_t* p) {
    uint16_t h[kFloatLanes];
    memcpy(h, p, sizeof h);
    return load_f16(h);
}
inline Floats load_floats(const uint8_t* p) {
    Floats r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
inline Ints load_unsigned(const uint8_t* p) {
    Ints r;
    for (int i = 0; i < kFloatLanes; ++i) r.v[i] = p[i];
    return r;
}
inline Ints load_signed(const uint8_t* p) {
    Ints r;
    for (int i = 0; i < kFloatLanes; ++i) r.v[i] = int8_t(p[i]);
    return r;
}
inline Ints low_nibble(Ints x) {
    for (int32_t& v : x.v) v &= 15;
    return x;
}
inline Ints high_nibble(Ints x) {
    for (int32_t& v : x.v) v >>= 4;
    return x;
}

#endif

}  // namespace
}  // namespace kvarn::KVARN_ISA
