"""The history: finished rollouts in Redis, from which every draft index is rebuilt."""
