// Writes and attention of one layer without a program, for conformance tests.
#include "checks.hpp"
#include "scratch.hpp"
#include "work.hpp"

namespace kvarn {

Counted attend(Pool& pool, const Kernels& kernels, AttentionArgs args, Lines<uint8_t>& fresh, bool with_prefill,
               bool with_decode) {
    AttentionWork work;
    work.make(args.table, args.spec, args.store, pool.size());
    ensure(int64_t(fresh.size()) >= fresh_bytes(args.store, int64_t(work.tiles.size()), args.spec.n_kv_heads),
           "attend: the step's keys and values must be written first");
    args.fresh = fresh_rows(fresh.data(), args.store, work, args.spec.n_kv_heads);
    if (!with_prefill) work.prefill.clear();
    if (!with_decode) work.decode.clear(), work.merges.clear();
    std::vector<float> partials(size_t(work.partial_floats));
    Phases phases(pool, 2);
    phases.reset(0, int64_t(work.prefill.size() + work.decode.size()));
    phases.reset(1, int64_t(work.merges.size()));
    std::vector<int64_t> read(size_t(pool.size()));
    pool.run(
        [&](int thread) {
            const FlushDenormals flush;
            Lines<uint8_t> memory(size_t(scratch_bytes(args.store.dim)));
            uint8_t* scratch = memory.data();
            int64_t i, end;
            const auto n = int64_t(work.prefill.size());
            for (size_t at = phases.first(thread); at < phases.size();) {
                int64_t computed = 0;
                for (; phases.take(at, thread, 1, i, end); ++computed)
                    if (at == 1)
                        kernels.attention->merge(args, work.decode.data(), work.merges[size_t(i)], partials.data());
                    else if (i < n)
                        read[size_t(thread)] += kernels.attention->prefill(args, work.prefill[size_t(i)], scratch);
                    else
                        read[size_t(thread)] +=
                            kernels.attention->decode(args, work.decode[size_t(i - n)], partials.data(), scratch);
                at = phases.finish(at, thread, computed);
            }
        },
        phases.begin());
    Counted counted;
    for (const int64_t bytes : read) counted.read += bytes;
    return counted;
}

int64_t write(const Kernels& kernels, const StoreView& store, const TableView& table, int64_t n_kv_heads,
              Lines<uint8_t>& fresh, const float* k, const float* v) {
    AttentionWork work;
    work.make(table, {store.n_heads, n_kv_heads, -1, 0}, store, 1);
    fresh.resize(size_t(fresh_bytes(store, int64_t(work.tiles.size()), n_kv_heads)));
    const Writer writer{store, table, *kernels.encoders, n_kv_heads, fresh_rows(fresh.data(), store, work, n_kv_heads)};
    const int64_t row = n_kv_heads * store.dim;
    int64_t written = 0;
    for (int64_t s = 0; s < table.n_seqs; ++s) {
        const int64_t t = table.q_start[s];
        if (table.q_start[s + 1] - t == 1 && table.cells[t] >= 0)
            written += writer.write_token(s, {0, store.n_heads}, k + t * row, v + t * row);
    }
    for (const FreshToken& each : work.rows)
        if (table.cells[each.token] >= 0)
            written += writer.write_row(work, each, k + each.token * row, v + each.token * row);
    for (int64_t i = 0; i < int64_t(work.tiles.size()); ++i) written += writer.finish_tile(work, i);
    return written;
}

}  // namespace kvarn
