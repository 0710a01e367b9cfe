// The cache's side of a step: the work items of attention, and writing cells.
#include "view.hpp"

#include <algorithm>
#include <cstring>

#include "program.hpp"
#include "scratch.hpp"

namespace kvarn {

void AttentionWork::make(const TableView& table, const SpecView& spec, const StoreView& store, int threads) {
    rows.clear(), decode.clear(), prefill.clear(), merges.clear();
    const int64_t group = spec.n_heads / store.n_heads, stride = 2 + up(store.dim, 16);
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
        const int64_t low = spec.first_visible(length - 1);
        for (int64_t h = 0; h < store.n_heads; h += heads) {
            const auto first = int64_t(decode.size());
            const int64_t n = std::min(heads, store.n_heads - h);
            for (int64_t c = 0; c < length; c += kChunk) {
                if (c + kChunk <= low && c >= spec.pinned) continue;
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

void prefetch_write(const StoreView& s, int64_t cell, HeadRange heads) {
    if (cell < 0 || s.ks.dim == 1) return;  // a contiguous row is only a few cache lines
    const int64_t in = cell % s.block_size, bytes = cell_bytes(s.codec);
    const int64_t at =
        cell / s.block_size * s.ks.block + in / s.panel_size * s.ks.panel + in % s.panel_size * s.ks.slot;
    for (int64_t h = heads.begin; h < heads.end; ++h)
        for (int64_t d = 0; d < s.dim; ++d) __builtin_prefetch(s.k + (at + h * s.ks.head + d * s.ks.dim) * bytes, 1);
}

int64_t write_heads(const StoreView& s, const CellEncoders& encoders, int64_t cell, HeadRange heads, const float* k,
                    const float* v, int64_t n_kv_heads) {
    const int64_t block = cell / s.block_size, in = cell % s.block_size, copies = s.n_heads / n_kv_heads;
    const int64_t panel = in / s.panel_size, row = in % s.panel_size, bytes = cell_bytes(s.codec);
    alignas(64) uint8_t encoded[kMaxHeadDim * sizeof(float)];
    const auto put = [&](const float* from, uint8_t* base, const Strides& st, float* scales, const Strides& sst) {
        float scale = 0;
        for (int64_t h = heads.begin; h < heads.end; ++h) {
            const float* x = from + h / copies * s.dim;
            if (h == heads.begin || h % copies == 0) switch (s.codec) {
                    case Codec::F32:
                        memcpy(encoded, x, size_t(s.dim) * 4);
                        break;
                    case Codec::F16:
                        encoders.f16(x, reinterpret_cast<uint16_t*>(encoded), s.dim);
                        break;
                    case Codec::BF16:
                        encoders.bf16(x, reinterpret_cast<uint16_t*>(encoded), s.dim);
                        break;
                    case Codec::Int8:
                        encoders.int8(x, reinterpret_cast<int8_t*>(encoded), &scale, 1, s.dim);
                        break;
                }
            uint8_t* to = base + (block * st.block + panel * st.panel + h * st.head + row * st.slot) * bytes;
            if (st.dim == 1)
                memcpy(to, encoded, size_t(s.dim * bytes));
            else if (bytes == 2)
                for (int64_t d = 0; d < s.dim; ++d) memcpy(to + d * st.dim * 2, encoded + d * 2, 2);
            else
                for (int64_t d = 0; d < s.dim; ++d) memcpy(to + d * st.dim * bytes, encoded + d * bytes, size_t(bytes));
            if (scales) scales[block * sst.block + panel * sst.panel + h * sst.head + row * sst.slot] = scale;
        }
    };
    put(k, s.k, s.ks, s.k_scale, s.k_scales);
    put(v, s.v, s.vs, s.v_scale, s.v_scales);
    return (heads.end - heads.begin) * s.slot_bytes();
}

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
