// Cells of integers as words of four signed bytes, whatever their codec and layout: what integers.hpp
// multiplies. In the instruction set's namespace.
//
//   KeyColumns   words [word][32 slots]: the form of the layout `columns`
//   ValueRows    words [slot][word], in two halves of 16 slots
//
// A tile that has another form is copied into it first. Readers then give signed bytes: those of keys
// by slots, four dims a word; those of values by dims, four slots a word.
//
//   int8         the bytes themselves
//   int4         2u - 15; byte i of a block has u of dim i in its low half, of dim 16 + i in the other
//   int6         2u - 63; the same for bits 0 to 3. Then 8 bytes: byte i has bits 4 and 5 of dims i, 8 + i,
//                16 + i, 24 + i, from bit 0 on
#pragma once

#include "rotation.hpp"
#include "stage.hpp"

namespace kvarn::KVARN_ISA {
namespace {

struct KeyColumns {
    const uint8_t* at;
    int64_t stride;  // bytes from one word to the next
};

struct ValueRows {
    const uint8_t* half[2];
    int64_t stride;  // bytes from one slot to the next

    const uint8_t* row(int64_t slot) const { return half[slot / 16] + slot % 16 * stride; }
};

// Words [rows][cols] to [cols][rows].
inline void transpose_words(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride, int64_t rows,
                            int64_t cols) {
    if (rows % 8 == 0 && cols % 8 == 0) return transpose(src, src_stride, dst, dst_stride, int(rows), int(cols));
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) dst[c * dst_stride + r] = src[r * src_stride + c];
}

// The tile in this form; in `room` if it has another one, or half of it is missing.
inline KeyColumns key_columns(const TileCells& t, int64_t words, uint8_t* room) {
    const Strides& st = t.view->strides;
    if (st.slot == 1 && t.half[0] && t.half[1] == t.half[0] + 64) return {t.half[0], st.dim * 4};
    for (int h = 0; h < 2; ++h) {
        auto* to = reinterpret_cast<uint32_t*>(room) + 16 * h;
        const auto* from = reinterpret_cast<const uint32_t*>(t.half[h]);
        if (from && st.slot != 1) {
            transpose_words(from, st.slot, to, kSlots, 16, words);
            continue;
        }
        for (int64_t w = 0; w < words; ++w, to += kSlots) {
            if (from)
                memcpy(to, from + w * st.dim, 64);
            else
                memset(to, 0, 64);
        }
    }
    return {room, 4 * kSlots};
}

inline ValueRows value_rows_of(const TileCells& t, int64_t words, uint8_t* room) {
    const Strides& st = t.view->strides;
    if (st.dim == 1 && t.half[0] && t.half[1]) return {{t.half[0], t.half[1]}, st.slot * 4};
    for (int h = 0; h < 2; ++h) {
        auto* to = reinterpret_cast<uint32_t*>(room) + 16 * h * words;
        const auto* from = reinterpret_cast<const uint32_t*>(t.half[h]);
        if (!from)
            memset(to, 0, size_t(16 * words) * 4);
        else if (st.dim != 1)
            transpose_words(from, st.dim, to, words, words, 16);
        else
            for (int64_t s = 0; s < 16; ++s) memcpy(to + s * words, from + s * st.slot, size_t(words) * 4);
    }
    return {{room, room + 16 * words * 4}, words * 4};
}

// -- readers of keys: two words of block g, of 16 slots, for W from 0 to 3: at dims first * W and
// first * W + second. In the order of memory, or the processor does not see what comes next. Bytes are
// signed and have kKeyBias added. With an offset they are u, where the signed byte is 2u - offset.

struct KeyBytes {
    static constexpr int offset = 0, first = 8, second = 4;
    KeyColumns k;

    template <int W>
    void read(int64_t g, int half, I& low, I& high) const {
        const uint8_t* at = k.at + (g * 8 + 2 * W) * k.stride + 64 * half;
        low = add_bytes(load_words(at), kKeyBias);
        high = add_bytes(load_words(at + k.stride), kKeyBias);
    }
};

constexpr uint32_t kNibble = 0x0f0f0f0fu, kTop = 0x30303030u;  // bits 0 to 3 and 4 to 5

struct KeyNibbles {
    static constexpr int offset = 15, most = 15, first = 4, second = 16;
    KeyColumns k;

