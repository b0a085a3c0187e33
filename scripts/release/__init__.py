"""Checks of a release: everything that the release workflow does except for pushing."""
