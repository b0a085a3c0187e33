"""The ``RolloutJob`` resource: models from which the CRD is generated, and the validation of manifests."""
