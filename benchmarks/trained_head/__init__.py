"""What a trained draft head adds to the drafts from earlier rollouts."""
