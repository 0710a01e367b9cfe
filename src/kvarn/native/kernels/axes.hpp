// The axes of attention's arithmetic: how the cells of one codec are multiplied. K and V are chosen
// apart, so a kernel is a template over the arithmetic of K, or over that of V.
//
//   codec    f32 and f16 cells: everything is f32. bf16 cells: q and p are rounded to bf16
//   order    how products of bf16 are summed (../isa.hpp)
//   engine   what multiplies many query rows with staged tiles: vector instructions or AMX
//
// Cells of integers are multiplied as such, where the other two axes do not matter: integers.hpp.
#pragma once

#include "../base.hpp"
#include "../view.hpp"
#include "sum_order.hpp"

namespace kvarn::KVARN_ISA {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMinusInfinity = -__builtin_inff();

#if defined(__AVX512F__)
constexpr int kScoreRows = 10, kDecodeRows = 4, kInPlaceRows = 4, kValueRows = 6, kValueLanes = 4;
#elif defined(__AVX2__)
constexpr int kScoreRows = 2, kDecodeRows = 3, kInPlaceRows = 2, kValueRows = 2, kValueLanes = 2;
#else
constexpr int kScoreRows = 1, kDecodeRows = 1, kInPlaceRows = 1, kValueRows = 1, kValueLanes = 1;
#endif

enum class Engine { Vector, Amx };

template <Codec kCodec, SumOrder kOrder, Engine kEngine>
struct Arithmetic {
    static constexpr Codec codec = kCodec;
    static constexpr int64_t bytes = cell_bytes(kCodec);   // of one cell
    static constexpr bool rounds = kCodec == Codec::BF16;  // q and p are rounded to bf16
    static constexpr bool tiled = rounds && kOrder == SumOrder::Tiles;
    static constexpr bool amx = tiled && kEngine == Engine::Amx;
    static constexpr bool pairs = tiled ? amx : kDotUnit && rounds;  // q, p and staged tiles are bf16, not f32
    static constexpr int64_t number_bytes = pairs ? 2 : 4;           // of one number of q or p
    static constexpr int64_t rows_at_once = amx ? 16 : 30;  // query rows of a prefill item that are computed together
    static constexpr int64_t weight_bytes(int64_t) { return kChunk * number_bytes; }  // of a row of p
    static constexpr int64_t query_bytes(int64_t dim) { return depth(dim) * number_bytes; }
    static constexpr int64_t depth(int64_t dim) { return up(dim, amx ? 32 : 16); }  // dims of a staged q, with zeros
};

}  // namespace
}  // namespace kvarn::KVARN_ISA
