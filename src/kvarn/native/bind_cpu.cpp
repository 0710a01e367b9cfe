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
#include "fastest.hpp"
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
    nb::class_<Fastest>(m, "Fastest")  // for tests: a program has its own
        .def(nb::init<size_t, int64_t, int64_t>(), nb::arg("variants"), nb::arg("pause"), nb::arg("longest"))
        .def("next", &Fastest::next, nb::arg("tokens"), nb::arg("keys"))
        .def("took", &Fastest::took, nb::arg("ns"));
    m.def("thread_counts", &thread_counts, nb::arg("most"));
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
