"""What a machine with one GPU and no network shows in half an hour: see ``gpu_proof`` in benchmarks/README.md."""
