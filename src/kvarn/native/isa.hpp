// Instruction sets: which ones run here, which one is in use, and the kernels of each.
// Contract: kernels of different instruction sets give the same bits for the same order of sums.
// Non-goals: threads, Python types.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvarn {

// Products of bf16 (bf16 cells, bf16 weights) are summed in one of two orders. Every
// instruction set implements both with the same bits; which one is fast depends on the machine.
//   Pairs   the order of VDPBF16PS: one chain over ascending pairs of terms, the odd term first
//   Tiles   the order of AMX: per 32 terms one chain of even terms and one of odd terms, both from
//           zero, then sum += even + odd
enum class SumOrder { Pairs, Tiles };

struct Linear;
struct Rows;
struct Attention;
struct Dots;

// Encoders of cells. Arrays are contiguous; `out` never overlaps `x`.
struct CellEncoders {
    const char* name;
    void (*bf16)(const float* x, uint16_t* out, int64_t n);
    void (*f16)(const float* x, uint16_t* out, int64_t n);
    void (*int8)(const float* x, int8_t* out, float* scale, int64_t rows, int64_t dim);
    // From rows of int8, codes and scales; depth is a multiple of 32.
    void (*int4)(const int8_t* x, const float* x_scale, uint8_t* out, uint8_t* scale, int64_t rows, int64_t depth);
    void (*int6)(const int8_t* x, const float* x_scale, uint8_t* out, uint8_t* scale, int64_t rows, int64_t depth);
};

struct Kernels {  // all kernels of one instruction set and one order of sums
    const CellEncoders* encoders;
    const Linear* linear;
    const Rows* rows;
    const Attention* attention;
    const Dots* dots;
};

std::vector<std::string> cpu_features();   // that the processor and the operating system support
std::vector<std::string> isas();           // that run here, best first
const Kernels& kernels();                  // in use: the best, unless another was selected
bool select_isa(const std::string& name);  // false if `name` does not run here; then nothing changes
SumOrder sum_order();                      // in use: Tiles with AMX, else Pairs, unless one was selected
void select_sum_order(SumOrder order);

}  // namespace kvarn
