// The work items of one step's attention.
#include <algorithm>

#include "base.hpp"
#include "program.hpp"

namespace kvarn {

void AttentionWork::make(const TableView& table, const SpecView& spec, const StoreView& store, int threads) {
    rows.clear(), decode.clear(), prefill.clear(), merges.clear();
    const int64_t group = spec.n_heads / store.n_heads, stride = 2 + store.width();
    const int64_t step = kQueryRows / group;
    partial_floats = 0;
    // Heads of one decode item: many, so that memory is read in order; one if there are fewer
    // chunks than threads.
    int64_t chunks = 0;
    for (int64_t s = 0; s < table.n_seqs; ++s)
        if (table.q_start[s + 1] - table.q_start[s] == 1) chunks += ceil_div(table.kv_len[s], kChunk);
    const int64_t heads = chunks < threads ? 1 : std::min(kHeadRows / group, store.n_heads);
    for (int64_t s = 0; s < table.n_seqs; ++s) {
        const int64_t fresh = table.q_start[s + 1] - table.q_start[s], length = table.kv_len[s];
        if (fresh == 0) continue;
        if (fresh > 1) {
            for (int64_t t = table.q_start[s]; t < table.q_start[s + 1]; ++t) rows.push_back(t);
            for (int64_t h = 0; h < store.n_heads; ++h)
                for (int64_t p = length - fresh; p < length; p += step)
                    prefill.push_back({int32_t(s), int32_t(h), 1, p, std::min(p + step, length), 0, false});
            continue;
        }
        const Seen seen = spec.seen(length - 1, length - 1);
        for (int64_t h = 0; h < store.n_heads; h += heads) {
            const auto first = int64_t(decode.size());
            const int64_t n = std::min(heads, store.n_heads - h);
            for (int64_t c = 0; c < length; c += kChunk) {
                if (!seen.any(c, c + kChunk)) continue;
                decode.push_back(
                    {int32_t(s), int32_t(h), int32_t(n), c, std::min(c + kChunk, length), partial_floats, false});
                partial_floats += n * group * stride;
            }
            const bool whole = int64_t(decode.size()) - first == 1;
            if (whole) decode.back().whole = true;
            for (int64_t i = 0; i < n && !whole; ++i)
                merges.push_back({first, int64_t(decode.size()) - first, int32_t(s), int32_t(h + i)});
        }
    }
}

}  // namespace kvarn
