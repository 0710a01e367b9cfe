// AMX: eight tiles of 16 rows of 64 bytes, and products of them. This is assembly that declares the
// memory that each instruction accesses. The compilers' intrinsics do not declare it, so the
// compiler may move stores past them. Tile shapes are constants and do not come from CPUID, because
// hypervisors hide that leaf.
#pragma once

#include <cstdint>

namespace kvarn {
namespace {

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Tiles 0-3 hold results, 4 and 5 the left operand with `depth` bytes a row, 6 and 7 the right
    // operand with depth / 4 rows.
    constexpr explicit TileShapes(int depth) {
        for (int t = 0; t < 8; ++t) {
            row_bytes[t] = uint16_t(t == 4 || t == 5 ? depth : 64);
            rows[t] = uint8_t(t < 6 ? 16 : depth / 4);
        }
    }
};

class UseTiles {  // configures the tiles of this thread while it exists
  public:
    explicit UseTiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
    ~UseTiles() { __asm__ volatile("tilerelease" ::: "memory"); }
    UseTiles(const UseTiles&) = delete;
    UseTiles& operator=(const UseTiles&) = delete;
};

template <int T>
inline void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void tile_store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int Sum, int A, int B>
inline void tile_dot_int8() {  // both operands are signed
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
inline void tile_dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

}  // namespace
}  // namespace kvarn
