.DEFAULT_GOAL := help
VENV := .venv/bin
NATIVE := $(wildcard rollout_worker/drafting/native/*.[ch]pp)
CACHE := $(HOME)/.cache/das-rollout
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# vLLM's V2 model runner, whose Triton kernels run in Triton's interpreter; see docs/vllm.md.
V2 = PYTHONPATH=$(if $(VLLM),$(CURDIR)/.venv/vllm-$(VLLM):)$(CURDIR)/.venv/triton:$(CURDIR)/tests/support/v2_on_cpus TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1
# Tests of a file, and tests that share engines, run in one process: see tests/conftest.py.
PARALLEL := --no-loadscope-reorder --numprocesses

help:  ## Show this help.
	@sed -nE 's/^([a-z0-9-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "%-14s %s\n", $$1, $$2 }'

env:  ## Create or update .venv for development; install missing system packages if permitted.
	@scripts/setup-env

demo:  ## Create .venv, once, and run the quickstart job; begin here.
	@scripts/demo

test: env lint  ## Run lint, type checks, import contracts, the tests without engines, and the most important with engines.
	$(VENV)/pytest $(PARALLEL) 4 -m "not (engine or serial or slow or nightly)"
	$(VENV)/pytest $(PARALLEL) 2 -m "engine and not (serial or slow or nightly)"

test-slow: env  ## Run the tests that make test leaves out, except for those of test-nightly.
	$(VENV)/pytest $(PARALLEL) 2 -m "slow and not (serial or nightly)"
	$(VENV)/pytest -m "serial and not nightly"
	$(MAKE) test-v2

test-v2: WHEN := not nightly
test-v2: env  ## Test the engine with vLLM's V2 model runner, on Triton's interpreter (WHEN=nightly: the other tests).
	$(V2) $(VENV)/pytest $(PARALLEL) 2 -m "v2 and $(WHEN)" tests/engine tests/drop_in

test-next: VLLM := 0.33.0
test-next: TESTS := tests/engine/test_model_runner_v2.py tests/server/test_openai_client.py \
	tests/drop_in/test_lossless.py tests/drop_in/test_settings.py \
	-k "greedy and (pipeline or one or ignore) or exact and one or completion_is_a_rollout or no_password"
test-next: env  ## Test drafting and rollout serve with a vLLM that has no CPU build (VLLM, TESTS: pytest's arguments).
	scripts/get-vllm $(VLLM)
	[ ! -d .venv/vllm-$(VLLM) ] || $(V2) $(VENV)/pytest $(TESTS)

test-nightly: env images  ## Run what takes minutes: trainings with TRL, tutorials, several machines, vLLM 0.33, a long chaos run.
	$(VENV)/pytest -m nightly
	$(MAKE) test-v2 WHEN=nightly
	$(MAKE) test-next
	$(VENV)/pytest -m nightly tests/cluster/real_node
	CHAOS_SECONDS=900 $(MAKE) test-chaos WHEN=

test-chaos: WHEN := not nightly
test-chaos: env  ## Strike jobs with faults: one with engines (CHAOS_SEED, CHAOS_SECONDS), others with stubs (WHEN=: all).
	$(VENV)/pytest $(if $(WHEN),-m "$(WHEN)") tests/chaos -s

kubernetes:  ## Build the Kubernetes that test-cluster uses, if it is not cached.
	tests/support/cluster/build-kubernetes $(CACHE)/kubernetes

images: env kubernetes  ## Build the images that test-cluster runs, if they are outdated.
	[ -n "$(KUBECONFIG)" ] || tests/support/cluster/build-images $(CACHE)/images $(CACHE)/kubernetes

image-check: env images  ## Check the images: packages, imports, and a job whose operator and CPU worker run in pods.
	$(VENV)/python -m scripts.release.images
	$(VENV)/pytest tests/cluster/real_node/test_end_to_end.py -k "helm or trainer"

test-cluster: env images  ## Test the operator on its own Kubernetes, or on the cluster of KUBECONFIG.
	$(VENV)/pytest $(PARALLEL) 2 tests/cluster/virtual_nodes
	$(VENV)/pytest -m "not nightly" tests/cluster/real_node

test-native: env  ## Test the suffix index under address, undefined-behavior and thread sanitizers.
	scripts/test-native

gpu-proof: env  ## Pack all that half an hour on a GPU without network needs (PYTHON312, TRACE, TOKENIZER).
	$(VENV)/python -m benchmarks.gpu_proof.pack $(if $(PYTHON312),--python $(PYTHON312)) --trace $(TRACE) $(if $(TOKENIZER),--tokenizer $(TOKENIZER))

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
	$(VENV)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist ./rollout_api .

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

.PHONY: help env demo test test-slow test-v2 test-next test-nightly test-chaos kubernetes images image-check test-cluster test-native gpu-proof lint format \
	generate docs docs-serve wheels chart docker-images release-check set-version clean
