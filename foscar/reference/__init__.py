"""The PyTorch backend: runs on any device, and is the specification that every kernel is tested against."""
