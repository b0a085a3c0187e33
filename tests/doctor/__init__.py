"""What ``rollout doctor`` finds."""
