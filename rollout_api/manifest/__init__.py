"""The ``RolloutJob`` resource: the models that the CRD is generated from, and the validation of manifests."""
