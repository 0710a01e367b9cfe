// The Python bindings for the CPU backend. Arguments are checked only here. Errors name shape and
// dtype.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "bandwidth.hpp"
#include "base.hpp"
#include "bind.hpp"
#include "pages.hpp"

using namespace kvarn;

namespace {

// -- weights

template <typename Fn>
void over_groups(Pool& pool, int64_t groups, Fn&& fn) {
    Shares shares(pool.size());
    shares.reset(groups);
    pool.run([&](int thread) {
        int64_t begin, end;
        while (shares.take(thread, 16, begin, end)) fn(begin, end);
    });
}

using Grid = std::optional<nb::ndarray<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>;

// A checked type, with the bytes of a row and the grid, if the type has one.
struct Rows {
    const FileType& type;
    int64_t bytes;
    const int8_t* grid;

    Rows(const std::string& name, int64_t cols, const Grid& given) : type(found(name)) {
        ensure(cols > 0 && cols % type.columns == 0,
               name + " rows of " + std::to_string(cols) + " are no whole blocks");
        bytes = cols / type.columns * type.bytes;
        const int64_t points = type.grid_rows;
        ensure(!points || (given && int64_t(given->shape(0)) == points &&
                           int64_t(given->shape(1)) == type.grid_columns && fits(type, given->data())),
               "pack: " + name + " needs its grid, [" + std::to_string(points) + ", " +
                   std::to_string(type.grid_columns) + "] of int8");
        grid = points ? given->data() : nullptr;
    }

