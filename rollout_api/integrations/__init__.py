"""Adapters for RL trainers (see docs/integrations.md)."""
