// The Python bindings for packing weights of the CUDA backend. Arguments are checked only here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bind.hpp"
#include "planes.hpp"

using namespace kvarn;

namespace {

constexpr int kMostPower = 100;  // so that every factor is a normal f32

struct Stored {
    const PlaneType& type;
    Array<const uint8_t, 2> rows;

    Stored(const std::string& name, const In& given) : type(found(name)), rows(given, "planes: rows") {
        ensure(rows.shape(1) > 0 && rows.shape(1) % type.bytes == 0, "planes: rows of " + name + " have blocks of " +
                                                                         std::to_string(type.bytes) + " bytes, not " +
                                                                         describe(given));
    }

    static const PlaneType& found(const std::string& name) {
        const PlaneType* type = find_plane_type(name);
        ensure(type != nullptr, "planes: weights of type " + name + " are not packed");
        return *type;
    }
};

std::pair<float, float> largest(const std::string& type, In given) {
    const Stored from(type, given);
    const Unlocked unlocked;
    const int64_t blocks = from.rows.shape(0) * (from.rows.shape(1) / from.type.bytes);
    const Largest found = largest_scales(from.type, from.rows.data(), blocks);
    return {found.scale, found.offset};
}

// Rows from `row` on of codes, and columns from `column` on of headers.
void put_rows(const std::string& name, In given, int power, Out codes, int64_t row, Out headers, int64_t column) {
    const Stored from(name, given);
    const Array<uint16_t, 5> tiles(codes, "planes: codes");
    const Array<uint32_t, 3> words(headers, "planes: headers");
    const PlaneType& type = from.type;
    const int64_t n = from.rows.shape(0), units = type.units(from.rows.shape(1));
    ensure(tiles.shape(1) == units && tiles.shape(2) == type.tiles && tiles.shape(3) == kPlaneRows &&
               tiles.shape(4) == type.span && words.shape(0) == units && words.shape(1) == type.words(),
           "planes: rows of " + name + " are " + describe(given) + ", codes are " + describe(codes) + ", headers are " +
               describe(headers));
    ensure(row >= 0 && row <= tiles.shape(0) * kPlaneRows - n, "planes: % rows do not fit codes at row %", n, row);
    ensure(column >= 0 && column <= words.shape(2) - n, "planes: % rows do not fit headers at column %", n, column);
    ensure(power >= -kMostPower && power <= kMostPower, "planes: a power of %, not within %", power, kMostPower);
    const Unlocked unlocked;
    pack_planes(type, from.rows.data(), n, from.rows.shape(1), power,
                {tiles.data(), row, words.data(), column, words.shape(2)});
}

}  // namespace

void bind_planes(nb::module_& m) {
    m.def("largest_scales", &largest, nb::arg("type"), nb::arg("rows"));
    m.def("pack_planes", &put_rows, nb::arg("type"), nb::arg("rows"), nb::arg("power"), nb::arg("codes"),
          nb::arg("row"), nb::arg("headers"), nb::arg("column"));
}
