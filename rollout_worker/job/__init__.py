"""A job: it accepts requests, finishes every rollout exactly once, and keeps the rollouts in a history."""
