"""How many tokens to draft for which rollout: what steps cost, how long rollouts will be, and what a draft is worth.

Pure: it knows neither vLLM nor Redis nor time, and runs the same in an engine and in a simulation
(:mod:`benchmarks.makespan`). docs/budgets.md explains it and derives its formulas.
"""
