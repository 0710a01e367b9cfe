# On a machine with Python 3.11+, make and a C++ compiler, every target below sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt pyproject.toml $(wildcard src/kvarn/native/*.?pp src/kvarn/native/kernels/*)
STAMP := $(VENV)/.installed
SEED ?= 1
JOBS ?= 2
OPS ?= 1000000
REQUESTS ?= 1000
CASES ?= 500
MODEL ?= smollm2
PROMPT ?= "The quick brown fox"

.PHONY: run test smoke test-gpu kernels gpu-proof test-clients test-peers test-page check format bench bench-targets fuzz fuzz-attention sanitize soak attack clean
.DELETE_ON_ERROR:

run: $(STAMP)
	@$(BIN)/kvarn run -m $(MODEL) -p=$(PROMPT) -n 32 --echo
	@echo; $(BIN)/kvarn strategies

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# The backbone in seconds: every strategy, both backends, a score, a server up and down.
smoke: $(STAMP)
	@$(BIN)/python -m pytest tests/test_smoke.py $(ARGS)

# The CUDA backend without a GPU: its kernels are compiled for every target, and run in Triton's interpreter. The
# environment is that of $(VENV) with Triton added.
GPU := build/gpu
GPU_PYTHON := $(GPU)/venv/bin/python
ADD_TRITON = $(GPU_PYTHON) -m pip install -q --disable-pip-version-check \
  triton==$$($(GPU_PYTHON) -c 'from kvarn.backends.cuda.store import TRITON; print(TRITON)')
test-gpu: $(GPU)/.installed
	@if $(ADD_TRITON) 2>$(GPU)/errors; then \
	  $(GPU_PYTHON) -m pytest tests/gpu/test_build.py $(ARGS) && \
	  OPENBLAS_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -n $(JOBS) --dist worksteal tests/gpu --ignore tests/gpu/test_build.py $(ARGS); \
	else echo "skipped: Triton could not be installed ($$(grep ERROR $(GPU)/errors | tail -n 1))"; fi

# All kernels for all targets, into the package: what a release carries.
kernels: $(GPU)/.installed
	@$(ADD_TRITON)
	@$(GPU_PYTHON) -m kvarn.backends.cuda.build $(ARGS)

# On a machine with a GPU: every kernel, bits, a real model and memory; writes bench/results/gpu-proof.json.
gpu-proof: $(STAMP)
	@$(BIN)/python bench/gpu_proof.py $(ARGS)

$(GPU)/.installed: $(STAMP)
	@test -x $(GPU_PYTHON) || $(BIN)/python -m venv $(GPU)/venv
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  >"$$($(GPU_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvarn_environment.pth"
	@touch $@

# Real clients against a real server, in environments of their own; writes docs/clients.md.
CLIENTS := build/clients
test-clients: $(STAMP) $(CLIENTS)/.installed
	@$(BIN)/python tests/clients/run.py $(ARGS)

