// Packs the stored types whose codes and scales are kept. tables.cpp packs the other types.
#include <iterator>

#include "base.hpp"
#include "group_writer.hpp"
#include "half.hpp"
#include "pages.hpp"

namespace kvarn {

namespace {

constexpr const char* kNames[] = {
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "table, i8 per 16",
    "table, i8 per 32",
    "table, f32 per 32",
    "BF16",
    "F16",
    "F32",
};
static_assert(std::size(kNames) == size_t(Kind::F32) + 1);

// Collects bit j of each of 32 bytes.
uint32_t bits_of_bytes(const uint8_t* bytes, int j) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= uint32_t((bytes[i] >> j) & 1u) << i;
    return bits;
}

// Bit i of `bits` is the upper bit of column i.
void put_plane(uint8_t* plane, int64_t row, uint32_t bits) {
    for (int g = 0; g < 8; ++g)
        for (int j = 0; j < 4; ++j) plane[row * 4 + j] |= uint8_t(((bits >> (4 * g + j)) & 1u) << g);
}

void pack_simple(const GroupWriter& t, int64_t row, const uint8_t* src) {  // Q4_0 Q4_1 Q5_0 Q5_1
    const Kind kind = t.w.kind;
    const bool five = kind == Kind::Q5_0 || kind == Kind::Q5_1, min = kind == Kind::Q4_1 || kind == Kind::Q5_1;
    const int64_t per_block = 2 + (min ? 2 : 0) + (five ? 4 : 0) + 16;
    const ScaleLayout layout = min ? scale_layout(Kind::Q4_1) : scale_layout(Kind::Q4_0);
    for (int64_t b = 0; b < t.w.blocks; ++b, src += per_block) {
        const uint8_t* p = src;
        t.put_half(b * layout.record_bytes(), row, half(p));
        p += 2;
        if (min) {
            t.put_half(b * layout.record_bytes() + layout.min_offset(), row, half(p));
            p += 2;
        }
        uint8_t* codes = t.block(b);
        if (five) {
            put_plane(codes, row, word(p));
            p += 4;
            codes += 64;
        }
        put_nibbles(codes, row, p);
    }
}

void pack_q8_0(const GroupWriter& t, int64_t row, const uint8_t* src) {
    constexpr ScaleLayout kLayout = scale_layout(Kind::Q8_0);
    for (int64_t b = 0; b < t.w.blocks; ++b, src += 34) {
        t.put_half(kLayout.record(b), row, half(src));
        for (int g = 0; g < 8; ++g) put(t.block(b) + g * 64 + row * 4, word(src + 2 + g * 4) ^ 0x80808080u);
    }
}

void pack_q45_k(const GroupWriter& t, int64_t row, const uint8_t* src) {
    constexpr ScaleLayout kLayout = scale_layout(Kind::Q4_K);  // equal for Q5_K
    const bool five = t.w.kind == Kind::Q5_K;
    for (int64_t s = 0; s < t.w.blocks / 8; ++s, src += five ? 176 : 144) {
        t.put_half(kLayout.record(s * 8), row, half(src));
        t.put_half(kLayout.min(s * 8), row, half(src + 2));
        const uint8_t *high = src + 16, *qs = src + (five ? 48 : 16);
        for (int j = 0; j < 8; ++j) {
            uint8_t sc, mn;
            scale_min(src + 4, j, sc, mn);
            t.scales[kLayout.factor(s * 8 + j, 0) + row] = sc;
            t.scales[kLayout.factor(s * 8 + j, 1) + row] = mn;
            uint8_t* codes = t.block(s * 8 + j);
            if (five) {
                put_plane(codes, row, bits_of_bytes(high, j));
                codes += 64;
            }
            const uint8_t* q = qs + j / 2 * 32;  // each byte has one column of each of two sub-blocks
            const int shift = j % 2 * 4;
            for (int g = 0; g < 4; ++g) {
                const uint32_t low = (word(q + g * 4) >> shift) & 0x0f0f0f0fu;
                const uint32_t top = (word(q + 16 + g * 4) >> shift) & 0x0f0f0f0fu;
                put(codes + g * 64 + row * 4, low | (top << 4));
            }
        }
    }
}

// Writes two bits per column into the planes of pairs. A word of `from` has four columns, at this
// shift.
void put_pairs(uint8_t* planes, int64_t row, const uint8_t* from, int shift) {
    for (int g = 0; g < 8; ++g) {
        uint8_t* plane = planes + g / 4 * 64 + row * 4;
        put(plane, word(plane) | (((word(from + g * 4) >> shift) & 0x03030303u) << (g % 4 * 2)));
    }
}

void pack_q2_k(const GroupWriter& t, int64_t row, const uint8_t* src) {
    constexpr ScaleLayout kLayout = scale_layout(Kind::Q2_K);
    for (int64_t s = 0; s < t.w.blocks / 8; ++s, src += 84) {
        t.put_half(kLayout.record(s * 8), row, half(src + 80));
        t.put_half(kLayout.min(s * 8), row, half(src + 82));
        for (int i = 0; i < 16; ++i) t.scales[kLayout.factor(s * 8, i) + row] = src[i];
        for (int j = 0; j < 8; ++j) put_pairs(t.block(s * 8 + j), row, src + 16 + j / 4 * 32, j % 4 * 2);
    }
}

void pack_q3_k(const GroupWriter& t, int64_t row, const uint8_t* src) {
    constexpr ScaleLayout kLayout = scale_layout(Kind::Q3_K);
    for (int64_t s = 0; s < t.w.blocks / 8; ++s, src += 110) {
        const uint8_t *high = src, *sc = src + 96;
        t.put_half(kLayout.record(s * 8), row, half(src + 108));
        for (int i = 0; i < 16; ++i) {  // 6 bits: 4 in nibbles of 8 bytes, 2 in the next 4 bytes
            const int low = (sc[i % 8] >> (i / 8 * 4)) & 15, top = (sc[8 + i % 4] >> (i / 4 * 2)) & 3;
            t.scales[kLayout.factor(s * 8, i) + row] = uint8_t((low | (top << 4)) - 32);
        }
        for (int j = 0; j < 8; ++j) {
            put_pairs(t.block(s * 8 + j), row, src + 32 + j / 4 * 32, j % 4 * 2);
            put_plane(t.block(s * 8 + j) + 128, row, bits_of_bytes(high, j));
        }
    }
}

void pack_q6_k(const GroupWriter& t, int64_t row, const uint8_t* src) {
    constexpr ScaleLayout kLayout = scale_layout(Kind::Q6_K);
    for (int64_t s = 0; s < t.w.blocks / 8; ++s, src += 210) {
        t.put_half(kLayout.record(s * 8), row, half(src + 208));
        for (int i = 0; i < 16; ++i) t.scales[kLayout.factor(s * 8, i) + row] = src[192 + i];
        for (int j = 0; j < 8; ++j) {  // 32 columns each; low nibbles in ql, upper bit pairs in qh
            const int part = j / 4, in = j % 4;
            const uint8_t *low = src + part * 64 + in % 2 * 32, *top = src + 128 + part * 32;
            uint8_t* codes = t.block(s * 8 + j);
            put_pairs(codes, row, top, in * 2);
            for (int g = 0; g < 8; ++g) {
                const uint32_t nibbles = (word(low + g * 4) >> (in / 2 * 4)) & 0x0f0f0f0fu;
                uint8_t* dst = codes + 128 + g % 4 * 64 + row * 4;
                put(dst, g < 4 ? nibbles : word(dst) | (nibbles << 4));
            }
        }
    }
}

template <typename T>
void pack_plain(const GroupWriter& t, int64_t row, const uint8_t* src) {
    for (int64_t c = 0; c < t.w.cols; ++c)
        memcpy(t.codes + (c * kGroup + row) * sizeof(T), src + c * sizeof(T), sizeof(T));
}

void pack_bf16(const GroupWriter& t, int64_t row, const uint8_t* src) {
    for (int64_t c = 0; c < t.w.cols; ++c) memcpy(t.codes + (c / 2 * kGroup + row) * 4 + c % 2 * 2, src + c * 2, 2);
}

constexpr FileType kFileTypes[] = {
    {"Q4_0", 32, 18, Kind::Q4_0, pack_simple},      {"Q4_1", 32, 20, Kind::Q4_1, pack_simple},
    {"Q5_0", 32, 22, Kind::Q5_0, pack_simple},      {"Q5_1", 32, 24, Kind::Q5_1, pack_simple},
    {"Q8_0", 32, 34, Kind::Q8_0, pack_q8_0},        {"Q2_K", 256, 84, Kind::Q2_K, pack_q2_k},
    {"Q3_K", 256, 110, Kind::Q3_K, pack_q3_k},      {"Q4_K", 256, 144, Kind::Q4_K, pack_q45_k},
    {"Q5_K", 256, 176, Kind::Q5_K, pack_q45_k},     {"Q6_K", 256, 210, Kind::Q6_K, pack_q6_k},
    {"BF16", 1, 2, Kind::BF16, pack_bf16},          {"F16", 1, 2, Kind::F16, pack_plain<uint16_t>},
    {"F32", 1, 4, Kind::F32, pack_plain<uint32_t>},
};

}  // namespace

