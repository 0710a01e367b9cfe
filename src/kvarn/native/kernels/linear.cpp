// Compiled once per instruction set; see linear.hpp.
#include <new>

#include "amx_linear.hpp"
#include "blocks.hpp"

namespace kvarn::KVARN_ISA {
namespace {

// R rows of one activation tile with one group of weights. The first tile reads the weights from
// memory, and prefetches.
template <Kind K, int R>
void tile(const PackedMatrix& w, const Activations& x, const Output& y, int64_t group, int64_t tile_index,
          bool from_memory, PrefetchQueue& queue) {
    constexpr int kStep = kWide || R < 4 ? R : 4;  // 8 code vectors and the accumulators stay in registers
    // Registers of outputs at a time. The sums of one wait for each other from block to block, so one is too few.
    constexpr int kAtOnce = R <= 2 ? int(kGroup) / kFloatLanes : 1;
    const uint8_t *scales = w.scales(group), *codes = w.codes(group);
    const int64_t stride = x.height * kBlock, share = w.group_bytes / w.blocks;
    const Bytes table = broadcast_16(w.table);
    for (int r0 = 0; r0 < R; r0 += kStep) {
        const int8_t* xs = x.codes + tile_index * x.blocks * stride + r0 * kBlock;
        const BlockMeta* meta = x.meta + tile_index * x.blocks * x.height + r0;
        for (int row = 0; row < int(kGroup); row += kAtOnce * kFloatLanes) {
            Floats acc[kStep][kAtOnce];
            for (int r = 0; r < kStep; ++r)
                for (int i = 0; i < kAtOnce; ++i) acc[r][i] = set1_float(0.0f);
            for (int64_t b = 0; b < w.blocks; ++b) {
                const uint8_t* p = codes + b * code_bytes(K);
                if (from_memory && r0 == 0 && row == 0)  // prefetch this group, and at its end the next one
                    for (int64_t line = 0; line < share; line += 64)
                        prefetch_l2(scales + b * share + kPrefetchDistance + line);
                if constexpr (kWide && R == 16) prefetch_next(queue);
                KVARN_UNROLL(2)
                for (int i = 0; i < kAtOnce; ++i) {
                    const int at = row + i * kFloatLanes;
                    Bytes v[vectors(few_rows(K))];
                    unpack<K, few_rows(K)>(p + at * 4, table, v);
                    const Scales<K> s(scales, b, at);
                    const int8_t* xb = xs + b * stride;
                    const BlockMeta* mb = meta + b * x.height;
                    KVARN_UNROLL(16)
                    for (int r = 0; r < kStep; ++r) acc[r][i] = accumulate<K>(acc[r][i], v, s, xb + r * kBlock, mb[r]);
                }
            }
            const int64_t at = tile_index * kTile + r0;
            KVARN_UNROLL(16)
            for (int r = 0; r < kStep; ++r)  // unrolled, so that the sums stay in registers
                for (int i = 0; i < kAtOnce && at + r < x.rows; ++i)
                    write_row(y, at + r, group * kGroup + row + i * kFloatLanes, acc[r][i]);
        }
    }
}

// -- few registers: codes and scales are unpacked once for many rows, into memory that stays in L1

template <Kind K>
struct Ready {  // one block of kFloatLanes rows of weights
    Bytes w[vectors(many_rows(K))];
    Scales<K> s;

