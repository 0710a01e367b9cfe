// Writing cells: encodes the keys and values of a token and puts them into its slot.
#include <cstring>

#include "program.hpp"

namespace kvarn {
namespace {

void encode(Codec codec, const CellEncoders& encoders, const float* x, int64_t dim, uint8_t* out, float* scale) {
    switch (codec) {
        case Codec::F32:
            memcpy(out, x, size_t(dim) * 4);
            return;
        case Codec::F16:
            return encoders.f16(x, reinterpret_cast<uint16_t*>(out), dim);
        case Codec::BF16:
            return encoders.bf16(x, reinterpret_cast<uint16_t*>(out), dim);
        case Codec::Int8:
            return encoders.int8(x, reinterpret_cast<int8_t*>(out), scale, 1, dim);
    }
}

void put_row(const uint8_t* row, int64_t cells, int64_t stride, int64_t bytes, uint8_t* to) {
    if (stride == 1)
        memcpy(to, row, size_t(cells * bytes));
    else if (bytes == 2)
        for (int64_t i = 0; i < cells; ++i) memcpy(to + i * stride * 2, row + i * 2, 2);
    else
        for (int64_t i = 0; i < cells; ++i) memcpy(to + i * stride * 4, row + i * 4, 4);
}

}  // namespace

void prefetch_write(const StoreView& s, int64_t cell, HeadRange heads) {
    const Strides& st = s.k.strides;
    if (cell < 0 || st.dim == 1) return;  // a contiguous row is only a few cache lines
    const int64_t at = s.offset(st, cell / s.block_size, cell % s.block_size), bytes = cell_bytes(s.k.codec);
    for (int64_t h = heads.begin; h < heads.end; ++h)
        for (int64_t i = 0; i < cells_of(s.k.codec, s.dim); ++i)
            __builtin_prefetch(s.k.cells + (at + h * st.head + i * st.dim) * bytes, 1);
}

int64_t write_heads(const StoreView& s, const CellEncoders& encoders, int64_t cell, HeadRange heads, const float* k,
                    const float* v, int64_t n_kv_heads) {
    const int64_t block = cell / s.block_size, slot = cell % s.block_size, copies = s.n_heads / n_kv_heads;
    alignas(64) uint8_t encoded[kMaxHeadDim * sizeof(float)];
    const auto put = [&](const float* from, const CellsView& to) {
        const int64_t bytes = cell_bytes(to.codec);
        const int64_t at = s.offset(to.strides, block, slot), scale_at = s.offset(to.scale_strides, block, slot);
        float scale = 0;
        for (int64_t h = heads.begin; h < heads.end; ++h) {
            if (h == heads.begin || h % copies == 0)
                encode(to.codec, encoders, from + h / copies * s.dim, s.dim, encoded, &scale);
            put_row(encoded, cells_of(to.codec, s.dim), to.strides.dim, bytes,
                    to.cells + (at + h * to.strides.head) * bytes);
            if (to.scales) to.scales[scale_at + h * to.scale_strides.head] = scale;
        }
    };
    put(k, s.k);
    put(v, s.v);
    return (heads.end - heads.begin) * s.slot_bytes();
}

}  // namespace kvarn
