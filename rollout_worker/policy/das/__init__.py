"""The draft policies of DAS (arXiv 2511.13841)."""