    Ready(const uint8_t* codes, Bytes table, const uint8_t* scales, int64_t b, int row) : s(scales, b, row) {
        unpack<K, many_rows(K)>(codes + row * 4, table, w);
    }
};

constexpr int kSlices = int(kGroup) / kFloatLanes;
constexpr int64_t kReadyBlocks = 16, kReadyRows = 128;

struct Blocks {
    int64_t begin, end;
};

template <Kind K>
void make_ready(const PackedMatrix& w, int64_t group, Blocks blocks, bool from_memory, Ready<K>* out) {
    const Bytes table = broadcast_16(w.table);
    const int64_t share = w.group_bytes / w.blocks;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        for (int64_t line = 0; from_memory && line < share; line += 64)
            prefetch_l2(w.scales(group) + b * share + kPrefetchDistance + line);
        for (int row = 0; row < int(kGroup); row += kFloatLanes)
            new (out++) Ready<K>(w.codes(group) + b * code_bytes(K), table, w.scales(group), b, row);
    }
}

// Rows of one block at a time whose integer sums stay in registers.
template <Kind K>
constexpr int kRowsOf = two_sums(K) ? 2 : 4;

#if defined(KVARN_PAIRS)
// The activations as words of 16 bits, [row / kRowsOf][block][row % kRowsOf]: made once for all groups of a range if
// they are few enough to stay in the caches, else again for each group.
constexpr int64_t kMostWords = 1024;
thread_local Words words_of_range[kMostWords];

template <Kind K>
const Words* make_words(const Activations& x, int64_t begin, int64_t end) {
    constexpr int kRows = kRowsOf<K>;
    if (many_rows(K) != Form::Words || up(end - begin, kRows) * x.blocks > kMostWords) return nullptr;
    Words* to = words_of_range;
    for (int64_t row = begin; row < end; row += kRows) {
        const int8_t* xs = x.codes + (row / kTile * x.blocks * x.height + row % kTile) * kBlock;
        for (int64_t b = 0; b < x.blocks; ++b)
            for (int r = 0; r < kRows; ++r) (to++)->read(xs + (b * x.height + r) * kBlock);
    }
    return words_of_range;
}
#else
struct Words {};
template <Kind K>
const Words* make_words(const Activations&, int64_t, int64_t) {
    return nullptr;
}
#endif

// Adds some blocks to the sums of R rows. words: these rows, or null.
template <Kind K, int R>
inline void ready_rows(const Ready<K>* ready, const Activations& x, const Words* words, Blocks blocks, int64_t row,
                       Floats (*sums)[kSlices]) {
    const int64_t at = row / kTile * x.blocks * x.height + row % kTile;
    const int8_t* xs = x.codes + (at + blocks.begin * x.height) * kBlock;
    const BlockMeta* meta = x.meta + at + blocks.begin * x.height;
    const auto each = [&](const auto& codes_of) {
        for (int64_t b = 0; b < blocks.end - blocks.begin; ++b, meta += x.height, ready += kSlices) {
            Sums<K, R, kSlices> block;
            block.compute({ready[0].w, ready[1].w}, codes_of(b));
            block.apply(sums, {&ready[0].s, &ready[1].s}, meta);
        }
    };
#if defined(KVARN_PAIRS)
    if constexpr (many_rows(K) == Form::Words) {
        if (words) return each([&](int64_t b) { return words + (blocks.begin + b) * R; });
        Words fresh[kReadyBlocks][R];
        for (int64_t b = 0; b < blocks.end - blocks.begin; ++b)
            for (int r = 0; r < R; ++r) fresh[b][r].read(xs + (b * x.height + r) * kBlock);
        return each([&](int64_t b) { return fresh[b]; });
    }
#else
    (void)words;
#endif
    each([&](int64_t b) { return xs + b * x.height * kBlock; });
}

// Rows [begin, end) of x, at most kReadyRows, with one group.
template <Kind K>
void ready_group(const PackedMatrix& w, const Activations& x, const Words* words, const Output& y, int64_t group,
                 int64_t begin, int64_t end, bool from_memory, PrefetchQueue& queue) {
    constexpr int kRows = kRowsOf<K>;
    alignas(64) uint8_t memory[kReadyBlocks * kSlices * sizeof(Ready<K>)];
    auto* ready = reinterpret_cast<Ready<K>*>(memory);
    Floats sums[kReadyRows][kSlices];
    memset(sums, 0, size_t(up(end - begin, kRows)) * sizeof sums[0]);
    const int64_t parts = (w.blocks + kReadyBlocks - 1) / kReadyBlocks, most = (w.blocks + parts - 1) / parts;
    for (Blocks blocks{0, 0}; blocks.begin < w.blocks; blocks.begin = blocks.end) {
        blocks.end = smaller(blocks.begin + most, w.blocks);
        make_ready<K>(w, group, blocks, from_memory, ready);
        for (int64_t row = begin; row < end; row += kRows) {
            for (int64_t i = 0; i < (blocks.end - blocks.begin) * kRows; i += kTile) prefetch_next(queue);  // as tile()
            const int64_t past = smaller(row + kRows, end);
            if (blocks.end == w.blocks)  // rows are far apart: stores would wait for their lines
                for (int64_t r = row; r < past; ++r) prefetch_to_write(y.data + r * y.stride + group * kGroup);
            ready_rows<K, kRows>(ready, x, words ? words + (row - begin) * x.blocks : nullptr, blocks, row,
                                 sums + (row - begin));
            if (blocks.end < w.blocks) continue;
            for (int64_t r = row; r < past; ++r)
                for (int i = 0; i < kSlices; ++i) write_row(y, r, group * kGroup + i * kFloatLanes, sums[r - begin][i]);
        }
    }
}

template <Kind K>
void multiply_ready(const PackedMatrix& w, const Activations& x, const Output& y, const Range& r,
                    PrefetchQueue& queue) {
    const int64_t first = r.tile_begin * kTile, end = smaller(r.tile_end * kTile, x.rows);
    const Words* words = end - first <= kReadyRows ? make_words<K>(x, first, end) : nullptr;
    for (int64_t group = r.group_begin; group < r.group_end; ++group)
        for (int64_t row = first; row < end; row += kReadyRows)
            ready_group<K>(w, x, words, y, group, row, smaller(row + kReadyRows, end), row == first, queue);
}

template <Kind K>
void multiply_integers(const PackedMatrix& w, const Activations& x, const Output& y, const Range& r,
                       PrefetchQueue& queue) {
#if defined(KVARN_AMX)
    if (x.rows - r.tile_begin * kTile > kFewRows) return tile_integers<K>(w, x, y, r, queue);
#endif
    if constexpr (kReuses)
        if (x.rows - r.tile_begin * kTile > 4) return multiply_ready<K>(w, x, y, r, queue);
    const auto rows = [&]<int R>(int64_t group, int64_t t) { tile<K, R>(w, x, y, group, t, t == r.tile_begin, queue); };
    for (int64_t group = r.group_begin; group < r.group_end; ++group) {
        for (int64_t t = r.tile_begin; t < r.tile_end; ++t) {
            const int64_t left = smaller(x.rows - t * kTile, kTile);
            if constexpr (!kReuses) {
                if (left > 4) {
                    left > 8 ? rows.template operator()<16>(group, t) : rows.template operator()<8>(group, t);
                    continue;
                }
            }
            if (left > 2)
                rows.template operator()<4>(group, t);
            else if (left > 1)
                rows.template operator()<2>(group, t);
            else
                rows.template operator()<1>(group, t);
        }
    }
}

// -- floating-point weights: one chain per output, lanes are rows

template <SumOrder O, int R>
void bf16_rows(const PackedMatrix& w, const Activations& x, const Output& y, int64_t group, int64_t first) {
    F acc[R][1];
    for (int r = 0; r < R; ++r) acc[r][0] = zero();
    const auto* codes = reinterpret_cast<const uint16_t*>(w.codes(group));  // pairs of columns: [pair][row][2]
    const int64_t width = x.blocks * kBlock;
    const uint16_t* a = x.bf16 + first * width;
    if constexpr (O == SumOrder::Pairs && kDotUnit) {
#if defined(__AVX512BF16__)
        for (int64_t c = 0; c < width; c += 2) {
            if constexpr (R == 1) prefetch_l1(reinterpret_cast<const uint8_t*>(codes + c * 16) + kPrefetchDistance);
            const auto b = (__m512bh)_mm512_loadu_si512(codes + c * 16);
            for (int r = 0; r < R; ++r) acc[r][0].v = _mm512_dpbf16_ps(acc[r][0].v, b, pair_at(a + r * width + c));
        }
#endif
    } else {
        in_turn<O == SumOrder::Tiles>(acc, width, [&](F(&sums)[R][1], int64_t c) {
            if constexpr (R == 1) prefetch_l1(reinterpret_cast<const uint8_t*>(codes + c * 16) + kPrefetchDistance);
            const F b = c % 2 ? odd_bf16(codes + (c - 1) * 16) : even_bf16(codes + c * 16);
            for (int r = 0; r < R; ++r) sums[r][0] = fma(b, set1(widen_bf16(a[r * width + c])), sums[r][0]);
        });
    }
    for (int r = 0; r < R; ++r) write_lanes(y, first + r, group * kGroup, acc[r][0]);
}

template <Kind K, int R>
void float_rows(const PackedMatrix& w, const Activations& x, const Output& y, int64_t group, int64_t first) {
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    const uint8_t* codes = w.codes(group);
    for (int64_t c = 0; c < w.cols; ++c) {
        F b;
        if constexpr (K == Kind::F32) {
            b = load(reinterpret_cast<const float*>(codes) + c * kGroup);
            if constexpr (R == 1) prefetch_l1(codes + c * 64 + kPrefetchDistance);
        } else {
            b = load_f16(reinterpret_cast<const uint16_t*>(codes) + c * kGroup);
            if constexpr (R == 1) prefetch_l1(codes + c * 32 + kPrefetchDistance);
        }
        for (int r = 0; r < R; ++r) acc[r] = fma(b, set1(x.f32[(first + r) * x.stride + c]), acc[r]);
    }
    for (int r = 0; r < R; ++r) write_lanes(y, first + r, group * kGroup, acc[r]);
}

template <Kind K, SumOrder O>
void multiply_floats(const PackedMatrix& w, const Activations& x, const Output& y, const Range& r) {
    constexpr int R = kWide ? 8 : 4;
    const auto some = [&]<int N>(int64_t group, int64_t row) {
        if constexpr (K == Kind::BF16)
            bf16_rows<O, N>(w, x, y, group, row);
        else
            float_rows<K, N>(w, x, y, group, row);
    };
    int64_t from = r.tile_begin * kTile;
    const int64_t end = smaller(r.tile_end * kTile, x.rows);
#if defined(KVARN_AMX)
    if constexpr (K == Kind::BF16 && O == SumOrder::Tiles) from = tile_bf16(w, x, y, r);
#endif
    for (int64_t group = r.group_begin; group < r.group_end; ++group) {
        int64_t row = from;
        for (; row + R <= end; row += R) some.template operator()<R>(group, row);
        for (; row < end; ++row) some.template operator()<1>(group, row);
    }
}

template <SumOrder O>
void multiply(const PackedMatrix& w, const Activations& x, const Output& y, const Range& r, PrefetchQueue& queue) {
    switch (w.kind) {
        case Kind::Q4_0:
            return multiply_integers<Kind::Q4_0>(w, x, y, r, queue);
        case Kind::Q4_1:
            return multiply_integers<Kind::Q4_1>(w, x, y, r, queue);
        case Kind::Q5_0:
            return multiply_integers<Kind::Q5_0>(w, x, y, r, queue);
        case Kind::Q5_1:
            return multiply_integers<Kind::Q5_1>(w, x, y, r, queue);
        case Kind::Q8_0:
            return multiply_integers<Kind::Q8_0>(w, x, y, r, queue);
        case Kind::Q2_K:
            return multiply_integers<Kind::Q2_K>(w, x, y, r, queue);
        case Kind::Q3_K:
            return multiply_integers<Kind::Q3_K>(w, x, y, r, queue);
        case Kind::Q4_K:
            return multiply_integers<Kind::Q4_K>(w, x, y, r, queue);
        case Kind::Q5_K:
            return multiply_integers<Kind::Q5_K>(w, x, y, r, queue);
        case Kind::Q6_K:
            return multiply_integers<Kind::Q6_K>(w, x, y, r, queue);
        case Kind::Table16:
            return multiply_integers<Kind::Table16>(w, x, y, r, queue);
        case Kind::Table32:
            return multiply_integers<Kind::Table32>(w, x, y, r, queue);
        case Kind::Table:
            return multiply_integers<Kind::Table>(w, x, y, r, queue);
        case Kind::BF16:
            return multiply_floats<Kind::BF16, O>(w, x, y, r);
        case Kind::F16:
            return multiply_floats<Kind::F16, O>(w, x, y, r);
        case Kind::F32:
            return multiply_floats<Kind::F32, O>(w, x, y, r);
    }
}

// -- activations

// x: blocks * 32 floats, zeros past cols. Codes are x / d rounded half to even, d = amax / 127. A
// block with a value that is not finite gets d = NaN, so that its outputs are NaN too.
void quantize(const float* x, const Activations& out, int64_t row) {
    const int64_t t = row / kTile, r = row % kTile;
    int8_t* codes = out.codes + t * out.blocks * out.height * kBlock + r * kBlock;
    BlockMeta* meta = out.meta + t * out.blocks * out.height + r;
    for (int64_t b = 0; b < out.blocks; ++b, codes += out.height * kBlock, meta += out.height) {
        const F lo = load(x + b * kBlock), hi = load(x + b * kBlock + 16);
        const uint32_t bits = largest_bits(lo, hi);
        const bool finite = bits < 0x7f800000u;
        const float amax = bits_of<float>(bits);
        const float d = finite ? amax * (1.0f / 127.0f) : bits_of<float>(0x7fc00000u);
        const F scale = set1(d > 0.0f ? 127.0f / amax : 0.0f);
        const int32_t first = store_i8(codes, to_int(mul(lo, scale)));
        const int32_t second = store_i8(codes + 16, to_int(mul(hi, scale)));
        const int32_t s0 = finite ? first : 0, s1 = finite ? second : 0;
        meta->d = d;
        meta->s = d * float(s0 + s1);
        meta->sum[0] = s0, meta->sum[1] = s1;
    }
}

void round(const float* x, const Activations& out, int64_t row) {
    uint16_t* p = out.bf16 + row * out.blocks * kBlock;
    for (int64_t c = 0; c < out.blocks * kBlock; c += kLanes) store_bf16(p + c, load(x + c));
}

}  // namespace

extern const Linear linear[2];
const Linear linear[2] = {{quantize, round, multiply<SumOrder::Pairs>}, {quantize, round, multiply<SumOrder::Tiles>}};

}  // namespace kvarn::KVARN_ISA
