// The kernels of attention in one instruction set: decode.cpp and prefill.cpp define them,
// attention.cpp lists them. Both give a row the same bits:
//
//   tiles       Keys are in tiles of 32 slots at absolute positions, tiles in chunks of 256. A
//               chunk gives (m, l, O), and chunks are merged in ascending order by one formula.
//               A tile that no query sees is skipped: it would add exact zeros.
//   sums        Scores: lanes are slots, summed over dims. l: lanes are slots mod 16. O: lanes are
//               dims, summed over slots. Scores and O use one of the two orders of ../isa.hpp.
//   types       axes.hpp has the arithmetic of each codec. The codec of K decides the type of q,
//               the codec of V the type of p. Scales of K multiply scores, scales of V multiply p.
//   visibility  The cell of a slot that a query does not see may hold anything: its score becomes
//               -inf, its p 0, and its V is staged as 0.
#pragma once

#include "../isa.hpp"
#include "../view.hpp"

namespace kvarn::KVARN_ISA {

template <SumOrder O>
int64_t decode(const AttentionArgs& a, const WorkItem& item, float* partials, uint8_t* scratch);

void merge(const AttentionArgs& a, const WorkItem* items, const Merge& m, const float* partials);

template <SumOrder O>
int64_t prefill(const AttentionArgs& a, const WorkItem& item, uint8_t* scratch);

}  // namespace kvarn::KVARN_ISA
