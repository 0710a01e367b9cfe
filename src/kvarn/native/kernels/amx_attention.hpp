// Scores and outputs of many query rows with AMX. The staged tiles are the same as for VDPBF16PS:
// they already have the form of AMX's right operand. A tile has 16 rows. Rows past the last query
// row may hold any numbers, because a row affects only its own results.
#pragma once

#include "axes.hpp"

#if defined(KVARN_AMX)

#include "amx.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr TileShapes kWhole{64};

// s[row][n * 32]: scores of 16 query rows with n staged tiles.
inline void amx_scores(const uint8_t* q, int64_t depth, const uint8_t* tiles, int64_t n, float* s) {
    const auto with = [&]<int T>(const uint8_t* k, float* out) {  // results go to tiles T and T + 1
        tile_zero<T>();
        tile_zero<T + 1>();
        for (int64_t d = 0; d < depth; d += 32, k += 32 * kSlots * 2) {
            if (depth > 64) tile_load<4>(q + d * 2, depth * 2);
            tile_load<6>(k, 4 * kSlots);
            tile_load<7>(k + 64, 4 * kSlots);
            if (depth > 64 || d == 0) {
                tile_dot_bf16<T, 4, 6>();
                tile_dot_bf16<T + 1, 4, 7>();
            } else {
                tile_dot_bf16<T, 5, 6>();
                tile_dot_bf16<T + 1, 5, 7>();
            }
        }
        tile_store<T>(out, kChunk * 4);
        tile_store<T + 1>(out + 16, kChunk * 4);
    };
    if (depth <= 64) {  // tiles 4 and 5 hold all queries
        tile_load<4>(q, depth * 2);
        if (depth > 32) tile_load<5>(q + 64, depth * 2);
    }
    for (int64_t i = 0; i < n; ++i) {
        const uint8_t* k = tiles + i * kSlots * depth * 2;
        if (i % 2)
            with.template operator()<2>(k, s + i * kSlots);
        else
            with.template operator()<0>(k, s + i * kSlots);
    }
}

template <int T, int kTiles, typename Fn>
inline void each_tile(Fn&& fn) {
    if constexpr (T < kTiles) {
        fn.template operator()<T>();
        each_tile<T + 1, kTiles>(fn);
    }
}

// out[row][kTiles * 16]: outputs of 16 rows of p with n staged tiles.
template <int kTiles>
inline void tile_outputs(const uint8_t* p, const uint8_t* v, int64_t width, int64_t n, float* out) {
    each_tile<0, kTiles>([]<int T>() { tile_zero<T>(); });
    for (int64_t i = 0; i < n; ++i) {
        tile_load<4>(p + i * kSlots * 2, kChunk * 2);
        each_tile<0, kTiles>([&]<int T>() {
            tile_load<6 + T % 2>(v + i * kSlots * width * 2 + T * 64, width * 4);
            tile_dot_bf16<T, 4, 6 + T % 2>();
        });
    }
    each_tile<0, kTiles>([&]<int T>() { tile_store<T>(out + T * 16, width * 4); });
}

// out[row][width]: outputs of 16 rows of p with n staged tiles.
inline void amx_values(const uint8_t* p, const uint8_t* tiles, int64_t width, int64_t n, float* out) {
    int64_t d = 0;
    for (; d + 64 <= width; d += 64) tile_outputs<4>(p, tiles + d * 4, width, n, out + d);
    for (; d < width; d += 16) tile_outputs<1>(p, tiles + d * 4, width, n, out + d);
}

}  // namespace
}  // namespace kvarn::KVARN_ISA

#endif