$(CLIENTS)/.installed: $(wildcard tests/clients/requirements/*.txt)
	@for name in main litellm guidellm lm_eval; do \
	  echo "installing clients into $(CLIENTS)/$$name"; \
	  test -x $(CLIENTS)/$$name/bin/python || $(PYTHON) -m venv $(CLIENTS)/$$name; \
	  $(CLIENTS)/$$name/bin/python -m pip install -q --disable-pip-version-check -r tests/clients/requirements/$$name.txt || exit 1; done
	@$(CLIENTS)/guidellm/bin/python -m pip install -q --disable-pip-version-check --no-deps guidellm
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/codex @openai/codex; \
	else echo "no npm found: Codex is not run"; fi
	@command -v prometheus >/dev/null || { cd $(CLIENTS) && apt-get download -qq prometheus 2>/dev/null \
	  && dpkg-deb -x prometheus_*.deb prometheus; } || echo "no Prometheus server found: its metrics are only parsed"
	@touch $@

# llama.cpp's own tests of its server against kvarn; writes docs/llama-tests.md.
# make test-peers LLAMA=source-tree STORIES=stories15M.bin VOCABULARY=ggml-vocab-llama-spm.gguf
PEERS := build/peers
test-peers: $(STAMP) $(PEERS)/.installed
	@$(BIN)/python tests/peers/run.py $(LLAMA) --stories $(STORIES) --vocabulary $(VOCABULARY) $(ARGS)

$(PEERS)/.installed: tests/peers/requirements.txt
	@test -x $(PEERS)/venv/bin/python || $(PYTHON) -m venv $(PEERS)/venv
	@$(PEERS)/venv/bin/python -m pip install -q --disable-pip-version-check -r tests/peers/requirements.txt
	@touch $@

# The page of `kvarn serve` in the system's Chromium, in an environment of its own; writes docs/page.md.
PAGE := build/page
test-page: $(STAMP) $(PAGE)/.installed
	@$(PAGE)/venv/bin/python tests/page/run.py $(ARGS)

$(PAGE)/.installed: tests/page/requirements.txt
	@command -v npm >/dev/null || { echo "npm is needed, for axe-core (Debian/Ubuntu: apt install npm)"; exit 1; }
	@test -x $(PAGE)/venv/bin/python || $(PYTHON) -m venv $(PAGE)/venv
	@$(PAGE)/venv/bin/python -m pip install -q --disable-pip-version-check -r tests/page/requirements.txt
	@npm install --silent --no-audit --no-fund --prefix $(PAGE) axe-core
	@touch $@

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/imports.py
	@if [ -x $(BIN)/clang-format ]; then $(BIN)/clang-format --dry-run -Werror src/kvarn/native/*.[ch]pp src/kvarn/native/kernels/*.[ch]pp && echo "clang-format: clean"; \
	else echo "clang-format: not found, skipped"; fi

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i src/kvarn/native/*.[ch]pp src/kvarn/native/kernels/*.[ch]pp

bench: $(STAMP)
	@$(BIN)/python bench/bookkeeping.py
	@$(BIN)/python bench/waste.py
	@$(BIN)/python bench/write.py

bench-targets: $(STAMP)
	@$(BIN)/python bench/targets.py $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python tests/fuzz.py --seed $(SEED) --ops $(OPS)

# Every kernel of every instruction set with its memory and arithmetic watched, in an environment of its own.
SANE := build/sanitize
SANE_TESTS ?= tests/backends tests/test_arithmetic.py
# The portable kernels are slow there: long texts are left to the other sets, whose chunks and tiles are the same.
SANE_ONLY ?= not (portable and (257 or 511 or 512 or 513 or 2047 or 2048 or 2049))
sanitize: $(SANE)/.installed
	@ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	  $(SANE)/venv/bin/python -m pytest -p no:cacheprovider -k "$(SANE_ONLY)" $(SANE_TESTS) $(ARGS)

$(SANE)/.installed: $(NATIVE) $(wildcard src/kvarn/*.py src/kvarn/*/*.py src/kvarn/*/*/*.py)
	@test -x $(SANE)/venv/bin/python || $(PYTHON) -m venv $(SANE)/venv
	@echo "building kvarn with sanitizers into $(SANE)"
	@$(SANE)/venv/bin/python -m pip install -q --disable-pip-version-check '.[test]' \
	  -C cmake.define.KVARN_SANITIZE=ON -C build-dir=$(SANE)/objects
	@touch $@

soak: $(STAMP)
	@$(BIN)/python tests/soak.py --seed $(SEED) --requests $(REQUESTS) $(ARGS)

# Hostile files, schedules, faults and clients: some minutes, seeded; stops at the first fault.
attack: $(STAMP)
	@$(BIN)/python tests/attack_tokenizers.py --seed $(SEED)
	@$(BIN)/python tests/attack_models.py --seed $(SEED)
	@$(BIN)/python tests/attack_schedules.py --seed $(SEED)
	@$(BIN)/python tests/attack_lines.py --seed $(SEED)
	@$(BIN)/python tests/attack_http.py --seed $(SEED)
	@$(BIN)/python tests/attack_folder.py --seed $(SEED)

fuzz-attention: $(STAMP)
	@$(BIN)/python tests/fuzz_attention.py --seed $(SEED) --cases $(CASES)

$(STAMP): $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit("kvarn needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11.") if sys.version_info < (3, 11) else None'
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "kvarn needs a C++20 compiler and found none (looked for \$$CXX, c++, g++, clang++)."; \
	  echo "Install one (Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) and run make again."; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "building kvarn and installing its development tools into $(VENV)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist src/kvarn/backends/cuda/binaries .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
