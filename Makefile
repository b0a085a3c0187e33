.DEFAULT_GOAL := help
VENV := .venv/bin
NATIVE := $(wildcard rollout_worker/drafting/native/*.[ch]pp)
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/das-rollout

help:  ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')"

env:  ## make or update .venv (installs system packages where it may)
	@scripts/setup-env

demo: env  ## train the tiny policy (once) and run the quickstart job
	$(VENV)/rollout tiny-model
	$(VENV)/rollout run -f examples/quickstart.yaml --json .rollout/quickstart.json

test: env lint  ## lint, types, import contracts and the test suite
	$(VENV)/pytest

test-chaos: env  ## a job on several Ray nodes under fire (minutes; CHAOS_SEED, CHAOS_SECONDS)
	$(VENV)/pytest tests/chaos -s

kubernetes:  ## build the Kubernetes of test-cluster, the first time
	tests/support/cluster/build-kubernetes $(CACHE)/kubernetes

images: kubernetes  ## build the images that test-cluster runs, where they are not of this tree (after env)
	[ -n "$(KUBECONFIG)" ] || tests/support/cluster/build-images $(CACHE)/images $(CACHE)/kubernetes

test-cluster: env images  ## the operator on a real Kubernetes of its own, or on that of KUBECONFIG
	$(VENV)/pytest tests/cluster

test-native: env  ## the index under sanitizers of memory, undefined behaviour and data races
	scripts/test-native

lint: env  ## formatting, lint, types and import contracts
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/clang-format --dry-run -Werror $(NATIVE)
	$(VENV)/mypy
	$(VENV)/lint-imports

format: env  ## format and mend what can be mended
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .
	$(VENV)/clang-format -i $(NATIVE)

clean:  ## remove .venv, builds and job state
	rm -rf .venv build .rollout

.PHONY: help env demo test test-chaos kubernetes images test-cluster test-native lint format clean
