.DEFAULT_GOAL := help
VENV := .venv/bin
NATIVE := $(wildcard rollout_worker/drafting/native/*.[ch]pp)
CACHE := $(HOME)/.cache/das-rollout
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
FAST_TESTS := tests/api tests/doctor tests/policy tests/operator tests/drafting tests/packaging tests/project \
	$(addprefix tests/history/,test_eviction.py test_records.py test_window.py)
ENGINE_TESTS := tests/benchmarks tests/engine tests/job tests/tiny_model
# These depend on step times, or train a model: beside other engines they would fail or take many times as long.
SERIAL_TESTS := tests/engine/test_default_engine.py tests/job/test_announcer.py tests/job/test_run.py tests/trainers
OTHER_TESTS := $(filter-out $(ENGINE_TESTS) tests/trainers tests/chaos tests/cluster tests/support,$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)))
# vLLM's V2 model runner, whose Triton kernels run in Triton's interpreter; see docs/vllm.md.
V2 := PYTHONPATH=$(CURDIR)/.venv/triton:$(CURDIR)/tests/support/v2_on_cpus TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1
V2_TESTS := $(addprefix tests/engine/test_,adapters.py continuation.py cpu_kernels.py drafting.py drafting_loop.py kept_tokens.py lossless.py model_runner_v2.py prompt_logprobs.py raw_logprobs.py routed_experts.py stop_strings.py weights.py)
# The tests of a file, and files that share engines, run in one process: see tests/conftest.py.
PARALLEL := --no-loadscope-reorder --numprocesses

help:  ## Show this help.
	@sed -nE 's/^([a-z0-9-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "%-14s %s\n", $$1, $$2 }'

env:  ## Create or update .venv for development; install missing system packages if permitted.
	@scripts/setup-env

demo:  ## Create .venv, once, and run the quickstart job; begin here.
	@scripts/demo

test: env lint  ## Run lint, type checks, import contracts and the test suite.
	$(VENV)/pytest $(PARALLEL) 4 $(OTHER_TESTS)
	$(VENV)/pytest $(PARALLEL) 2 $(ENGINE_TESTS) $(addprefix --ignore=,$(SERIAL_TESTS))
	$(VENV)/pytest $(SERIAL_TESTS)
	$(MAKE) test-v2

test-fast: env  ## Run the tests that need no engine: client, policy, operator, drafting, history formats.
	$(VENV)/pytest $(PARALLEL) 4 $(FAST_TESTS)

test-v2: env  ## Test the engine with vLLM's V2 model runner, on Triton's interpreter.
	$(V2) $(VENV)/pytest $(PARALLEL) 2 $(V2_TESTS)

test-chaos: env  ## Kill parts of a job with several workers (CHAOS_SEED, CHAOS_SECONDS).
	$(VENV)/pytest tests/chaos -s

kubernetes:  ## Build the Kubernetes that test-cluster uses, if it is not cached.
	tests/support/cluster/build-kubernetes $(CACHE)/kubernetes

images: env kubernetes  ## Build the images that test-cluster runs, if they are outdated.
	[ -n "$(KUBECONFIG)" ] || tests/support/cluster/build-images $(CACHE)/images $(CACHE)/kubernetes

test-cluster: env images  ## Test the operator on its own Kubernetes, or on the cluster of KUBECONFIG.
	$(VENV)/pytest $(PARALLEL) 2 tests/cluster/virtual_nodes
	$(VENV)/pytest tests/cluster/real_node

test-native: env  ## Test the suffix index under address, undefined-behavior and thread sanitizers.
	scripts/test-native

lint: env  ## Check formatting, lint rules, types and import contracts.
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/clang-format --dry-run -Werror $(NATIVE)
	$(VENV)/mypy
	$(VENV)/mypy --python-version 3.10 --package rollout_api
	$(VENV)/lint-imports

format: env  ## Format the code and apply automatic fixes.
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .
	$(VENV)/clang-format -i $(NATIVE)

generate: env  ## Generate the CRDs, the dashboards, the reference pages, and the images' requirements.
	$(VENV)/python scripts/crd.py
	$(VENV)/python scripts/manifest_docs.py
	$(VENV)/python scripts/dashboards.py
	{ $(VENV)/typer rollout_tools.cli.main utils docs --name rollout --title "Command line"; \
	  $(VENV)/typer rollout_store.history_service.cli utils docs --name rollout-history; } > docs/cli.md
	$(VENV)/python scripts/metrics_docs.py
	$(VENV)/python -m scripts.sizing_docs
	$(VENV)/python -m scripts.performance_docs
	$(VENV)/python scripts/image_requirements.py

docs: env  ## Build the documentation site into site/.
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs build --strict

docs-serve: env  ## Serve the documentation site at http://127.0.0.1:8002 and follow changes of its pages.
	NO_MKDOCS_2_WARNING=1 $(VENV)/mkdocs serve --dev-addr 127.0.0.1:8002

wheels: env  ## Build the wheels of the client and of everything else into dist/.
	$(VENV)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist ./client .

chart: env  ## Lint and package the Helm chart into dist/ (REGISTRY: of the images that it names).
	$(VENV)/python -m scripts.release.chart $(REGISTRY)

docker-images:  ## Build all images with Docker (REGISTRY: what their names begin with).
	VERSION=$(VERSION) REGISTRY=$(REGISTRY) docker buildx bake --load

release-check: env  ## Check a release except for pushing it (STRICT=1: what cannot run here fails; TAG, REGISTRY).
	$(VENV)/python -m scripts.release $(if $(STRICT),--strict) $(if $(TAG),--tag $(TAG)) $(if $(REGISTRY),--registry $(REGISTRY))

set-version: env  ## Write VERSION=X.Y.Z to all files that state the version.
	$(VENV)/python -m scripts.release.versions $(VERSION)

clean:  ## Remove .venv, builds and job state.
	rm -rf .venv build dist site .rollout

.PHONY: help env demo test test-fast test-v2 test-chaos kubernetes images test-cluster test-native lint format \
	generate docs docs-serve wheels chart docker-images release-check set-version clean