const FileType* find_file_type(const std::string& name) {
    for (const FileType& s : kFileTypes)
        if (name == s.name) return &s;
    return find_table_type(name);
}

const char* name_of(Kind kind) { return kNames[int(kind)]; }

PackedMatrix outline(Kind kind, int64_t rows, int64_t cols) {
    PackedMatrix w;
    w.kind = kind;
    w.rows = rows, w.cols = cols;
    w.groups = ceil_div(rows, kGroup);
    w.blocks = ceil_div(cols, kBlock);
    const ScaleLayout layout = scale_layout(kind);
    w.scale_bytes = up(ceil_div(w.blocks, layout.blocks) * layout.record_bytes(), 64);
    w.group_bytes = w.scale_bytes + w.blocks * code_bytes(kind);
    return w;
}

PackedMatrix allocate(Kind kind, int64_t rows, int64_t cols) {
    PackedMatrix w = outline(kind, rows, cols);
    w.data = pages(w.nbytes());
    return w;
}

PackedMatrix allocate(const FileType& file_type, int64_t rows, int64_t cols) {
    PackedMatrix w = allocate(file_type.kind, rows, cols);
    if (file_type.numbers)
        for (int i = 0; i < 16; ++i) w.table[i] = uint8_t(file_type.numbers[i] + 128);
    return w;
}

void pack(const FileType& file_type, const int8_t* grid, const uint8_t* rows, const PackedMatrix& out, int64_t begin,
          int64_t end) {
    const int64_t row_bytes = out.cols / file_type.columns * file_type.bytes;
    for (int64_t group = begin; group < end; ++group) {
        const GroupWriter t(out, group, grid);
        for (int64_t row = 0; row < kGroup && group * kGroup + row < out.rows; ++row)
            file_type.pack_row(t, row, rows + ((group - begin) * kGroup + row) * row_bytes);
    }
}

}  // namespace kvarn
