"""What an import costs: the packages that only some models need are not imported before one of them is loaded."""

import subprocess
import sys


def test_loading_imports_no_heavy_package():
    heavy = "gguf", "safetensors", "huggingface_hub", "torch"
    code = f"import sys, kvarn.loading.checkpoint, kvarn.loading.pull; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_no_backend_is_imported_before_one_is_opened():
    code = "import sys, kvarn.llm; print([m for m in sys.modules if m.startswith('kvarn.backends.')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == f"{[f'kvarn.backends.{each}' for each in ('base', 'cache_settings', 'choice', 'loaded')]}\n"
