"""Chooses how many tokens to draft for each rollout, from predicted step times and acceptance.

This package is pure. It depends on neither vLLM nor Redis nor the clock, so that an engine and the simulation
(:mod:`benchmarks.rollout_bench`) use the same code. docs/budgets.md explains the policies and derives their formulas.
"""
