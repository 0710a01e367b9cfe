// The table of attention's kernels, compiled once per instruction set (KVARN_ISA names it).
#include "attention.hpp"

namespace kvarn::KVARN_ISA {

extern const Attention attention[2];
const Attention attention[2] = {{decode<SumOrder::Pairs>, merge, prefill<SumOrder::Pairs>},
                                {decode<SumOrder::Tiles>, merge, prefill<SumOrder::Tiles>}};

}  // namespace kvarn::KVARN_ISA
