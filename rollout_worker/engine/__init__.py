"""vLLM as the rollout engine: configuration, generation, drafting, weight updates and metrics."""
