// The work items of one step's attention.
#include "work.hpp"

#include <algorithm>

#include "base.hpp"

namespace kvarn {

void AttentionWork::make(const TableView& table, const SpecView& spec, const StoreView& store, int threads) {
    rows.clear(), tiles.clear(), first.clear(), decode.clear(), prefill.clear(), merges.clear();
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
            for (int64_t i = 0; i < fresh; ++i) rows.push_back({table.q_start[s] + i, s, length - fresh + i});
            for (int64_t h = 0; h < store.n_heads; ++h)
                for (int64_t p = length - fresh, end; p < length; p = end) {
                    end = std::min(p + step, length);
                    if (store.has_tail()) end = std::min(end, up(p + 1, kSlots));  // an item has one own tile
                    prefill.push_back({int32_t(s), int32_t(h), 1, p, end, 0, false});
                }
            continue;
        }
        const Seen seen = spec.seen(length - 1, length - 1);
        for (int64_t h = 0; h < store.n_heads; h += heads) {
            const auto begin = int64_t(decode.size());
            const int64_t n = std::min(heads, store.n_heads - h);
            for (int64_t c = 0; c < length; c += kChunk) {
                if (!seen.any(c, c + kChunk)) continue;
                decode.push_back(
                    {int32_t(s), int32_t(h), int32_t(n), c, std::min(c + kChunk, length), partial_floats, false});
                partial_floats += n * group * stride;
            }
            const bool whole = int64_t(decode.size()) - begin == 1;
            if (whole) decode.back().whole = true;
            for (int64_t i = 0; i < n && !whole; ++i)
                merges.push_back({begin, int64_t(decode.size()) - begin, int32_t(s), int32_t(h + i)});
        }
    }
    if (store.has_tail()) make_tiles(table);
}

void AttentionWork::make_tiles(const TableView& table) {
    for (int64_t s = 0; s < table.n_seqs; ++s) {
        first.push_back(int64_t(tiles.size()));
        const int64_t fresh = table.q_start[s + 1] - table.q_start[s], end = table.kv_len[s], begin = end - fresh;
        if (fresh < 2 || end == 0) continue;  // 0: padding
        for (int64_t pos = begin / kSlots * kSlots; pos < end; pos += kSlots) {
            const int64_t from = std::max(pos, begin);
            tiles.push_back({s, pos, from, std::min(pos + kSlots, end), table.q_start[s] + from - begin,
                             pos / kSlots + 1 >= (end - 1) / kSlots});
        }
    }
}

}  // namespace kvarn
