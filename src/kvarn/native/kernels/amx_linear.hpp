// Products of many activation rows with AMX: it computes the integer sums of a block, or complete
// sums of bf16 products.
// Scales are applied as in the other paths, so the bits are the same. Included by linear.cpp.
#pragma once

#include "blocks.hpp"

#if defined(KVARN_AMX)

#include <cstdlib>
#include <new>

#include "amx.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr int64_t kFewRows = 8;  // up to this many rows, vector instructions are as fast
constexpr TileShapes kBlocks{32}, kHalfBlocks{16}, kPairs{64};

// Unpacks one group's codes to signed bytes, [block][8 quads of columns][16 rows][4].
template <Kind K>
void widen_group(const PackedMatrix& w, int64_t group, int8_t* out) {
    const Bytes offset = _mm512_set1_epi8(int8_t(offset_of(K))), table = broadcast_16(w.table);
    const uint8_t* codes = w.codes(group);
    const int64_t share = w.group_bytes / w.blocks;
    for (int64_t b = 0; b < w.blocks; ++b, out += 512) {
        for (int64_t line = 0; line < share; line += 64)
            prefetch_l2(w.scales(group) + b * share + kPrefetchDistance + line);
        Bytes v[8];
        unpack<K>(codes + b * code_bytes(K), table, v);
        for (int g = 0; g < 8; ++g) _mm512_storeu_si512(out + g * 64, _mm512_sub_epi8(v[g], offset));
    }
}

// Sums of one block: 16 activation rows with one group, as one or two 16 x 16 matrices.
template <Kind K, int T>
inline void block_sums(const int8_t* x, const int8_t* w, int32_t* sums) {
    tile_zero<T>();
    tile_load<4 + T % 2>(x, kBlock);
    tile_load<6 + T % 2>(w, 64);
    tile_dot_int8<T, 4 + T % 2, 6 + T % 2>();
    tile_store<T>(sums, 64);
    if constexpr (two_sums(K)) {
        constexpr int S = T + 2;
        tile_zero<S>();
        tile_load<4 + T % 2>(x + 16, kBlock);
        tile_load<6 + T % 2>(w + 256, 64);
        tile_dot_int8<S, 4 + T % 2, 6 + T % 2>();
        tile_store<S>(sums + 256, 64);
    }
}

template <Kind K>
void tile_of_sixteen(const PackedMatrix& w, const Activations& x, const Output& y, int64_t group, int64_t t,
                     const int8_t* codes, PrefetchQueue& queue) {
    // Of this block and the next: AMX computes one while scales are applied to the other.
    alignas(64) int32_t sums[2][512];
    const uint8_t* scales = w.scales(group);
    const int8_t* xs = x.codes + t * x.blocks * kTile * kBlock;
    const BlockMeta* meta = x.meta + t * x.blocks * kTile;
    Floats acc[kTile];
    KVARN_UNROLL(16)
    for (int r = 0; r < int(kTile); ++r) acc[r] = set1_float(0.0f);
    const auto ask = [&]<int T>(int64_t b) {
        prefetch_next(queue);
        if (b < w.blocks) block_sums<K, T>(xs + b * kTile * kBlock, codes + b * 512, sums[T]);
    };
    const auto apply = [&]<int T>(int64_t b) __attribute__((always_inline)) {
        const Scales<K> s(scales, b, 0);
        KVARN_UNROLL(16)
        for (int r = 0; r < int(kTile); ++r) {
            const Ints first = _mm512_load_si512(sums[T] + r * 16);
            const Ints second = two_sums(K) ? _mm512_load_si512(sums[T] + 256 + r * 16) : first;
            acc[r] = scaled<K>(acc[r], s, meta[b * kTile + r], first, second);
        }
    };
    ask.template operator()<0>(0);
    int64_t b = 0;
    for (; b + 1 < w.blocks; b += 2) {
        ask.template operator()<1>(b + 1);
        apply.template operator()<0>(b);
        ask.template operator()<0>(b + 2);
        apply.template operator()<1>(b + 1);
    }
    if (b < w.blocks) apply.template operator()<0>(b);
    const int64_t left = x.rows - t * kTile;
    KVARN_UNROLL(16)
    for (int r = 0; r < int(kTile); ++r)  // unrolled, so that the sums stay in registers
        if (r < left) write_lanes(y, t * kTile + r, group * kGroup, F{acc[r]});
}

// A thread's memory for one unpacked group. It grows to the longest row of a model and is kept. It
// is not a std::vector: the linker could share code of std::vector, compiled here for AMX machines,
// with objects that run on other machines.
struct GroupMemory {
    int8_t* data = nullptr;
    int64_t bytes = 0;

    ~GroupMemory() { free(data); }
    int8_t* of(int64_t wanted) {  // a multiple of 64
        if (wanted > bytes) {
            free(data);
            data = static_cast<int8_t*>(aligned_alloc(64, size_t(wanted)));
            bytes = data ? wanted : 0;
            if (!data) throw std::bad_alloc();
        }
        return data;
    }
};

template <Kind K>
void tile_integers(const PackedMatrix& w, const Activations& x, const Output& y, const Range& r, PrefetchQueue& queue) {
    thread_local GroupMemory memory;
    int8_t* codes = memory.of(w.blocks * 512);
    const UseTiles tiles(two_sums(K) ? kHalfBlocks : kBlocks);
    for (int64_t group = r.group_begin; group < r.group_end; ++group) {
        widen_group<K>(w, group, codes);
        for (int64_t t = r.tile_begin; t < r.tile_end; ++t) tile_of_sixteen<K>(w, x, y, group, t, codes, queue);
    }
}

// Multiplies whole tiles of rows with bf16 weights, in the order SumOrder::Tiles. Returns the first
// row that is left over.
inline int64_t tile_bf16(const PackedMatrix& w, const Activations& x, const Output& y, const Range& r) {
    const int64_t whole = smaller(r.tile_end, x.rows / kTile), width = x.blocks * kBlock;
    if (r.tile_begin >= whole) return r.tile_begin * kTile;
    const UseTiles tiles(kPairs);
    alignas(64) float sums[2][kTile * kGroup];
    for (int64_t group = r.group_begin; group < r.group_end; ++group) {
        const uint8_t* codes = w.codes(group);
        for (int64_t t = r.tile_begin; t < whole; t += 2) {
            const bool two = t + 1 < whole;
            const uint16_t *a = x.bf16 + t * kTile * width, *b = a + (two ? kTile * width : 0);
            tile_zero<0>();
            tile_zero<1>();
            for (int64_t c = 0; c < width; c += 32) {
                tile_load<6>(codes + c * 32, 64);
                tile_load<4>(a + c, width * 2);
                tile_dot_bf16<0, 4, 6>();
                tile_load<5>(b + c, width * 2);
                tile_dot_bf16<1, 5, 6>();
            }
            tile_store<0>(sums[0], 64);
            tile_store<1>(sums[1], 64);
            for (int64_t i = 0; i <= int64_t(two); ++i)
                for (int64_t row = 0; row < kTile; ++row)
                    write_lanes(y, (t + i) * kTile + row, group * kGroup, load(sums[i] + row * kGroup));
        }
    }
    return whole * kTile;
}

}  // namespace
}  // namespace kvarn::KVARN_ISA

#endif
