#include "checks.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kvarn {

void ensure(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void ensure(bool holds, const char* what, int64_t a, int64_t b) {
    if (holds) return;
    std::string text = what;
    for (const int64_t x : {a, b})
        if (const size_t at = text.find('%'); at != std::string::npos) text.replace(at, 1, std::to_string(x));
    throw std::invalid_argument(text);
}

namespace {

// Every position in [begin, end) lies in a block of sequence s.
void check_resident(const TableView& t, int64_t s, int64_t begin, int64_t end, int64_t block_size) {
    const int32_t* first = t.first + s * t.max_blocks;
    const int64_t n = t.n_blocks[s];
    int64_t i = std::upper_bound(first, first + n, begin) - first - 1;
    for (int64_t pos = begin; pos < end; ++i) {
        ensure(i >= 0 && i < n && first[i] <= pos && pos < first[i] + block_size,
               "table: sequence % sees position %, which no block of it holds", s, pos);
        pos = first[i] + block_size;
    }
}

}  // namespace

void check_rows(const TableView& t, const StoreView& store) {
    ensure(t.q_start[0] == 0, "table: q_start begins with %, not 0", t.q_start[0], 0);
    for (int64_t s = 0; s < t.n_seqs; ++s) {
        const int64_t fresh = int64_t(t.q_start[s + 1]) - t.q_start[s], length = t.kv_len[s];
        ensure(fresh >= 0, "table: q_start falls at sequence % by %", s, -fresh);
        ensure(fresh == 0 || length == 0 || length >= fresh, "table: % tokens are written, % of them new", length,
               fresh);
        for (int64_t i = 0; i < fresh && store.has_tail(); ++i) {  // the cells of a tile are those up to its last
            const int64_t cell = t.cells ? t.cells[t.q_start[s] + i] : -1, pos = length - fresh + i;
            ensure(cell < 0 || (length > 0 && cell % kSlots == pos % kSlots),
                   "table: position % and its cell % have different places in their tiles", pos, cell);
        }
    }
}

void check_table(const TableView& t, const SpecView& spec, const StoreView& store) {
    check_rows(t, store);
    for (int64_t s = 0; s < t.n_seqs; ++s) {
        const int64_t fresh = int64_t(t.q_start[s + 1]) - t.q_start[s], length = t.kv_len[s], n = t.n_blocks[s];
        if (fresh == 0) continue;
        ensure(n >= 0 && n <= t.max_blocks, "table: % blocks in a row of %", n, t.max_blocks);
        const int32_t *blocks = t.blocks + s * t.max_blocks, *first = t.first + s * t.max_blocks;
        for (int64_t i = 0; i < n; ++i) {
            ensure(blocks[i] >= 0 && blocks[i] < store.n_blocks, "table: block % lies outside the store of % blocks",
                   blocks[i], store.n_blocks);
            ensure(first[i] >= 0 && first[i] % store.block_size == 0 && (i == 0 || first[i] > first[i - 1]),
                   "table: positions of blocks ascend in steps of the block size: entry % has %", i, first[i]);
        }
        const Seen seen = spec.seen(length - fresh, length - 1);
        check_resident(t, s, seen.begin, seen.end, store.block_size);
        check_resident(t, s, 0, seen.pinned, store.block_size);
    }
}

void check_step(const Program& program, const CacheView& cache, const int32_t* positions, int64_t n_tokens) {
    const auto layers = int64_t(cache.layers.size());
    for (const Op& any : program.ops()) {
        const auto* op = any.as<AttentionOp>();
        if (!op) continue;
        ensure(op->layer >= 0 && op->layer < layers, "run: layer % is not in a cache of % layers", op->layer, layers);
        const LayerView& layer = cache.layers[size_t(op->layer)];
        const SpecView& spec = cache.groups[size_t(layer.group)].spec;
        ensure(op->heads == spec.n_heads, "run: % query heads, the cache has %", op->heads, spec.n_heads);
        ensure(op->kv_heads == spec.n_kv_heads, "run: % KV heads, the cache has %", op->kv_heads, spec.n_kv_heads);
        ensure(op->head_dim == layer.store.dim, "run: heads of %, the cache has %", op->head_dim, layer.store.dim);
    }
    for (size_t g = 0; g < cache.groups.size(); ++g) {
        const TableView& table = cache.groups[g].table;
        const StoreView* least = nullptr;  // one check serves all layers of the group
        for (const LayerView& layer : cache.layers)
            if (layer.group == int64_t(g) && (!least || layer.store.n_blocks < least->n_blocks)) least = &layer.store;
        if (!least) continue;
        ensure(table.tokens == n_tokens && table.q_start[table.n_seqs] == n_tokens,
               "run: the table is prepared for % tokens, not for %", table.tokens, n_tokens);
        check_table(table, cache.groups[g].spec, *least);
    }
    for (int64_t t = 0; t < n_tokens; ++t) ensure(positions[t] >= 0, "run: token % has position %", t, positions[t]);
}

}  // namespace kvarn