    static const FileType& found(const std::string& name) {
        const FileType* type = find_file_type(name);
        ensure(type != nullptr, "pack: there are no weights of type " + name);
        return *type;
    }
};

PackedMatrix pack_rows(Pool& pool, const std::string& type, In given, int64_t cols, const Grid& grid) {
    const Array<const uint8_t, 2> stored(given, "pack: rows");
    const Rows rows(type, cols, grid);
    ensure(stored.shape(0) > 0 && stored.shape(1) == rows.bytes,
           "pack: a row of " + std::to_string(cols) + " columns of " + type + " is " + std::to_string(rows.bytes) +
               " bytes, not " + describe(given));
    const Unlocked unlocked;
    const PackedMatrix out = allocate(rows.type, stored.shape(0), cols);
    over_groups(pool, out.groups, [&](int64_t begin, int64_t end) {
        pack(rows.type, rows.grid, stored.data() + begin * kGroup * rows.bytes, out, begin, end);
    });
    return out;
}

// A matrix of this type without its numbers: what it would take.
PackedMatrix packed_outline(const std::string& type, int64_t n_rows, int64_t cols) {
    const FileType& known = Rows::found(type);
    ensure(n_rows > 0 && cols > 0 && cols % known.columns == 0,
           "outline: " + std::to_string(n_rows) + " rows of " + std::to_string(cols) + " are no " + type + " matrix");
    return outline(known.kind, n_rows, cols);
}

// A matrix of this type with zeros, in memory that is really there: every page was written.
PackedMatrix zeros(const std::string& type, int64_t n_rows, int64_t cols) {
    packed_outline(type, n_rows, cols);  // checks
    const Unlocked unlocked;
    const PackedMatrix w = allocate(Rows::found(type), n_rows, cols);
    memset(w.data.get(), 0, size_t(w.nbytes()));
    return w;
}

// Reads n bytes of the file. Returns 0, an error number, or -1 if the file ends before.
int read_fully(int file, uint8_t* to, int64_t n, int64_t offset) {
    while (n > 0) {
        const ssize_t got = pread(file, to, size_t(n), offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : -1;
        to += got, n -= got, offset += got;
    }
    return 0;
}

// Every thread reads the rows that it packs, a part at a time, so that they are in its cache.
PackedMatrix pack_file(Pool& pool, const std::string& type, int file, int64_t offset, int64_t n_rows, int64_t cols,
                       const Grid& grid) {
    constexpr int64_t kPart = 1 << 19;  // bytes
    const Rows rows(type, cols, grid);
    ensure(n_rows > 0 && offset >= 0, "pack_file: no rows, or a negative offset");
    std::atomic<int> error{0};
    const auto packed = [&] {
        const Unlocked unlocked;
        const PackedMatrix out = allocate(rows.type, n_rows, cols);
        const int64_t group_bytes = kGroup * rows.bytes, step = std::max(kPart / group_bytes, int64_t(1));
        over_groups(pool, out.groups, [&](int64_t begin, int64_t end) {
            thread_local std::vector<uint8_t> part;
            for (int64_t at = begin; at < end && error == 0; at += step) {
                const int64_t stop = std::min(at + step, end);
                const int64_t n = std::min(stop * kGroup, n_rows) - at * kGroup;
                part.resize(size_t(n * rows.bytes));
                const int failed = read_fully(file, part.data(), n * rows.bytes, offset + at * group_bytes);
                if (failed)
                    error = failed;
                else
                    pack(rows.type, rows.grid, part.data(), out, at, stop);
            }
        });
        return out;
    }();
    if (const int failed = error) {
        errno = failed;
        if (failed < 0)
            PyErr_SetString(PyExc_EOFError, "the file has become shorter");
        else
            PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return packed;
}

void unpack(const PackedMatrix& w, Out result) {
    const Array<float, 2> out(result, "unpack: out");
    ensure(w.data != nullptr, "unpack: the weight has no numbers, only sizes");
    ensure(out.shape(0) == w.rows && out.shape(1) == w.cols, "unpack: the weight is [" + std::to_string(w.rows) + ", " +
                                                                 std::to_string(w.cols) + "], out is " +
                                                                 describe(result));
    const Unlocked unlocked;
    for (int64_t r = 0; r < w.rows; ++r) unpack_row(w, r, out.data() + r * w.cols);
}

// -- programs

using OptionalVector = std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;

Vector padded(const OptionalVector& x) {
    if (!x) return nullptr;
    auto v = std::make_shared<std::vector<float>>(size_t(up(int64_t(x->shape(0)), kBlock)), 0.0f);
    std::copy(x->data(), x->data() + x->shape(0), v->begin());
    return v;
}

using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Counts run(Program& p, Cache& c, In token_ids, In token_positions, In wanted_rows, Out result) {
    const Array<const int64_t, 1> tokens(token_ids, "run: tokens"), rows(wanted_rows, "run: rows");
    const Array<const int32_t, 1> positions(token_positions, "run: positions");
    const Array<float, 2> logits(result, "run: logits");
    ensure(p.loaded(), "run: the program has weights without numbers; it is only for sizes");
    const int64_t n = tokens.shape(0), wanted = rows.shape(0);
    ensure(positions.shape(0) == n, "run: one position per token is needed");
    for (int64_t i = 0; i < n; ++i)
        if (tokens.data()[i] < 0 || tokens.data()[i] >= p.vocabulary())
            ensure(false, "run: token " + std::to_string(tokens.data()[i]) + " lies outside the vocabulary of " +
                              std::to_string(p.vocabulary()));
    for (int64_t i = 0; i < wanted; ++i)
        if (rows.data()[i] < 0 || rows.data()[i] >= n)
            ensure(false, "run: row " + std::to_string(rows.data()[i]) + " lies outside the step of " +
                              std::to_string(n) + " tokens");
    ensure(logits.shape(0) == wanted && logits.shape(1) == up(p.vocabulary(), kGroup),
           "run: logits are [rows, vocabulary rounded up to 16], not " + describe(result));
    check_step(p, c.view, positions.data(), n);
    const Unlocked unlocked;
    const Counted k = p.run(c.view, tokens.data(), positions.data(), n, rows.data(), wanted, logits.data());
    return {k.written, k.read, k.prefill, k.decode, k.prefill_ns, k.decode_ns};
}

void hidden(const Program& p, Out result) {
    const Array<float, 2> out(result, "hidden: out");
    const Activations& x = p.hidden();
    ensure(out.shape(0) == x.rows && out.shape(1) == x.cols, "hidden: the last step's are [" + std::to_string(x.rows) +
                                                                 ", " + std::to_string(x.cols) + "], out is " +
                                                                 describe(result));
    for (int64_t r = 0; r < x.rows; ++r) std::copy_n(x.f32 + r * x.stride, x.cols, out.data() + r * x.cols);
}

void check_buffers(const Program& p, const Op& op) {
    const auto ok = [&](int b) { return b >= -1 && b < p.n_buffers(); };
    bool all = ok(op.in) && ok(op.in2) && ok(op.in3) && ok(op.out);
    for (const Segment& s : op.segments) all = all && ok(s.out);
    ensure(all, "an operation names a buffer that does not exist");
}

Op named(Op::Kind kind, const std::string& name, bool wanted_rows_only) {
    Op op;
    op.kind = kind, op.name = name, op.wanted_rows_only = wanted_rows_only;
    return op;
}

// A product reads the rows that the last norm or gate made, and writes as many.
void check_product(const Program& p, const Op& op) {
    const bool logits = op.kind == Op::Kind::Logits;
    const Op* input = nullptr;
    for (const Op& before : p.ops())
        if (before.kind == Op::Kind::NormRound || before.kind == Op::Kind::Gated) input = &before;
    ensure(input && input->out >= 0, "linear: no operation before it made rows for it");
    ensure(input->wanted_rows_only == op.wanted_rows_only,
           "linear: it has other rows than \"" + input->name + "\", which makes its input");
    ensure(!logits || (op.wanted_rows_only && op.segments.size() == 1),
           "linear: logits are one matrix, with the wanted rows");
    for (const Segment& s : op.segments) {
        ensure(s.weight.cols == p.width(input->out), "linear: a matrix of " + std::to_string(s.weight.cols) +
                                                         " columns reads rows of " +
                                                         std::to_string(p.width(input->out)));
        ensure(
            logits || (s.out >= 0 && p.width(s.out) == s.weight.rows),
            "linear: the output of a matrix of " + std::to_string(s.weight.rows) + " rows is no buffer of that width");
    }
}

void add(Program& p, Op op) {
    check_buffers(p, op);
    ensure(p.ops().empty() || p.ops().back().kind != Op::Kind::Logits, "an operation follows the logits");
    if (op.kind == Op::Kind::Linear || op.kind == Op::Kind::Logits) check_product(p, op);
    p.add_op(std::move(op));
}

using SegmentTuple = std::tuple<PackedMatrix, OptionalVector, int, bool>;

void bind_program(nb::module_& m) {
    nb::enum_<Gate>(m, "Gate").value("silu", Gate::Silu).value("gelu", Gate::Gelu);
    nb::class_<Program>(m, "Program")
        .def("__init__",
             [](Program* self, std::shared_ptr<Pool> pool) { new (self) Program(std::move(pool), kernels()); })
        .def("buffer", &Program::add_buffer)
        .def("rope", &Program::add_rope)
        .def("embed",
             [](Program& p, const std::string& name, const PackedMatrix& matrix, int out, float scale) {
                 Op op = named(Op::Kind::Embed, name, false);
                 op.matrix = matrix, op.out = out, op.scale = scale;
                 add(p, op);
             })
        .def(
            "norm_round",
            [](Program& p, const std::string& name, bool wanted_rows_only, int in, int out, OptionalVector weight,
               float eps, bool needs_int8, bool needs_bf16) {
                Op op = named(Op::Kind::NormRound, name, wanted_rows_only);
                op.in = in, op.out = out, op.weight = padded(weight), op.eps = eps, op.needs_int8 = needs_int8,
                op.needs_bf16 = needs_bf16;
                add(p, op);
            },
            nb::arg("name"), nb::arg("wanted_rows_only"), nb::arg("in_"), nb::arg("out"), nb::arg("weight").none(),
            nb::arg("eps"), nb::arg("needs_int8"), nb::arg("needs_bf16"))
        .def("gated",
             [](Program& p, const std::string& name, bool wanted_rows_only, int gate, int up, int out, Gate kind,
                bool needs_int8, bool needs_bf16) {
                 Op op = named(Op::Kind::Gated, name, wanted_rows_only);
                 op.in = gate, op.in2 = up, op.out = out, op.gate = kind, op.needs_int8 = needs_int8,
                 op.needs_bf16 = needs_bf16;
                 add(p, op);
             })
        .def("norm_add",
             [](Program& p, const std::string& name, bool wanted_rows_only, int in, int out, OptionalVector weight,
                float eps) {
                 Op op = named(Op::Kind::NormAdd, name, wanted_rows_only);
                 op.in = in, op.out = out, op.weight = padded(weight), op.eps = eps;
                 add(p, op);
             })
        .def("add",
             [](Program& p, const std::string& name, bool wanted_rows_only, int in, int out) {
                 Op op = named(Op::Kind::Add, name, wanted_rows_only);
                 op.in = in, op.out = out;
                 add(p, op);
             })
        .def("select",
             [](Program& p, const std::string& name, int in, int out) {
                 Op op = named(Op::Kind::Select, name, true);
                 op.in = in, op.out = out;
                 add(p, op);
             })
        .def("linear",
             [](Program& p, const std::string& name, bool wanted_rows_only, bool logits,
                const std::vector<SegmentTuple>& segments) {
                 Op op = named(logits ? Op::Kind::Logits : Op::Kind::Linear, name, wanted_rows_only);
                 for (const auto& [weight, bias, out, sum] : segments)
                     op.segments.push_back({weight, padded(bias), out, sum});
                 add(p, op);
             })
        .def(
            "attention",
            [](Program& p, const std::string& name, int layer, int q, int k, int v, int out, float scale, int rope,
               std::tuple<int, int, int> shape, OptionalVector q_norm, OptionalVector k_norm, OptionalVector centre,
               float eps) {
                Op op = named(Op::Kind::Attention, name, false);
                op.layer = layer, op.in = q, op.in2 = k, op.in3 = v, op.out = out, op.scale = scale, op.rope = rope;
                std::tie(op.heads, op.kv_heads, op.head_dim) = shape;
                op.weight = padded(q_norm), op.weight2 = padded(k_norm), op.centre = padded(centre), op.eps = eps;
                ensure(!centre || int64_t(centre->shape(0)) == int64_t(op.kv_heads) * op.head_dim,
                       "attention: the centre has one number per KV head and dimension");
                add(p, op);
            },
            nb::arg("name"), nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
            nb::arg("scale"), nb::arg("rope"), nb::arg("shape"), nb::arg("q_norm").none(), nb::arg("k_norm").none(),
            nb::arg("centre").none(), nb::arg("eps"))
        .def("run", &run)
        .def("hidden", &hidden)
        .def("reserve", &Program::reserve)
        .def_prop_ro("vocabulary", &Program::vocabulary)
        .def_prop_ro("workspace", &Program::workspace_bytes)
        .def("workspace_for", &Program::workspace_for)
        .def("trace", &Program::trace)
        .def("timings", [](Program& p) {
            std::vector<std::tuple<std::string, int64_t, int64_t>> out;
            for (const Timing& t : p.take_timings()) out.emplace_back(p.ops()[size_t(t.op)].name, t.begin, t.end);
            return out;
        });
}

}  // namespace

// See pages.hpp.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> arena(int64_t bytes) {
    ensure(bytes >= 0 && bytes < (int64_t(1) << 46), "arena: cannot allocate " + std::to_string(bytes) + " bytes");
    auto memory = std::make_unique<std::shared_ptr<uint8_t>>(pages(bytes));
    uint8_t* data = memory->get();
    nb::capsule owner(memory.release(), [](void* p) noexcept { delete static_cast<std::shared_ptr<uint8_t>*>(p); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size_t(bytes)}, owner);
}

void bind_cpu(nb::module_& m) {
    m.def("arena", &arena, nb::arg("bytes"));
    nb::class_<Pool>(m, "Pool").def(nb::init<int>()).def_prop_ro("size", &Pool::size);
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def_prop_ro("kind", [](const PackedMatrix& w) { return std::string(name_of(w.kind)); })
        .def_prop_ro("integer", &PackedMatrix::integer)
        .def_ro("rows", &PackedMatrix::rows)
        .def_ro("cols", &PackedMatrix::cols)
        .def_prop_ro("nbytes", &PackedMatrix::nbytes)
        .def("unpack", &unpack, nb::arg("out"));
    m.def("pack_file", &pack_file, nb::arg("pool"), nb::arg("type"), nb::arg("file"), nb::arg("offset"),
          nb::arg("rows"), nb::arg("cols"), nb::arg("grid").none() = nb::none());
    m.def("pack", &pack_rows, nb::arg("pool"), nb::arg("type"), nb::arg("rows"), nb::arg("cols"),
          nb::arg("grid") = nb::none());
    m.def("outline", &packed_outline, nb::arg("type"), nb::arg("rows"), nb::arg("cols"));
    m.def("zeros", &zeros, nb::arg("type"), nb::arg("rows"), nb::arg("cols"));
    m.attr("GROUP_ROWS") = kGroup;
    m.attr("LARGE_PAGE") = kLargePage;
    m.attr("SHARED_PAGES") = kShared;
    m.attr("ALONE") = kAlone;
    m.def("read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("threads"), nb::call_guard<Unlocked>());
    bind_cache(m);
    bind_program(m);
}
