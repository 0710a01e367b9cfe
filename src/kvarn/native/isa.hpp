// Instruction sets: what this machine has, which one is in use, and the kernels each one brings.
// Contract: kernels of different instruction sets give the same bits, in the same order of sums. Non-goals: threads,
// Python types.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvarn {

// Sums of products of bf16 (bf16 and int8 cells, bf16 weights) have one of two orders. Every instruction set can do
// both, and gives the same bits in the same order; which is quick depends on the machine.
//   Pairs: what VDPBF16PS does: one chain, pairs of terms ascending, the odd one first.
//   Tiles: what AMX does: per 32 terms one chain of the even terms and one of the odd terms, both from zero, then
//          sum += even + odd.
enum class SumOrder { Pairs, Tiles };

struct Linear;
struct Rows;
struct Attention;
struct Dots;

// The cell encoders of one instruction set. Arrays are contiguous; `out` never overlaps `x`.
struct CellEncoders {
    const char* name;
    void (*bf16)(const float* x, uint16_t* out, int64_t n);
    void (*f16)(const float* x, uint16_t* out, int64_t n);
    void (*int8)(const float* x, int8_t* out, float* scale, int64_t rows, int64_t dim);
};

struct Kernels {  // everything one instruction set brings
    const CellEncoders* encoders;
    const Linear* linear;
    const Rows* rows;
    const Attention* attention;
    const Dots* dots;
};

std::vector<std::string> cpu_features();   // what the processor and the operating system offer, by name
std::vector<std::string> isas();           // the instruction sets that run here, best first
const Kernels& kernels();                  // those in use: the best, unless another was selected
bool select_isa(const std::string& name);  // false, and nothing changed, when `name` does not run here
SumOrder sum_order();                      // in use: Tiles where a matrix unit runs, unless another was selected
void select_sum_order(SumOrder order);

}  // namespace kvarn
