// Compiled once per instruction set; see linear.hpp.
#include "../linear.hpp"

#include "bytes.hpp"

namespace kvarn::KVARN_ISA {
namespace {

// -- one block: its eight vectors of codes, and its scales ------------------------------------------------------------

constexpr bool has_min(Kind k) { return k == Kind::Q4_1 || k == Kind::Q5_1 || k == Kind::Q4_K || k == Kind::Q5_K; }
constexpr bool eight_bits(Kind k) { return k == Kind::Q8_0 || (k >= Kind::Whole32 && k <= Kind::Whole16Min); }
constexpr int bits_of_kind(Kind k) {
    return eight_bits(k) ? 8 : k == Kind::Q6_K ? 6 : k == Kind::Q5_0 || k == Kind::Q5_1 || k == Kind::Q5_K ? 5 : 4;
}
constexpr int offset_of(Kind k) {
    return eight_bits(k) ? (kSigned ? 0 : 128) : k == Kind::Q4_0 ? 8 : k == Kind::Q5_0 ? 16 : k == Kind::Q6_K ? 32 : 0;
}
constexpr int block_bytes(Kind k) {
    return bits_of_kind(k) == 4 ? 256 : bits_of_kind(k) == 5 ? 320 : bits_of_kind(k) == 6 ? 384 : 512;
}

template <int kBits>
inline void unpack(const uint8_t* p, Bytes* w) {  // p: the block's codes, moved to the slice of rows
    if constexpr (kBits == 8) {
        for (int g = 0; g < 8; ++g) w[g] = load_bytes(p + g * 64);
        return;
    }
    const uint8_t* nibbles = p + (kBits == 5 ? 64 : kBits == 6 ? 128 : 0);
    for (int g = 0; g < 4; ++g) {
        const Bytes both = load_bytes(nibbles + g * 64);
        w[g] = low_nibbles(both);
        w[g + 4] = high_nibbles(both);
    }
    if constexpr (kBits == 5) {
        const Bytes plane = load_bytes(p);
        w[0] = with_top<1, 0>(w[0], plane), w[1] = with_top<1, 1>(w[1], plane);
        w[2] = with_top<1, 2>(w[2], plane), w[3] = with_top<1, 3>(w[3], plane);
        w[4] = with_top<1, 4>(w[4], plane), w[5] = with_top<1, 5>(w[5], plane);
        w[6] = with_top<1, 6>(w[6], plane), w[7] = with_top<1, 7>(w[7], plane);
    } else if constexpr (kBits == 6) {
        const Bytes first = load_bytes(p), second = load_bytes(p + 64);
        w[0] = with_top<2, 0>(w[0], first), w[1] = with_top<2, 2>(w[1], first);
        w[2] = with_top<2, 4>(w[2], first), w[3] = with_top<2, 6>(w[3], first);
        w[4] = with_top<2, 0>(w[4], second), w[5] = with_top<2, 2>(w[5], second);
        w[6] = with_top<2, 4>(w[6], second), w[7] = with_top<2, 6>(w[7], second);
    }
}

// Scales of block b for the slice of rows that begins at `row`.
template <Kind K>
struct Scales {
    Floats d, m;    // m: what is added (Q4_1) or subtracted (K types) per unit of dx * sumx
    Floats d2, m2;  // of the second 16 columns, where those have their own
    Ints sc, sc2;

