"""`ringrt bench`: the kernel and the ring beside PyTorch, call by call in one process."""
