"""vLLM as the rollout engine: how it is started, drafted for, reloaded and measured."""
