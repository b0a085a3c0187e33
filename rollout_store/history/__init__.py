"""The history: finished rollouts in Redis. Every suffix index is rebuilt from them."""
