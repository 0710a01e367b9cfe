#include "pack.hpp"

#include <bit>
#include <cstring>
#include <numeric>

#include "half.hpp"
#include "pages.hpp"

namespace kvarn {

namespace {

struct Shape {
    const char* name;
    int64_t codes, scales;  // bytes per block of 32 columns and 16 rows
};

constexpr Shape kShapes[] = {
    {"Q4_0", 256, 32},
    {"Q4_1", 256, 64},
    {"Q5_0", 320, 32},
    {"Q5_1", 320, 64},
    {"Q8_0", 512, 32},
    {"Q4_K", 256, 40},
    {"Q5_K", 320, 40},
    {"Q6_K", 384, 36},
    {"int8 per 32", 512, 64},
    {"int8 per 16", 512, 128},
    {"int8 per 16 with minima", 512, 256},
    {"BF16", 1024, 0},
    {"F16", 1024, 0},
    {"F32", 2048, 0},
};

const Shape& shape_of(Kind kind) { return kShapes[int(kind)]; }

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

uint32_t word(const uint8_t* p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}
void put(uint8_t* p, uint32_t x) { memcpy(p, &x, 4); }
// Where a block's parts lie.
struct Target {
    const Packed& w;
    uint8_t *scales, *codes;  // of the group
    int64_t stride;           // of a block's codes

