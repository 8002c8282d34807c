# Each target installs what it needs into .venv. The machine must have Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# TIER=every_change: make e2e and make conformance run only the tests with that marker.
TIER ?=
TOOLS := $(abspath .cache/bin)
OUT ?= out
# More workers than processors: tests spend about a third of their time waiting for servers and processes.
TEST_WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)))
CHECK_WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
FRAMEWORKS_VENV := .venv-frameworks
NPM_TOKENIZERS := .cache/npm-tokenizers
AZURITE := .cache/azurite
MEGATRON := .cache/megatron-lm
NPM_TOKENIZERS_VERSION := 3.7.2
KNOWN_TOKENIZERS := $(addprefix $(NPM_TOKENIZERS)/,deepseek_v3 gemma3 gpt2 llama3 llama3_1 llama3_2 mistral_nemo qwen2_5 qwen3)
CONFORMANCE_TOKENIZERS := $(addprefix $(NPM_TOKENIZERS)/,llama3_1 qwen3 gemma3 deepseek_v3 gpt4o llama2)
CONFORMANCE_CORPUS := .cache/conformance/mixed.json
CONFORMANCE_MEGABYTES ?= 50
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' jobs/tokenmill/__init__.py)
IMAGE ?= localhost/tokenmill-jobs:$(VERSION)
IMAGE_TRAINING ?= localhost/tokenmill-training:$(VERSION)

.DEFAULT_GOAL := help
.PHONY: help run environment check test nightly lint format chart-tools azurite charts image image-training dist e2e e2e-megatron conformance conformance-packages known-tokenizers bench locks clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: locks/runtime.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tokenmill needs Python >= 3.11; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "this Python cannot make virtual environments; on Debian: apt install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/runtime.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed locks/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/dev.txt
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed locks/bench.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/bench.txt
	@touch $@

# The loaders use the packages of the frameworks, and are installed without dependencies: mosaicml-streaming declares an older transformers.
.venv-loaders/.installed: $(FRAMEWORKS_VENV)/.installed locks/bench-loaders.txt
	$(PYTHON) -m venv .venv-loaders
	.venv-loaders/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  -r locks/bench-loaders.txt
	$(FRAMEWORKS_VENV)/bin/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$(.venv-loaders/bin/python -c "import site; print(site.getsitepackages()[0])")/frameworks.pth
	@touch $@

run: $(VENV)/.installed ## Take a sample corpus to .bin/.idx, in OUT=out
	$(BIN)/tokenmill sample "$(OUT)"

$(VENV)/.installed-scan: $(VENV)/.installed locks/scan.txt
	$(PYTHON) -m venv .venv-scan
	.venv-scan/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/scan.txt
	@touch $@

azurite: # Azure's storage emulator, for the tests of az://, which are skipped without npm
	@if command -v npm >/dev/null; then $(MAKE) --silent $(AZURITE)/.installed; fi

$(AZURITE)/.installed: tests/azurite/package-lock.json
	mkdir -p $(AZURITE)
	cp tests/azurite/package.json tests/azurite/package-lock.json $(AZURITE)
	cd $(AZURITE) && npm ci --ignore-scripts --no-audit --no-fund --silent
	@touch $@

check: lint ## Check style and types and run the fast tests: under a minute, no Helm, no network
	$(BIN)/python -m pytest -n $(CHECK_WORKERS) --dist loadfile -m "not slow and not conformance and not e2e" \
	  tests/unit tests/contract tests/docs tests/bench

test: lint chart-tools azurite $(VENV)/.installed-scan ## Check the code and run all tests except those of a cluster and of Megatron-LM
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --maxprocesses 8 --dist loadfile -m "not conformance and not e2e"

nightly: ## Run all tests, also those of a cluster and of Megatron-LM, in hours: before a release
	bash .ci/run nightly

environment: $(VENV)/.installed-dev chart-tools # what make test and make e2e need

# ruff's cache does not notice that a directory was added, and directories decide the order of imports.
lint: $(VENV)/.installed-dev ## Check style, types, shell scripts, layers and prose
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/shellcheck jobs/tokenmill/submit/*.sh examples/*.sh .ci/run
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/prose.py

format: $(VENV)/.installed-dev ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

chart-tools: $(VENV)/.installed # Helm 3 and 4 and the other programs of the tests of charts in .cache/bin
	@$(BIN)/python tools/chart_tools.py

charts: $(VENV)/.installed chart-tools ## Write the generated files: the charts' values, schemas and READMEs; references
	$(BIN)/python tools/charts.py
	$(BIN)/python tools/reference.py

image: ## Build the image of the data stages with docker, podman or buildah (IMAGE=, BASE_IMAGE=, FLAGS=)
	@$(PYTHON) tools/build_image.py $(IMAGE) images/jobs/Containerfile $(VERSION) \
	  $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) $(FLAGS)

image-training: ## Build the image of training on NVIDIA's PyTorch (IMAGE_TRAINING=, BASE_IMAGE=, FLAGS=)
	@$(PYTHON) tools/build_image.py $(IMAGE_TRAINING) images/training/Containerfile $(VERSION) \
	  $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) $(FLAGS)

dist: $(VENV)/.installed chart-tools ## Build the files of a release into dist/: wheels, sdists, charts with their values/, checksums
	rm -rf dist
	$(BIN)/python tools/dist.py dist $(VERSION)
	@# Helm prints a line for each link that it replaces by the file.
	for values in charts/*/values.yaml; do \
	  printed=$$($(TOOLS)/helm package "$$(dirname "$$values")" -d dist 2>&1) || { echo "$$printed"; exit 1; }; \
	  echo "$$printed" | grep -v 'found symbolic link'; \
	done
	cd dist && sha256sum * > SHA256SUMS

