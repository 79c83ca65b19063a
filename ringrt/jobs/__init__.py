"""YAML jobs: what they may say (schema), where tensors come from and go to (sources, outputs),
how a rank runs its part (run), and how it checks itself (verify)."""
