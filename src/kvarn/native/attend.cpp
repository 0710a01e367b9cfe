// Attention of one layer without a program, for conformance tests.
#include "program.hpp"
#include "scratch.hpp"

namespace kvarn {

Counted attend(Pool& pool, const Kernels& kernels, const AttentionArgs& args, bool with_prefill, bool with_decode) {
    AttentionWork work;
    work.make(args.table, args.spec, args.store, pool.size());
    if (!with_prefill) work.prefill.clear();
    if (!with_decode) work.decode.clear(), work.merges.clear();
    std::vector<float> partials(size_t(work.partial_floats));
    Shares items(pool.size()), merges(pool.size());
    items.reset(int64_t(work.prefill.size() + work.decode.size()));
    merges.reset(int64_t(work.merges.size()));
    std::vector<int64_t> read(size_t(pool.size()));
    pool.run([&](int thread) {
        const FlushDenormals flush;
        Lines<uint8_t> memory(size_t(scratch_bytes(args.store.dim)));
        uint8_t* scratch = memory.data();
        int64_t i, end;
        const auto n = int64_t(work.prefill.size());
        while (items.take(thread, 1, i, end))
            read[size_t(thread)] +=
                i < n ? kernels.attention->prefill(args, work.prefill[size_t(i)], scratch)
                      : kernels.attention->decode(args, work.decode[size_t(i - n)], partials.data(), scratch);
        pool.barrier(thread);
        while (merges.take(thread, 1, i, end))
            kernels.attention->merge(args, work.decode.data(), work.merges[size_t(i)], partials.data());
    });
    Counted counted;
    for (const int64_t bytes : read) counted.read += bytes;
    return counted;
}

}  // namespace kvarn