    inline Scales(const uint8_t* s, int64_t b, int row) {
        if constexpr (K == Kind::Q4_0 || K == Kind::Q5_0 || K == Kind::Q8_0) {
            d = halves(s + b * 32 + row * 2);
        } else if constexpr (K == Kind::Q4_1 || K == Kind::Q5_1) {
            d = halves(s + b * 64 + row * 2);
            m = halves(s + b * 64 + 32 + row * 2);
        } else if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) {
            const uint8_t *super = s + b / 8 * 320, *sub = super + 64 + b % 8 * 32;
            d = product(halves(super + row * 2), floats(unsigned_bytes(sub + row)));
            m = product(halves(super + 32 + row * 2), floats(unsigned_bytes(sub + 16 + row)));
        } else if constexpr (K == Kind::Q6_K) {
            const uint8_t *super = s + b / 8 * 288, *sub = super + 32 + b % 8 * 32;
            d = halves(super + row * 2);
            sc = signed_bytes(sub + row);
            sc2 = signed_bytes(sub + 16 + row);
        } else if constexpr (K == Kind::Whole32) {
            d = singles(s + b * 64 + row * 4);
        } else {
            const uint8_t* at = s + b * (K == Kind::Whole16 ? 128 : 256) + row * 4;
            d = singles(at), d2 = singles(at + 64);
            if constexpr (K == Kind::Whole16Min) m = singles(at + 128), m2 = singles(at + 192);
        }
    }
};

template <Kind K>
inline Ints dots(Ints acc, const Bytes* w, const int8_t* x, int from, int to) {
    KVARN_UNROLL(8)
    for (int g = from; g < to; ++g) {
        if constexpr (eight_bits(K))
            acc = dot8(acc, w[g], x + 4 * g);
        else
            acc = dot(acc, w[g], x + 4 * g);
    }
    return acc;
}

template <Kind K>
inline Floats accumulate(Floats acc, const Bytes* w, const Scales<K>& s, const int8_t* x, const BlockMeta& meta) {
    constexpr int kOffset = offset_of(K);
    const Floats dx = same(meta.d);
    if constexpr (K == Kind::Q6_K) {  // both halves as one integer below 2^24
        const Ints a = dots<K>(ints(-kOffset * meta.sum[0]), w, x, 0, 4);
        const Ints b = dots<K>(ints(-kOffset * meta.sum[1]), w, x, 4, 8);
        return fmadd(product(s.d, dx), floats(plus(times(s.sc, a), times(s.sc2, b))), acc);
    } else if constexpr (K == Kind::Whole16 || K == Kind::Whole16Min) {
        const Ints a = dots<K>(ints(-kOffset * meta.sum[0]), w, x, 0, 4);
        const Ints b = dots<K>(ints(-kOffset * meta.sum[1]), w, x, 4, 8);
        acc = fmadd(product(s.d, dx), floats(a), acc);
        acc = fmadd(product(s.d2, dx), floats(b), acc);
        if constexpr (K == Kind::Whole16Min) {
            acc = fnmadd(s.m, same(meta.d * float(meta.sum[0])), acc);
            acc = fnmadd(s.m2, same(meta.d * float(meta.sum[1])), acc);
        }
        return acc;
    } else {
        const Ints sum = dots<K>(ints(-kOffset * (meta.sum[0] + meta.sum[1])), w, x, 0, 8);
        acc = fmadd(product(s.d, dx), floats(sum), acc);
        if constexpr (K == Kind::Q4_1 || K == Kind::Q5_1) acc = fmadd(s.m, same(meta.s), acc);
        if constexpr (K == Kind::Q4_K || K == Kind::Q5_K) acc = fnmadd(s.m, same(meta.s), acc);
        return acc;
    }
}

inline void write_row(const Output& y, int64_t row, int64_t column, Floats acc) {
    float* p = y.data + row * y.stride + column;
    float lanes[L];
    put(lanes, acc);
    if (y.bias)
        for (int i = 0; i < L; ++i) lanes[i] += y.bias[column + i];
    if (y.add)
        for (int i = 0; i < L; ++i) lanes[i] += p[i];
    memcpy(p, lanes, sizeof lanes);
}

constexpr int64_t kAhead = 8192;  // bytes of codes to prefetch ahead, when they come from memory

// R rows of one activation tile with one group of weights.
template <Kind K, int R>
void tile(const Packed& w, const Activations& x, const Output& y, int64_t group, int64_t tile_index, int first) {
    constexpr int kStep = kWide ? R : (R < 4 ? R : 4);  // 8 code vectors and the accumulators stay in registers
    const uint8_t *scales = w.scales(group), *codes = w.codes(group);
    const int64_t stride = x.height * kBlock, share = w.group_bytes / w.blocks;
    for (int r0 = 0; r0 < R; r0 += kStep) {
        const int8_t* xs = x.codes + tile_index * x.blocks * stride + (first + r0) * kBlock;
        const BlockMeta* meta = x.meta + tile_index * x.blocks * x.height + first + r0;
        for (int row = 0; row < int(kGroup); row += L) {
            Floats acc[kStep];
            for (int r = 0; r < kStep; ++r) acc[r] = same(0.0f);
            for (int64_t b = 0; b < w.blocks; ++b) {
                const uint8_t* p = codes + b * block_bytes(K);
                if constexpr (R <= 4)  // the stream: scales and codes of this group, then of the next
                    for (int64_t line = 0; line < share; line += 64) prefetch(scales + b * share + kAhead + line);
                Bytes v[8];
                unpack<bits_of_kind(K)>(p + row * 4, v);
                const Scales<K> s(scales, b, row);
                const int8_t* xb = xs + b * stride;
                const BlockMeta* mb = meta + b * x.height;
                KVARN_UNROLL(16)
                for (int r = 0; r < kStep; ++r) acc[r] = accumulate<K>(acc[r], v, s, xb + r * kBlock, mb[r]);
            }
            const int64_t column = group * kGroup + row;
            for (int r = 0; r < kStep; ++r) {
                const int64_t at = tile_index * kTile + first + r0 + r;
                if (at < x.rows) write_row(y, at, column, acc[r]);
            }
        }
    }
}

template <Kind K>
void multiply_integers(const Packed& w, const Activations& x, const Output& y, const Range& r) {
    for (int64_t group = r.group_begin; group < r.group_end; ++group) {
        for (int64_t t = r.tile_begin; t < r.tile_end; ++t) {
            const int64_t left = smaller(x.rows - t * kTile, kTile);
            if (left > 8)
                tile<K, 16>(w, x, y, group, t, 0);
            else if (left > 4)
                tile<K, 8>(w, x, y, group, t, 0);
            else if (left > 2)
                tile<K, 4>(w, x, y, group, t, 0);
            else if (left > 1)
                tile<K, 2>(w, x, y, group, t, 0);
            else
                tile<K, 1>(w, x, y, group, t, 0);
        }
    }
}

// -- floating-point weights: one chain per output, lanes being rows ---------------------------------------------------

inline void write_lanes(const Output& y, int64_t row, int64_t column, F acc) {
    float* p = y.data + row * y.stride + column;
    if (y.bias) acc = add(acc, load(y.bias + column));
    if (y.add) acc = add(acc, load(p));
    store(p, acc);
}

template <Kind K, int R>
void float_rows(const Packed& w, const Activations& x, const Output& y, int64_t group, int64_t first) {
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    const uint8_t* codes = w.codes(group);
    if constexpr (K == Kind::BF16) {
        const int64_t width = x.blocks * kBlock;
        for (int64_t c = 0; c < width; c += 2) {
            const auto* pair = reinterpret_cast<const uint16_t*>(codes + c * 32);
            if constexpr (R == 1) prefetch(codes + c * 32 + kAhead);
#if defined(__AVX512BF16__)
            const auto b = (__m512bh)_mm512_loadu_si512(pair);
            for (int r = 0; r < R; ++r) {
                int32_t two;
                memcpy(&two, x.bf16 + (first + r) * width + c, 4);
                acc[r].v = _mm512_dpbf16_ps(acc[r].v, b, (__m512bh)_mm512_set1_epi32(two));
            }
#else
            const F odd = odd_bf16(pair), even = even_bf16(pair);
            for (int r = 0; r < R; ++r) {
                const uint16_t* p = x.bf16 + (first + r) * width + c;
                acc[r] = fma(odd, set1(widen_bf16(p[1])), acc[r]);
                acc[r] = fma(even, set1(widen_bf16(p[0])), acc[r]);
            }
#endif
        }
    } else {
        for (int64_t c = 0; c < w.cols; ++c) {
            F b;
            if constexpr (K == Kind::F32) {
                b = load(reinterpret_cast<const float*>(codes) + c * kGroup);
                if constexpr (R == 1) prefetch(codes + c * 64 + kAhead);
            } else {
                b = load_f16(reinterpret_cast<const uint16_t*>(codes) + c * kGroup);
                if constexpr (R == 1) prefetch(codes + c * 32 + kAhead);
            }
            for (int r = 0; r < R; ++r) acc[r] = fma(b, set1(x.f32[(first + r) * x.stride + c]), acc[r]);
        }
    }
    for (int r = 0; r < R; ++r) write_lanes(y, first + r, group * kGroup, acc[r]);
}

template <Kind K>
void multiply_floats(const Packed& w, const Activations& x, const Output& y, const Range& r) {
    constexpr int R = kWide ? 8 : 4;
    const int64_t end = smaller(r.tile_end * kTile, x.rows);
    for (int64_t group = r.group_begin; group < r.group_end; ++group) {
        int64_t row = r.tile_begin * kTile;
        for (; row + R <= end; row += R) float_rows<K, R>(w, x, y, group, row);
        for (; row < end; ++row) float_rows<K, 1>(w, x, y, group, row);
    }
}

void multiply(const Packed& w, const Activations& x, const Output& y, const Range& r) {
    switch (w.kind) {
        case Kind::Q4_0:
            return multiply_integers<Kind::Q4_0>(w, x, y, r);
        case Kind::Q4_1:
            return multiply_integers<Kind::Q4_1>(w, x, y, r);
        case Kind::Q5_0:
            return multiply_integers<Kind::Q5_0>(w, x, y, r);
        case Kind::Q5_1:
            return multiply_integers<Kind::Q5_1>(w, x, y, r);
        case Kind::Q8_0:
            return multiply_integers<Kind::Q8_0>(w, x, y, r);
        case Kind::Q4_K:
            return multiply_integers<Kind::Q4_K>(w, x, y, r);
        case Kind::Q5_K:
            return multiply_integers<Kind::Q5_K>(w, x, y, r);
        case Kind::Q6_K:
            return multiply_integers<Kind::Q6_K>(w, x, y, r);
        case Kind::Whole32:
            return multiply_integers<Kind::Whole32>(w, x, y, r);
        case Kind::Whole16:
            return multiply_integers<Kind::Whole16>(w, x, y, r);
        case Kind::Whole16Min:
            return multiply_integers<Kind::Whole16Min>(w, x, y, r);
        case Kind::BF16:
            return multiply_floats<Kind::BF16>(w, x, y, r);
        case Kind::F16:
            return multiply_floats<Kind::F16>(w, x, y, r);
        case Kind::F32:
            return multiply_floats<Kind::F32>(w, x, y, r);
    }
}

// -- activations ------------------------------------------------------------------------------------------------------

// x: blocks * 32 floats, zeros past cols. Codes are x / d rounded half to even, d = amax / 127; a block with a value
// that is not finite gets d = NaN, so that nothing plausible comes of it.
void quantize(const float* x, const Activations& out, int64_t row) {
    const int64_t t = row / kTile, r = row % kTile;
    int8_t* codes = out.codes + t * out.blocks * out.height * kBlock + r * kBlock;
    BlockMeta* meta = out.meta + t * out.blocks * out.height + r;
    for (int64_t b = 0; b < out.blocks; ++b, codes += out.height * kBlock, meta += out.height) {
        const F lo = load(x + b * kBlock), hi = load(x + b * kBlock + 16);
        const float amax = reduce_max(max(abs(lo), abs(hi)));
        const float check = reduce_add(add(sub(lo, lo), sub(hi, hi)));  // 0, or NaN where something is not finite
        const float d = amax * (1.0f / 127.0f) + check;
        const float inverse = d > 0.0f ? 127.0f / amax : 0.0f;
        const F scale = set1(inverse);
        const I a = to_int(mul(lo, scale)), c = to_int(mul(hi, scale));
        store_i8(codes, a);
        store_i8(codes + 16, c);
        int32_t s0 = 0, s1 = 0;
        for (int i = 0; i < 16; ++i) s0 += codes[i], s1 += codes[16 + i];
        meta->d = d;
        meta->s = d * float(s0 + s1);
        meta->sum[0] = s0, meta->sum[1] = s1;
    }
}

void round(const float* x, const Activations& out, int64_t row) {
    uint16_t* p = out.bf16 + row * out.blocks * kBlock;
    for (int64_t c = 0; c < out.blocks * kBlock; c += kLanes) store_bf16(p + c, load(x + c));
}

}  // namespace

extern const Linear linear;
const Linear linear = {quantize, round, multiply};

}  // namespace kvarn::KVARN_ISA