    Target(const Packed& packed, int64_t group)
        : w(packed),
          scales(packed.data.get() + group * packed.group_bytes),
          codes(scales + packed.scale_bytes),
          stride(shape_of(packed.kind).codes) {}
    uint8_t* block(int64_t b) const { return codes + b * stride; }
    void put_half(int64_t offset, int64_t row, uint16_t x) const { memcpy(scales + offset + row * 2, &x, 2); }
    void put_float(int64_t offset, int64_t row, float x) const { memcpy(scales + offset + row * 4, &x, 4); }
};

// 16 bytes that hold columns i and i + 16 of a block in their two nibbles.
void put_nibbles(uint8_t* nibbles, int64_t row, const uint8_t* bytes) {
    for (int g = 0; g < 4; ++g) put(nibbles + g * 64 + row * 4, word(bytes + g * 4));
}

// Bit i of `bits` is the fifth bit of column i.
void put_fifth(uint8_t* plane, int64_t row, uint32_t bits) {
    for (int g = 0; g < 8; ++g)
        for (int j = 0; j < 4; ++j) plane[row * 4 + j] |= uint8_t(((bits >> (4 * g + j)) & 1u) << g);
}

void pack_simple(const Target& t, int64_t row, const uint8_t* src) {  // Q4_0 Q4_1 Q5_0 Q5_1
    const Kind kind = t.w.kind;
    const bool five = kind == Kind::Q5_0 || kind == Kind::Q5_1, min = kind == Kind::Q4_1 || kind == Kind::Q5_1;
    const int64_t per_block = 2 + (min ? 2 : 0) + (five ? 4 : 0) + 16, scale_stride = min ? 64 : 32;
    for (int64_t b = 0; b < t.w.blocks; ++b, src += per_block) {
        const uint8_t* p = src;
        t.put_half(b * scale_stride, row, half(p));
        p += 2;
        if (min) {
            t.put_half(b * scale_stride + 32, row, half(p));
            p += 2;
        }
        uint8_t* codes = t.block(b);
        if (five) {
            put_fifth(codes, row, word(p));
            p += 4;
            codes += 64;
        }
        put_nibbles(codes, row, p);
    }
}

void pack_q8_0(const Target& t, int64_t row, const uint8_t* src) {
    for (int64_t b = 0; b < t.w.blocks; ++b, src += 34) {
        t.put_half(b * 32, row, half(src));
        for (int g = 0; g < 8; ++g) put(t.block(b) + g * 64 + row * 4, word(src + 2 + g * 4) ^ 0x80808080u);
    }
}

// The 6-bit scale and minimum of sub-block j, out of 12 bytes.
void scale_min(const uint8_t* s, int j, uint8_t& sc, uint8_t& mn) {
    if (j < 4) {
        sc = s[j] & 63, mn = s[j + 4] & 63;
    } else {
        sc = uint8_t((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
        mn = uint8_t((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
    }
}

void pack_q45_k(const Target& t, int64_t row, const uint8_t* src) {
    const bool five = t.w.kind == Kind::Q5_K;
    for (int64_t s = 0; s < t.w.blocks / 8; ++s, src += five ? 176 : 144) {
        const int64_t at = s * 320;
        t.put_half(at, row, half(src));
        t.put_half(at + 32, row, half(src + 2));
        const uint8_t *high = src + 16, *qs = src + (five ? 48 : 16);
        for (int j = 0; j < 8; ++j) {
            uint8_t sc, mn;
            scale_min(src + 4, j, sc, mn);
            t.scales[at + 64 + j * 32 + row] = sc;
            t.scales[at + 64 + j * 32 + 16 + row] = mn;
            uint8_t* codes = t.block(s * 8 + j);
            if (five) {  // bit j of byte i belongs to column i of sub-block j
                uint32_t bits = 0;
                for (int i = 0; i < 32; ++i) bits |= uint32_t((high[i] >> j) & 1u) << i;
                put_fifth(codes, row, bits);
                codes += 64;
            }
            const uint8_t* q = qs + j / 2 * 32;  // a byte holds one column of sub-block j and one of j + 1
            const int shift = j % 2 * 4;
            for (int g = 0; g < 4; ++g) {
                const uint32_t low = (word(q + g * 4) >> shift) & 0x0f0f0f0fu;
                const uint32_t top = (word(q + 16 + g * 4) >> shift) & 0x0f0f0f0fu;
                put(codes + g * 64 + row * 4, low | (top << 4));
            }
        }
    }
}

void pack_q6_k(const Target& t, int64_t row, const uint8_t* src) {
    for (int64_t s = 0; s < t.w.blocks / 8; ++s, src += 210) {
        const int64_t at = s * 288;
        t.put_half(at, row, half(src + 208));
        for (int i = 0; i < 16; ++i) t.scales[at + 32 + i * 16 + row] = src[192 + i];
        for (int j = 0; j < 8; ++j) {  // 32 columns each; low nibbles in ql, upper bit pairs in qh
            const int part = j / 4, in = j % 4;
            const uint8_t *low = src + part * 64 + in % 2 * 32, *top = src + 128 + part * 32;
            uint8_t* codes = t.block(s * 8 + j);
            for (int g = 0; g < 8; ++g) {
                const uint32_t nibbles = (word(low + g * 4) >> (in / 2 * 4)) & 0x0f0f0f0fu;
                const uint32_t pairs = (word(top + g * 4) >> (in * 2)) & 0x03030303u;
                uint8_t* plane = codes + g / 4 * 64 + row * 4;
                put(plane, word(plane) | (pairs << (g % 4 * 2)));
                uint8_t* dst = codes + 128 + g % 4 * 64 + row * 4;
                put(dst, g < 4 ? nibbles : word(dst) | (nibbles << 4));
            }
        }
    }
}

template <typename T>
void pack_plain(const Target& t, int64_t row, const uint8_t* src) {
    for (int64_t c = 0; c < t.w.cols; ++c)
        memcpy(t.codes + (c * kGroup + row) * sizeof(T), src + c * sizeof(T), sizeof(T));
}

void pack_bf16(const Target& t, int64_t row, const uint8_t* src) {
    for (int64_t c = 0; c < t.w.cols; ++c) memcpy(t.codes + (c / 2 * kGroup + row) * 4 + c % 2 * 2, src + c * 2, 2);
}

// `n` numbers as codes times one scale, exactly; false when there is no such scale.
bool factor(const float* x, int n, int8_t* codes, float& scale) {
    int64_t mantissa[kBlock];
    int least = INT32_MAX;
    for (int i = 0; i < n; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
        const int e = int((bits >> 23) & 255u);
        if (e == 255) return false;
        mantissa[i] = int64_t((bits & 0x7fffffu) | (e ? 0x800000u : 0u)) * (bits >> 31 ? -1 : 1);
        if (mantissa[i] && (e ? e : 1) < least) least = e ? e : 1;
    }
    scale = 0.0f;
    memset(codes, 0, size_t(n));
    if (least == INT32_MAX) return true;
    int64_t divisor = 0;
    for (int i = 0; i < n; ++i) {
        if (!mantissa[i]) continue;
        const int e = int((std::bit_cast<uint32_t>(x[i]) >> 23) & 255u), shift = (e ? e : 1) - least;
        if (shift > 30) return false;
        mantissa[i] *= int64_t(1) << shift;
        divisor = std::gcd(divisor, mantissa[i]);
    }
    for (int i = 0; i < n; ++i) {
        const int64_t code = mantissa[i] / divisor;
        if (code < -127 || code > 127) return false;
        codes[i] = int8_t(code);
    }
    // divisor * 2^(least - 150); it has at most 24 bits, being a divisor of a 24-bit mantissa times a power of two
    scale = float(divisor);
    for (int e = least - 150; e < 0; e += 64) scale *= std::bit_cast<float>(uint32_t(127 - (e < -64 ? 64 : -e)) << 23);
    for (int e = least - 150; e > 0; e -= 64) scale *= std::bit_cast<float>(uint32_t(127 + (e > 64 ? 64 : e)) << 23);
    for (int i = 0; i < n; ++i)
        if (float(codes[i]) * scale != x[i]) return false;
    return true;
}

void put_code(const Target& t, int64_t row, int64_t column, int8_t code) {
    const int64_t in = column % kBlock;
    t.block(column / kBlock)[in / 4 * 64 + row * 4 + in % 4] = uint8_t(code) ^ 0x80u;
}

}  // namespace

bool kind_of(const std::string& type, Kind& kind) {
    for (const Kind k : {Kind::Q4_0, Kind::Q4_1, Kind::Q5_0, Kind::Q5_1, Kind::Q8_0, Kind::Q4_K, Kind::Q5_K, Kind::Q6_K,
                         Kind::BF16, Kind::F16, Kind::F32})
        if (type == name_of(k)) {
            kind = k;
            return true;
        }
    return false;
}

int64_t row_bytes(const std::string& type, int64_t cols) {
    struct Stored {
        const char* type;
        int64_t columns, bytes;
    };
    constexpr Stored kStored[] = {{"Q4_0", 32, 18},   {"Q4_1", 32, 20},  {"Q5_0", 32, 22},   {"Q5_1", 32, 24},
                                  {"Q8_0", 32, 34},   {"Q2_K", 256, 84}, {"Q4_K", 256, 144}, {"Q5_K", 256, 176},
                                  {"Q6_K", 256, 210}, {"BF16", 1, 2},    {"F16", 1, 2},      {"F32", 1, 4}};
    for (const Stored& s : kStored)
        if (type == s.type) return cols / s.columns * s.bytes;
    return 0;
}

const char* name_of(Kind kind) { return shape_of(kind).name; }
int64_t code_bytes(Kind kind) { return shape_of(kind).codes; }
int64_t scale_bytes(Kind kind) { return shape_of(kind).scales; }

Packed allocate(Kind kind, int64_t rows, int64_t cols) {
    Packed w;
    w.kind = kind;
    w.rows = rows, w.cols = cols;
    w.groups = up(rows, kGroup) / kGroup;
    w.blocks = up(cols, kBlock) / kBlock;
    w.scale_bytes = up(w.blocks * scale_bytes(kind), 64);
    w.group_bytes = w.scale_bytes + w.blocks * code_bytes(kind);
    w.data = pages(w.nbytes());
    return w;
}

void pack(const uint8_t* rows, int64_t row_bytes, const Packed& out, int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
        const Target t(out, group);
        for (int64_t row = 0; row < kGroup && group * kGroup + row < out.rows; ++row) {
            const uint8_t* src = rows + (group * kGroup + row) * row_bytes;
            switch (out.kind) {
                case Kind::Q4_0:
                case Kind::Q4_1:
                case Kind::Q5_0:
                case Kind::Q5_1:
                    pack_simple(t, row, src);
                    break;
                case Kind::Q8_0:
                    pack_q8_0(t, row, src);
                    break;
                case Kind::Q4_K:
                case Kind::Q5_K:
                    pack_q45_k(t, row, src);
                    break;
                case Kind::Q6_K:
                    pack_q6_k(t, row, src);
                    break;
                case Kind::BF16:
                    pack_bf16(t, row, src);
                    break;
                case Kind::F16:
                    pack_plain<uint16_t>(t, row, src);
                    break;
                case Kind::F32:
                    pack_plain<uint32_t>(t, row, src);
                    break;
                default:
                    break;
            }
        }
    }
}

bool pack_floats(const float* rows, const Packed& out, int64_t begin, int64_t end) {
    const int n = out.kind == Kind::Whole32 ? 32 : 16;
    const int64_t stride = out.kind == Kind::Whole32 ? 64 : 128;
    int8_t codes[kBlock];
    for (int64_t group = begin; group < end; ++group) {
        const Target t(out, group);
        memset(t.codes, 0x80, size_t(out.group_bytes - out.scale_bytes));
        for (int64_t row = 0; row < kGroup && group * kGroup + row < out.rows; ++row) {
            const float* src = rows + (group * kGroup + row) * out.cols;
            for (int64_t c = 0; c < out.cols; c += n) {
                const int here = int(out.cols - c < n ? out.cols - c : n);
                float scale;
                if (!factor(src + c, here, codes, scale)) return false;
                t.put_float(c / kBlock * stride + c % kBlock / 16 * (n == 16 ? 64 : 0), row, scale);
                for (int i = 0; i < here; ++i) put_code(t, row, c + i, codes[i]);
            }
        }
    }
    return true;
}

void pack_q2_k(const uint8_t* rows, int64_t row_bytes, const Packed& out, int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
        const Target t(out, group);
        memset(t.codes, 0x80, size_t(out.group_bytes - out.scale_bytes));
        for (int64_t row = 0; row < kGroup && group * kGroup + row < out.rows; ++row) {
            const uint8_t* src = rows + (group * kGroup + row) * row_bytes;
            for (int64_t s = 0; s < out.blocks / 8; ++s, src += 84) {
                const float d = widen(half(src + 80)), dmin = widen(half(src + 82));
                for (int i = 0; i < 256; ++i) {
                    const int part = i / 128, shift = i % 128 / 32 * 2;
                    put_code(t, row, s * 256 + i, int8_t((src[16 + part * 32 + i % 32] >> shift) & 3));
                }
                for (int i = 0; i < 16; ++i) {
                    const int64_t at = (s * 8 + i / 2) * 256 + i % 2 * 64;
                    t.put_float(at, row, d * float(src[i] & 15));
                    t.put_float(at + 128, row, dmin * float(src[i] >> 4));
                }
            }
        }
    }
}

}  // namespace kvarn
