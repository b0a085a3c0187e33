"""Finished rollouts in Redis: the truth that every draft index is rebuilt from."""
