# Builds of all images: VERSION=X.Y.Z docker buildx bake [TARGET…]

variable "VERSION" {
  default = "dev"
}

# Registry and path of the images, such as ghcr.io/owner; without it, the names of the images stand alone.
variable "REGISTRY" {
  default = ""
}

# An index with CPU builds of torch, such as PyTorch's own, for the worker on CPUs.
variable "PIP_EXTRA_INDEX_URL" {
  default = ""
}

function "tag" {
  params = [name]
  result = notequal("", REGISTRY) ? "${REGISTRY}/${name}:${VERSION}" : "${name}:${VERSION}"
}

group "default" {
  targets = ["das-rollout-operator", "das-rollout-worker", "das-rollout-worker-cpu"]
}

target "das-rollout-operator" {
  dockerfile = "operator/Dockerfile"
  tags       = [tag("das-rollout-operator")]
}

target "das-rollout-worker" {
  dockerfile = "rollout_worker/Dockerfile"
  tags       = [tag("das-rollout-worker")]
}

target "das-rollout-worker-cpu" {
  inherits = ["das-rollout-worker"]
  tags     = [tag("das-rollout-worker-cpu")]
  args = {
    BASE                = "cpu"
    PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL
  }
}
