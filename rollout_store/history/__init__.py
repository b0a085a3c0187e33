"""The history: finished rollouts in Redis, from which every suffix index is rebuilt."""
