"""A copy of a GGUF file with every weight in f32: its metadata and names, each tensor's numbers by the `gguf` package.

    python scripts/widen_gguf.py MODEL.gguf WIDE.gguf

llama.cpp multiplies quantized weights with activations rounded to 8 bits, and f32 weights with f32 activations. Run on
the copy it predicts without that rounding from the same numbers. The copy takes up to sixteen times the space.
"""

import sys
from pathlib import Path

import gguf
import numpy as np


def widen(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):  # the writer's own
            continue
        kind, *element = field.types
        writer.add_key_value(field.name, field.contents(), kind, element[-1] if element else None)
    for tensor in reader.tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape.tolist()[::-1], np.dtype(np.float32), 4 * int(tensor.n_elements)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(np.ascontiguousarray(numbers, np.float32))
    writer.close()


if __name__ == "__main__":
    widen(*map(Path, sys.argv[1:]))