e2e: $(VENV)/.installed-dev chart-tools ## Run the stages on the cluster of KUBECONFIG, whose nodes have the image
	$(if $(TIER),,$(BIN)/python tools/chart_tools.py --nightly)
	PATH="$$PATH:$(TOOLS)" $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	  -m "e2e$(if $(TIER), and $(TIER))" tests/e2e tests/slurm tests/buckets

# A separate target: it needs 6 GB of packages, minutes of two processors, and a node that is this machine.
e2e-megatron: $(VENV)/.installed-dev chart-tools $(MEGATRON)/.installed ## Train with Megatron-LM itself on that cluster, on the CPU, if its node is this machine
	TOKENMILL_MEGATRON_PYTHON=$(abspath $(FRAMEWORKS_VENV)/bin/python) \
	TOKENMILL_MEGATRON_TRAINING=$(abspath $(MEGATRON)) \
	PATH="$$PATH:$(TOOLS)" $(BIN)/python -m pytest -m e2e tests/e2e/test_megatron.py

# DeepSpeed is built with the installed torch. Megatron-Bridge declares a later Python, but its readers run on this one.
$(FRAMEWORKS_VENV)/.installed: locks/frameworks.txt locks/frameworks-no-deps.txt
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes \
	  -r locks/frameworks.txt
	DS_BUILD_OPS=0 $(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --ignore-requires-python --require-hashes -r locks/frameworks-no-deps.txt
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

# The training loop of Megatron-LM for the tests of real runs. The wheels are for Python 3.12 and a newer glibc; their Python
# sources run elsewhere, with tests/megatron_lm/sitecustomize.py and the compiled helpers of the frameworks' megatron-core.
$(MEGATRON)/.installed: locks/megatron-lm.txt $(FRAMEWORKS_VENV)/.installed
	rm -rf $(MEGATRON)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
	  --python-version 3.12 --only-binary :all: $(foreach glibc,24 28 39,--platform manylinux_2_$(glibc)_$$(uname -m)) \
	  --require-hashes --target $(MEGATRON) -r locks/megatron-lm.txt
	cp $(FRAMEWORKS_VENV)/lib/python3*/site-packages/megatron/core/datasets/helpers_cpp*.so \
	  $(MEGATRON)/megatron/core/datasets
	@touch $@

$(NPM_TOKENIZERS)/%: tools/fetch_tokenizer.py
	$(PYTHON) tools/fetch_tokenizer.py $* $(NPM_TOKENIZERS_VERSION) $@

$(CONFORMANCE_CORPUS): tests/bench/corpus.py $(VENV)/.installed
	$(BIN)/python tests/bench/corpus.py $@l $(CONFORMANCE_MEGABYTES)

conformance-packages: $(FRAMEWORKS_VENV)/.installed $(MEGATRON)/.installed $(CONFORMANCE_TOKENIZERS) # for conformance

known-tokenizers: $(VENV)/.installed $(KNOWN_TOKENIZERS) ## Check the encoders of the tokenizers that people use, after a change of the locks
	$(BIN)/python tools/known_tokenizers.py sample=jobs/tokenmill/pipelines/sample/tokenizer $(KNOWN_TOKENIZERS)

conformance: $(VENV)/.installed-dev conformance-packages $(if $(TIER),,$(KNOWN_TOKENIZERS)) $(CONFORMANCE_CORPUS) ## Compare with Megatron-LM and the other frameworks (6 GB to install)
	TOKENMILL_NPM_TOKENIZERS=$(abspath $(NPM_TOKENIZERS)) \
	TOKENMILL_CONFORMANCE_CORPUS=$(abspath $(dir $(CONFORMANCE_CORPUS))) \
	TOKENMILL_MEGATRON_PYTHON=$(abspath $(FRAMEWORKS_VENV)/bin/python) \
	TOKENMILL_MEGATRON_TRAINING=$(abspath $(MEGATRON)) \
	  $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder \
	  -m "conformance$(if $(TIER), and $(TIER))" $(FLAGS)

bench: $(VENV)/.installed-dev $(VENV)/.installed-bench .venv-loaders/.installed $(foreach name,llama3_1 qwen3 gemma3,$(NPM_TOKENIZERS)/$(name)) ## Measure speed against the usual alternatives (FLAGS="--only extract --rounds 5")
	$(BIN)/python -m tests.bench --tokenizers $(NPM_TOKENIZERS) --alternatives .venv-bench/bin/python \
	  --loaders .venv-loaders/bin/python $(FLAGS)

locks: $(VENV)/.installed ## Update the pinned dependencies, with hashes
	$(BIN)/python tools/lock.py

clean: ## Remove all files that make made, including the sample's output
	rm -rf $(VENV) $(FRAMEWORKS_VENV) .venv-bench .venv-loaders .venv-scan .cache out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
