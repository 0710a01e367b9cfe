// Packs the types whose numbers come from a table of at most 16 values: IQ*, TQ*, MXFP4. A file
// block of 256 columns becomes a scale, 16 or 8 factors of it, and the table index of each number.
// The IQ1 to IQ3 types store rows of a grid, which the caller gives. Scales are multiplied by
// powers of two to make the factors integers; nothing is rounded.
#include <bit>

#include "group_writer.hpp"
#include "half.hpp"

namespace kvarn {

namespace {

constexpr int8_t kIq1[16] = {-9, -7, -1, 1, 7, 9};
constexpr int8_t kIq2[16] = {-43, -25, -8, 8, 25, 43};
constexpr int8_t kIq3Xxs[16] = {-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62};
constexpr int8_t kIq3S[16] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTernary[16] = {-1, 0, 1, 2};
constexpr int8_t kMxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Block {  // of 256 columns
    float d;
    int8_t factors[16];
    int8_t numbers[256];
    const int8_t* grid;

    void eight(int at, int64_t grid_row, uint32_t signs) {
        for (int j = 0; j < 8; ++j) numbers[at + j] = signed_by(grid[grid_row * 8 + j], signs >> j);
    }
    void four(int at, int64_t grid_row, uint32_t signs) {
        for (int j = 0; j < 4; ++j) numbers[at + j] = signed_by(grid[grid_row * 4 + j], signs >> j);
    }
    void shifted(int at, int64_t grid_row, bool down) {  // by plus or minus one eighth
        for (int j = 0; j < 8; ++j) numbers[at + j] = int8_t(grid[grid_row * 8 + j] * 8 + (down ? -1 : 1));
    }

  private:
    static int8_t signed_by(int8_t x, uint32_t sign) { return sign & 1u ? int8_t(-x) : x; }
};

// Seven signs are stored; the eighth makes the number of minus signs even.
uint32_t eight_signs(uint32_t seven) { return seven | (uint32_t(std::popcount(seven) & 1) << 7); }

int8_t odd(uint32_t x) { return int8_t(2 * x + 1); }

void iq2_xxs(const uint8_t* p, Block& b) {
    b.d = widen(half(p)) * 0.125f;
    for (int i = 0; i < 8; ++i) {
        const uint8_t* rows = p + 2 + i * 8;
        const uint32_t rest = word(rows + 4);
        b.factors[2 * i] = b.factors[2 * i + 1] = odd(rest >> 28);
        for (int l = 0; l < 4; ++l) b.eight(i * 32 + l * 8, rows[l], eight_signs((rest >> (7 * l)) & 127u));
    }
}

void iq2_xs(const uint8_t* p, Block& b) {
    b.d = widen(half(p)) * 0.125f;
    for (int i = 0; i < 16; ++i) b.factors[i] = odd((p[66 + i / 2] >> (i % 2 * 4)) & 15u);
    for (int i = 0; i < 32; ++i) {
        const uint32_t q = half(p + 2 + i * 2);
        b.eight(i * 8, q & 511u, eight_signs(q >> 9));
    }
}

void iq2_s(const uint8_t* p, Block& b) {
    b.d = widen(half(p)) * 0.125f;
    for (int i = 0; i < 16; ++i) b.factors[i] = odd((p[74 + i / 2] >> (i % 2 * 4)) & 15u);
    for (int i = 0; i < 32; ++i) {
        const uint32_t top = (p[66 + i / 4] >> (i % 4 * 2)) & 3u;
        b.eight(i * 8, p[2 + i] | (top << 8), p[34 + i]);
    }
}

void iq3_xxs(const uint8_t* p, Block& b) {
    b.d = widen(half(p)) * 0.25f;
    for (int i = 0; i < 8; ++i) {
        const uint32_t rest = word(p + 66 + i * 4);
        b.factors[2 * i] = b.factors[2 * i + 1] = odd(rest >> 28);
        for (int l = 0; l < 8; ++l) {
            const uint32_t signs = eight_signs((rest >> (l / 2 * 7)) & 127u);
            b.four(i * 32 + l * 4, p[2 + i * 8 + l], signs >> (l % 2 * 4));
        }
    }
}

void iq3_s(const uint8_t* p, Block& b) {
    b.d = widen(half(p));
    for (int i = 0; i < 16; ++i) b.factors[i] = odd((p[106 + i / 4] >> (i / 2 % 2 * 4)) & 15u);
    for (int i = 0; i < 64; ++i) {
        const uint32_t top = (p[66 + i / 8] >> (i % 8)) & 1u;
        b.four(i * 4, p[2 + i] | (top << 8), uint32_t(p[74 + i / 2]) >> (i % 2 * 4));
    }
}

void iq1_s(const uint8_t* p, Block& b) {
    b.d = widen(half(p)) * 0.125f;
    for (int i = 0; i < 8; ++i) {
        const uint32_t rest = half(p + 34 + i * 2);
        b.factors[2 * i] = b.factors[2 * i + 1] = odd((rest >> 12) & 7u);
        for (int l = 0; l < 4; ++l)
            b.shifted(i * 32 + l * 8, p[2 + i * 4 + l] | (((rest >> (3 * l)) & 7u) << 8), rest & 0x8000u);
    }
}

void iq1_m(const uint8_t* p, Block& b) {
    uint32_t d = 0;
    for (int i = 0; i < 4; ++i) d |= uint32_t(half(p + 48 + i * 2) >> 12) << (4 * i);
    b.d = widen(uint16_t(d)) * 0.125f;
    for (int i = 0; i < 16; ++i) b.factors[i] = odd((half(p + 48 + i / 4 * 2) >> (i % 4 * 3)) & 7u);
    for (int i = 0; i < 32; ++i) {
        const uint32_t rest = p[32 + i / 2] >> (i % 2 * 4);
        b.shifted(i * 8, p[i] | ((rest & 7u) << 8), rest & 8u);
    }
}

void iq4_xs(const uint8_t* p, Block& b) {
    b.d = widen(half(p));
    for (int i = 0; i < 8; ++i) {
        const int low = (p[4 + i / 2] >> (i % 2 * 4)) & 15, top = (half(p + 2) >> (2 * i)) & 3;
        b.factors[2 * i] = b.factors[2 * i + 1] = int8_t((low | (top << 4)) - 32);
        for (int j = 0; j < 32; ++j) b.numbers[i * 32 + j] = kIq4[(p[8 + i * 16 + j % 16] >> (j / 16 * 4)) & 15];
    }
}

// A byte has five base-3 digits as a fraction of 256; the highest digit comes first.
int8_t digit(uint8_t fraction, uint32_t power) { return int8_t(((uint8_t(fraction * power) * 3u) >> 8) - 1); }

void tq1_0(const uint8_t* p, Block& b) {
    constexpr uint32_t kPowers[5] = {1, 3, 9, 27, 81};
    b.d = widen(half(p + 52));
    memset(b.factors, 1, 16);
    for (int n = 0; n < 5; ++n) {
        for (int j = 0; j < 32; ++j) b.numbers[n * 32 + j] = digit(p[j], kPowers[n]);
        for (int j = 0; j < 16; ++j) b.numbers[160 + n * 16 + j] = digit(p[32 + j], kPowers[n]);
    }
    for (int n = 0; n < 4; ++n)
        for (int j = 0; j < 4; ++j) b.numbers[240 + n * 4 + j] = digit(p[48 + j], kPowers[n]);
}

void tq2_0(const uint8_t* p, Block& b) {
    b.d = widen(half(p + 64));
    memset(b.factors, 1, 16);
    for (int i = 0; i < 256; ++i) b.numbers[i] = int8_t(((p[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3) - 1);
}

struct Places {  // number -> its index in the table
    uint8_t of[256] = {};

    explicit Places(const uint8_t* table) {
        for (int i = 15; i >= 0; --i) of[uint8_t(table[i] - 128)] = uint8_t(i);
    }
    uint8_t operator()(int8_t number) const { return of[uint8_t(number)]; }
};

template <int64_t kBytes, void (*decode)(const uint8_t*, Block&), int kPer = 32>
void pack_256(const GroupWriter& t, int64_t row, const uint8_t* src) {
    const Places place(t.w.table);
    constexpr ScaleLayout kLayout = scale_layout(kPer == 16 ? Kind::Table16 : Kind::Table32);
    Block b;
    b.grid = t.grid;
    for (int64_t s = 0; s < t.w.blocks / 8; ++s, src += kBytes) {
        decode(src, b);
        t.put_float(kLayout.record(s * 8), row, b.d);
        for (int i = 0; i < 256 / kPer; ++i)
            t.scales[kLayout.factor(s * 8, i) + row] = uint8_t(b.factors[i * kPer / 16]);
        for (int j = 0; j < 8; ++j) {
            const int8_t* numbers = b.numbers + j * 32;
            uint8_t nibbles[16];
            for (int i = 0; i < 16; ++i) nibbles[i] = uint8_t(place(numbers[i]) | (place(numbers[16 + i]) << 4));
            put_nibbles(t.block(s * 8 + j), row, nibbles);
        }
    }
}

void pack_iq4_nl(const GroupWriter& t, int64_t row, const uint8_t* src) {
    for (int64_t b = 0; b < t.w.blocks; ++b, src += 18) {
        t.put_float(scale_layout(Kind::Table).record(b), row, widen(half(src)));
        put_nibbles(t.block(b), row, src + 2);
    }
}

void pack_mxfp4(const GroupWriter& t, int64_t row, const uint8_t* src) {
    for (int64_t b = 0; b < t.w.blocks; ++b, src += 17) {
        const uint32_t e = src[0];  // the scale is half of 2^(e - 127), because the table is doubled
        t.put_float(scale_layout(Kind::Table).record(b), row,
                    std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23));
        put_nibbles(t.block(b), row, src + 1);
    }
}

constexpr FileType kTableTypes[] = {
    {"IQ1_S", 256, 50, Kind::Table32, pack_256<50, iq1_s>, kIq1, 2048, 8},
    {"IQ1_M", 256, 56, Kind::Table16, pack_256<56, iq1_m, 16>, kIq1, 2048, 8},
    {"IQ2_XXS", 256, 66, Kind::Table32, pack_256<66, iq2_xxs>, kIq2, 256, 8},
    {"IQ2_XS", 256, 74, Kind::Table16, pack_256<74, iq2_xs, 16>, kIq2, 512, 8},
    {"IQ2_S", 256, 82, Kind::Table16, pack_256<82, iq2_s, 16>, kIq2, 1024, 8},
    {"IQ3_XXS", 256, 98, Kind::Table32, pack_256<98, iq3_xxs>, kIq3Xxs, 256, 4},
    {"IQ3_S", 256, 110, Kind::Table32, pack_256<110, iq3_s>, kIq3S, 512, 4},
    {"IQ4_XS", 256, 136, Kind::Table32, pack_256<136, iq4_xs>, kIq4},
    {"TQ1_0", 256, 54, Kind::Table32, pack_256<54, tq1_0>, kTernary},
    {"TQ2_0", 256, 66, Kind::Table32, pack_256<66, tq2_0>, kTernary},
    {"IQ4_NL", 32, 18, Kind::Table, pack_iq4_nl, kIq4},
    {"MXFP4", 32, 17, Kind::Table, pack_mxfp4, kMxfp4},
};

}  // namespace

const FileType* find_table_type(const std::string& name) {
    for (const FileType& s : kTableTypes)
        if (name == s.name) return &s;
    return nullptr;
}

bool fits(const FileType& file_type, const int8_t* grid) {
    for (int64_t i = 0; i < file_type.grid_rows * file_type.grid_columns; ++i) {
        // IQ1 shifts grid numbers and never negates them.
        bool found = file_type.numbers == kIq1 && grid[i] >= -1 && grid[i] <= 1;
        if (file_type.numbers != kIq1)
            for (int j = 0; j < 16; ++j) found = found || (grid[i] > 0 && grid[i] == file_type.numbers[j]);
        if (!found) return false;
    }
    return true;
}

}  // namespace kvarn
