"""A job: problems in, every rollout finished exactly once, its history kept."""