    template <int W>
    void read(int64_t g, int half, I& low, I& high) const {
        const I x = load_words(k.at + (g * 4 + W) * k.stride + 64 * half);
        low = and_words(x, kNibble), high = and_words(words_right<4>(x), kNibble);
    }
};

struct KeySixes {
    static constexpr int offset = 63, most = 63, first = 4, second = 16;
    KeyColumns k;

    template <int W>
    void read(int64_t g, int half, I& low, I& high) const {
        const uint8_t* at = k.at + g * 6 * k.stride + 64 * half;
        const I x = load_words(at + W * k.stride), top = load_words(at + (4 + W % 2) * k.stride);
        I first, second;
        if constexpr (W / 2 == 0)
            first = words_left<4>(top), second = top;
        else
            first = words_left<2>(top), second = words_right<2>(top);
        low = or_words(and_words(x, kNibble), and_words(first, kTop));
        high = or_words(and_words(words_right<4>(x), kNibble), and_words(second, kTop));
    }
};

// -- readers of values: N registers of 16 dims from dim d on, a word of the four slots from 4 * quad on.
// With an offset they are u, where the value is 2u - offset; `eightfold` ones are the values times 8.

struct ValueBytes {  // in the order of wide_quads
    static constexpr int N = kWide, offset = 0;
    static constexpr bool eightfold = false;
    ValueRows v;

    void read(int64_t d, int64_t quad, I (&x)[N]) const { wide_quads(v.row(4 * quad) + d, v.stride, x); }
};

struct PlainBytes {  // in the order of dims
    static constexpr int N = 2, offset = 0;
    static constexpr bool eightfold = false;
    ValueRows v;

    void read(int64_t d, int64_t quad, I (&x)[N]) const {
        const uint8_t* at = v.row(4 * quad) + d;
        x[0] = quads16(at, v.stride), x[1] = quads16(at + 16, v.stride);
    }
};

struct ValueNibbles {
    static constexpr int N = 2, offset = 15, most = 15;
    static constexpr bool eightfold = false;
    ValueRows v;

    void read(int64_t d, int64_t quad, I (&x)[N]) const {
        const I both = quads16(v.row(4 * quad) + d / 2, v.stride);
        x[0] = and_words(both, kNibble), x[1] = and_words(words_right<4>(both), kNibble);
    }
};

#if defined(__AVX512F__)
// int4, two blocks at a time. Bytes are 8 * (2u - 15), which needs fewer instructions: u in the upper half of
// the byte and 8 in the lower one is 16u + 8, and 128 less with the highest bit flipped.
struct TwoNibbles {
    static constexpr int N = 4, offset = 0;
    static constexpr bool eightfold = true;
    ValueRows v;

    void read(int64_t d, int64_t quad, I (&x)[N]) const {
        constexpr uint32_t kUpper = 0xf0f0f0f0u, kFlipped = 0x88888888u;
        I both[2];
        quads32(v.row(4 * quad) + d / 2, v.stride, both[0], both[1]);
        for (int i = 0; i < 2; ++i) {
            x[2 * i] = and_xor_words(words_left<4>(both[i]), kUpper, kFlipped);
            x[2 * i + 1] = and_xor_words(both[i], kUpper, kFlipped);
        }
    }
};
#elif defined(__AVX2__)
struct TwoNibbles {  // two blocks at a time, by a loop of its own (integer_outputs.hpp)
    ValueRows v;
};
#endif

struct ValueSixes {
    static constexpr int N = 2, offset = 63, most = 63;
    static constexpr bool eightfold = false;
    ValueRows v;

    void read(int64_t d, int64_t quad, I (&x)[N]) const {
        const uint8_t* at = v.row(4 * quad) + d / 32 * 24;
        const I both = quads16(at, v.stride), top = quads8(at + 16, v.stride);
        x[0] = or_words(and_words(both, kNibble), and_words(rotate_halves<4, 2>(top), kTop));
        x[1] = or_words(and_words(words_right<4>(both), kNibble), and_words(rotate_halves<0, 30>(top), kTop));
    }
};

template <int kRegisters>
struct StagedQuads {  // of a staged tile: what another reader gave
    static constexpr int N = kRegisters, offset = 0;
    static constexpr bool eightfold = false;
    const uint8_t* tile;
    int64_t depth;

