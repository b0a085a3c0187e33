"""Everything of the operator that talks to the cluster: watches, API requests, and the head's status."""
