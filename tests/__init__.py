"""Tests, by concept."""
