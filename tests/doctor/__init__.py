"""Tests of ``rollout doctor``."""