    void read(int64_t d, int64_t quad, I (&x)[N]) const {
        const uint8_t* at = tile + (quad * depth + d) * 4;
        for (int i = 0; i < N; ++i) x[i] = load_words(at + 64 * i);
    }
};

// Calls fn with a reader of the tile's keys, or of its values by blocks of 32 dims. `blocks`: the codec may be int4 or
// int6. `wide`: fn takes readers of two blocks at a time, too.
template <bool blocks, typename Fn>
inline void with_keys(const TileCells& t, int64_t dim, uint8_t* room, Fn&& fn) {
    const KeyColumns k = key_columns(t, cells_of(t.view->codec, dim), room);
    if constexpr (blocks) {
        if (t.view->codec == Codec::Int4) return fn(KeyNibbles{k});
        if (t.view->codec == Codec::Int6) return fn(KeySixes{k});
    }
    fn(KeyBytes{k});
}

template <bool wide, typename Fn>
inline void with_values(const TileCells& t, int64_t dim, uint8_t* room, Fn&& fn) {
    const ValueRows v = value_rows_of(t, cells_of(t.view->codec, dim), room);
#if defined(__AVX2__)
    if constexpr (wide)
        if (t.view->codec == Codec::Int4 && up(dim, kRotated) % 64 == 0) return fn(TwoNibbles{v});
#endif
    if (t.view->codec == Codec::Int4) return fn(ValueNibbles{v});
    if (t.view->codec == Codec::Int6) return fn(ValueSixes{v});
    fn(PlainBytes{v});
}

// -- factors

inline F seen_only(uint32_t seen, int half, F x) {
    return seen == ~0u ? x : keep(seen >> (16 * half) & 0xffffu, x, zero());
}

inline void stage_scales(const TileCells& t, uint32_t seen, float* out) {
    const int64_t stride = t.view->scale_strides.slot;
    for (int h = 0; h < 2; ++h) {
        const auto* from = reinterpret_cast<const float*>(t.scale[h]);
        if (!from) {
            store(out + 16 * h, zero());
        } else if (stride == 1) {
            store(out + 16 * h, seen_only(seen, h, load(from)));
        } else {
            for (int s = 0; s < 16; ++s) out[16 * h + s] = (seen >> (16 * h + s)) & 1u ? from[s * stride] : 0.0f;
        }
    }
}

// The factors of 16 slots from their scale codes, which are [slot][kBlocks].
template <int kBlocks>
inline void stage_slots(const TileCells& t, int half, uint32_t seen, int64_t stride, float* out) {
    I codes = load_codes<kBlocks>(t.scale[half]);
    for (int g = 0; g < kBlocks; ++g, codes = words_right<8>(codes))
        store(out + g * stride, seen_only(seen, half, code_factors(and_words(codes, 255))));
}

inline void stage_half(const TileCells& t, int half, uint32_t seen, int64_t spans, int64_t stride, float* out) {
    const Strides& st = t.view->scale_strides;
    const uint8_t* scales = t.scale[half];
    if (scales && st.dim == 1 && st.slot == 2 && spans == 2) return stage_slots<2>(t, half, seen, stride, out);
    if (scales && st.dim == 1 && st.slot == 4 && spans == 4) return stage_slots<4>(t, half, seen, stride, out);
    for (int64_t g = 0; g < spans; ++g, out += stride) {
        uint8_t codes[16] = {};
        if (scales && st.slot == 1)
            memcpy(codes, scales + g * st.dim, 16);
        else if (scales)
            for (int64_t s = 0; s < 16; ++s) codes[s] = scales[s * st.slot + g * st.dim];
        store(out, seen_only(seen, half, code_factors(load_codes<1>(codes))));
    }
}

// The factors of a tile, 0 where a slot is not seen: one per slot and span, spans `stride` apart.
inline void stage_factors(const TileCells& t, uint32_t seen, int64_t spans, int64_t stride, float* out) {
    if (t.view->codec == Codec::Int8) {
        stage_scales(t, seen, out);
        for (int64_t g = 1; g < spans; ++g) memcpy(out + g * stride, out, kSlots * sizeof(float));
        return;
    }
    for (int h = 0; h < 2; ++h) stage_half(t, h, seen, spans, stride, out + 16 * h);
}

}  // namespace
}  // namespace kvarn::KVARN_ISA
